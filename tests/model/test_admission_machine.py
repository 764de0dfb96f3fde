"""Random lives of executions with budgets and quotas, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.model.admission_model import BudgetModel, LimitedRun, Limits, QuotaModel
from tests.model.harness import T0, Harness
from tests.model.running import live
from tests.support.admission import budget, quota, worker
from tests.support.engine import LANE, Engine
from tests.support.scanning import idle
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "40"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "40"))
which = st.integers(0, 63)
SLOT_MS = 5500
"""How long a slot lasts that no claim has confirmed."""


class Admitting(RuleBasedStateMachine):
    """A few executions that share two budgets and three quota policies."""

    harness: ClassVar[Harness]

    @property
    def backend(self) -> ValkeyBackend:
        return self.harness.backend

    @initialize()
    def start(self) -> None:
        self.harness.reset()
        self.now, self.count = T0, 0
        self.limits, self.claims = Limits(), dict[ExecutionId, Claim]()
        self.engine = Engine(self.backend)
        for limit in (3, 5):
            self.limits.budgets[self.ask(budget(self.engine, limit))] = BudgetModel(limit)
        for rate, cap in ((2, 0), (0, 2), (4, 1)):
            policy = self.ask(quota(self.engine, rate=rate, cap=cap))
            self.limits.quotas[policy] = QuotaModel(rate, cap)

    def ask(self, work: Any) -> Any:
        return self.harness.run(work)

    def some(self, number: int, *states: str) -> LimitedRun | None:
        found = self.limits.in_state(*states)
        return found[number % len(found)] if found else None

    @rule(budgets=st.integers(0, 3), number=st.integers(0, 3), priority=st.sampled_from([0, 0, 5]))
    def create(self, budgets: int, number: int, priority: int) -> None:
        """Ids in creation order: those of the same millisecond are claimed in this order."""
        self.count += 1
        uuid = f"00000000-0000-4000-8000-{self.count:012d}"
        execution_id = ExecutionId.parse(f"{self.engine.new_id().tag}:{uuid}")
        named = [each for n, each in enumerate(self.limits.budgets) if budgets >> n & 1]
        policy = ([None, *self.limits.quotas])[number]
        self.limits.runs[execution_id] = LimitedRun(
            execution_id, self.now - priority * 10**12, tuple(named), policy
        )
        self.ask(
            self.backend.executions.create_execution(
                NewExecution(
                    execution_id=execution_id,
                    execution_kind="job",
                    priority=priority,
                    policy=ExecutionPolicy(budget_ids=tuple(named), quota_policy_id=policy),
                )
            )
        )

    @rule(count=st.integers(1, 6))
    def claim(self, count: int) -> None:
        async def claim() -> list[Claim]:
            claims = worker(self.engine, count, ttl=10**9)
            try:
                return await claims.claim_many(count)
            finally:
                await claims.admissions.aclose()

        expected = self.limits.claim(count, self.now)
        found: list[Claim] = self.ask(claim())
        assert sorted(each.execution_id for each in found) == sorted(expected)
        self.claims |= {each.execution_id: each for each in found}
        self.note_retry_times()

    def note_retry_times(self) -> None:
        """What a full cap refuses tries again when the first slot without a claim ends, if any."""
        for run in self.limits.in_state("held"):
            if run.reason == "waiting_for_quota" and run.retry_at is None:
                info = self.ask(self.backend.reads.read_execution_info(run.execution_id))
                assert info.retry_at in {None, self.now + SLOT_MS}
                run.retry_at = info.retry_at

    @rule(number=which, how=st.sampled_from(["complete", "pause", "cancel"]), crash=st.booleans())
    def leave(self, number: int, how: str, crash: bool) -> None:
        run = self.some(number, "active")
        if run is None:
            return
        handle, executions = self.claims.pop(run.execution_id).handle, self.backend.executions

        async def leave() -> None:
            deliver = self.backend.calls.on_returns
            if crash:
                self.backend.calls.on_returns = lambda _: None
            try:
                if how == "complete":
                    await executions.complete(handle)
                elif how == "cancel":
                    await executions.cancel_execution(handle.execution_id)
                else:
                    await executions.delay(handle, self.now + 1000)
            finally:
                self.backend.calls.on_returns = deliver
            await self.backend.drains.finish()

        state = {"complete": "completed", "cancel": "cancelled", "pause": "delayed"}[how]
        run.due = self.now + 1000
        self.limits.leave(run, state, self.now, crash=crash)
        self.ask(leave())

    @rule(number=which)
    def cancel(self, number: int) -> None:
        run = self.some(number, "waiting", "held", "delayed")
        if run is None:
            return
        was_held, run.state = run.state == "held", "cancelled"
        self.ask(self.backend.executions.cancel_execution(run.execution_id))
        if was_held:
            # Its limits forget it: a delivery, which takes along what an earlier crash left.
            self.ask(self.backend.drains.finish())
            self.limits.give_back(list(self.limits.owed), self.now)

    @rule(number=which)
    def promote(self, number: int) -> None:
        run = self.some(number, "delayed")
        if run is not None and run.due <= self.now:
            run.state = "waiting"
            self.ask(
                self.backend.upkeep.promote_delayed(run.execution_id.tag, LANE, [run.execution_id])
            )

    @rule(number=which, amount=st.integers(1, 3))
    def spend(self, number: int, amount: int) -> None:
        budgets = list(self.limits.budgets)
        chosen = budgets[number % len(budgets)]
        held = self.limits.budgets[chosen]
        if held.used + amount <= held.limit:
            held.used += amount
        self.ask(self.backend.budgets.report_usage_admin(chosen, {"tokens": amount}))

    @rule(number=which)
    def reset(self, number: int) -> None:
        budgets = list(self.limits.budgets)
        chosen = budgets[number % len(budgets)]
        self.limits.budgets[chosen].used = 0
        self.limits.open_budget(chosen)
        self.ask(self.backend.budgets.reset_budget(chosen))

    @rule(ms=st.sampled_from([1, 1000, 30_000, 60_000]))
    def advance(self, ms: int) -> None:
        self.now += ms
        self.harness.freeze(self.now)

    @rule()
    def scan(self) -> None:
        self.limits.scan(self.now)
        result = self.ask(idle(self.engine).scan_once("unblock"))
        assert result.errors == 0

    @invariant()
    def same_as_the_model(self) -> None:
        if hasattr(self, "limits"):
            self.ask(self.compare())

    async def compare(self) -> None:
        reads = self.backend.reads
        for execution_id, run in self.limits.runs.items():
            info = await reads.read_execution_info(execution_id)
            assert info.public_state == run.public_state, run
            if run.state == "held":
                assert info.state_vector.blocking_reason == run.reason
                assert run.waits_for in info.blocking_detail
                assert info.retry_at == run.retry_at
        for policy, model in self.limits.quotas.items():
            model.trim(self.now)
            status = await self.backend.quotas.get_quota_status(policy)
            assert status.window_count == len(model.window)
            assert status.slots_held == len(model.slots)
            active = [run for run in self.limits.in_state("active") if run.quota == policy]
            assert not model.cap or len(active) <= model.cap
        ids = list(self.limits.runs)
        if ids:
            verdicts = await self.backend.upkeep.reconcile_execution_index(ids[0].tag, ids, "check")
            assert set(verdicts) == {"consistent"}


@pytest.mark.timeout(180 if EXAMPLES <= 100 else 0)
def test_admissions_live_like_the_model(valkey: TestServer, request: pytest.FixtureRequest) -> None:
    live(Admitting, valkey.url, request, examples=EXAMPLES, steps=STEPS)
