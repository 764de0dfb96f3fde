"""Random admissions under one quota policy, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.quotas import Admitted, Unlimited
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import quota_partition
from tests.model.harness import T0, Harness
from tests.model.quota_model import QuotaModel
from tests.model.running import live
from tests.support.engine import Engine
from tests.support.quotas import word
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "60"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "40"))
RUNNING, GONE = 3, 4

some = st.lists(st.integers(0, RUNNING + GONE - 1), min_size=1, max_size=6)
one = st.integers(0, RUNNING + GONE - 1)
limits = st.integers(0, 4)


class QuotaMachine(RuleBasedStateMachine):
    """Schedulers, workers, operators and the reconciler at one policy."""

    harness: ClassVar[Harness]

    @initialize(rate=limits, cap=limits, window=st.sampled_from([2, 10]))
    def begin(self, rate: int, cap: int, window: int) -> None:
        self.harness.reset()
        self.quotas = self.harness.backend.quotas
        self.name = new_uuid()
        self.model = QuotaModel(window * 1000, rate, cap, T0)
        self.changed = False
        self.ids = [ExecutionId.solo("default", self.harness.backend.counts) for _ in range(GONE)]
        self.ids += [self.harness.run(self._running()) for _ in range(RUNNING)]
        self.admitted: list[tuple[ExecutionId, str]] = []
        create = self.quotas.create_quota_policy(
            *(self.name,),
            window_seconds=window,
            max_requests_per_window=rate,
            max_concurrent=cap,
        )
        self.harness.run(create)

    async def _running(self) -> ExecutionId:
        engine = Engine(self.harness.backend)
        new = NewExecution(execution_id=engine.new_id(), execution_kind="job")
        await self.harness.backend.executions.create_execution(new)
        (claim,) = await engine.claim_all(1, ttl=10**9)
        return claim.handle.execution_id

    @rule(numbers=some, ttl=st.sampled_from([1, 1000, 5000]))
    def admit(self, numbers: list[int], ttl: int) -> None:
        ids = [self.ids[number] for number in numbers]
        answers: list[Any] = self.harness.run(
            self.quotas.admit_many(self.name, ids, slot_ttl_ms=ttl)
        )
        requests = {each.request_id for each in answers if isinstance(each, Admitted)}
        request = requests.pop() if requests else "none"
        assert not requests
        expected = [self.model.admit(each, request, ttl) for each in ids]
        found = ["unlimited" if isinstance(a, Unlimited) else word(a) for a in answers]
        assert found == [self.model.worded(each) for each in expected]
        for execution_id, answer in zip(ids, answers, strict=True):
            if isinstance(answer, Admitted):
                self.admitted.append((execution_id, answer.request_id))

    @rule(number=one)
    def confirm(self, number: int) -> None:
        self.harness.run(self.quotas.confirm_admission(self.name, self.ids[number]))
        self.model.confirm(self.ids[number])

    @rule(number=one)
    def release(self, number: int) -> None:
        self.harness.run(self.quotas.release_admission(self.name, self.ids[number]))
        self.model.release(self.ids[number])

    @rule(number=st.integers(0, 100))
    def roll_back(self, number: int) -> None:
        if not self.admitted:
            return
        execution_id, request = self.admitted[number % len(self.admitted)]
        self.harness.run(self.quotas.release_many(self.name, [execution_id], rollback=request))
        self.model.roll_back(execution_id, request)

    @rule(ms=st.sampled_from([1, 499, 501, 1500, 5500, 12_000]))
    def wait(self, ms: int) -> None:
        self.model.now += ms
        self.harness.freeze(self.model.now)

    @rule(rate=limits, cap=limits, window=st.sampled_from([2, 10]))
    def update(self, rate: int, cap: int, window: int) -> None:
        update = self.quotas.update_quota_policy(
            *(self.name,),
            window_seconds=window,
            max_requests_per_window=rate,
            max_concurrent=cap,
        )
        self.harness.run(update)
        self.changed |= (rate, window * 1000) != (self.model.rate, self.model.window_ms)
        self.model.rate, self.model.cap, self.model.window_ms = rate, cap, window * 1000

    @rule()
    def reconcile(self) -> None:
        partition = quota_partition(self.name, self.harness.backend.counts)
        outcome = self.harness.run(self.quotas.reconcile_quota_counters(partition))
        assert outcome.errors == 0
        self.model.reconcile({str(each) for each in self.ids[GONE:]})

    @invariant()
    def the_status_is_that_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        status = self.harness.run(self.quotas.get_quota_status(self.name))
        window, held = self.model.in_window(), self.model.held()
        assert (status.window_count, status.slots_held) == (len(window), len(held))
        assert status.oldest_entry_at == min(window.values(), default=None)

    @invariant()
    def no_window_holds_more_than_its_limit(self) -> None:
        if hasattr(self, "model") and self.model.rate and self.model.starts and not self.changed:
            assert self.model.most_in_any_window() <= self.model.rate


@pytest.mark.timeout(300)
def test_random_lives_of_a_policy(valkey: TestServer, request: pytest.FixtureRequest) -> None:
    live(QuotaMachine, valkey.url, request, examples=EXAMPLES, steps=STEPS)
