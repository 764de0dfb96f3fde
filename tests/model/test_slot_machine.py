"""Random schedulers, workers and deliverers of returns that stop between any two of their steps.

An admission is decided in one step, claimed in another, confirmed in a third; what a run gives back
is read, delivered and removed in three more. Steps come late, twice, or never. Whatever happens, a
run has its slot, no policy has more runs than its cap, and its window knows every start.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowfabric.core.contracts.leases import Candidate, Claim, ClaimGrant
from flowfabric.core.errors import ContentionError, StateError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import quota_partition
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.claims import claim_args, read_claims
from flowfabric.scheduler.admission import Admissions, Decision
from flowfabric.scheduler.grants import WorkerGrants
from tests.model.harness import T0, Harness
from tests.model.running import live
from tests.support import lua_keys
from tests.support.admission import limited, quota
from tests.support.engine import LANE, Engine
from tests.support.flows import without_followups
from tests.support.scanning import idle
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "100"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "80"))
WINDOW_MS = 60_000
MOST_REPLAYS = 10
LONG_MS = 10**8
which = st.integers(0, 63)
T = TypeVar("T")


class Stopping(RuleBasedStateMachine):
    """Four executions under two policies: a cap of 1, and a cap of 2 with a rate of 3."""

    harness: ClassVar[Harness]

    @property
    def backend(self) -> ValkeyBackend:
        return self.harness.backend

    def ask(self, work: Any) -> Any:
        return self.harness.run(work)

    @initialize()
    def start(self) -> None:
        self.harness.reset()
        self.now = T0
        self.engine = Engine(self.backend)
        self.ask(without_followups(self.engine))
        self.admissions = Admissions(self.backend)
        self.policies = {
            self.ask(quota(self.engine, cap=1)): (0, 1),
            self.ask(quota(self.engine, rate=3, cap=2)): (3, 2),
        }
        self.ids: dict[ExecutionId, str] = {}
        self.looks: list[Sequence[Candidate]] = []
        self.decisions: list[Decision] = []
        self.failed: list[tuple[Decision, list[ExecutionId]]] = []
        self.grants: list[ClaimGrant] = []
        self.claims: dict[ExecutionId, Claim] = {}
        self.lost: set[ExecutionId] = set()
        self.ended: set[ExecutionId] = set()
        self.replays = Counter[ExecutionId]()
        self.unconfirmed: list[Claim] = []
        self.deliveries: list[list[str]] = []
        self.admitted_at: dict[tuple[ExecutionId, int], int] = {}
        self.started: dict[ExecutionId, int] = {}
        for policy in (*self.policies, *self.policies):
            self.ids[self.ask(limited(self.engine, quota=policy))] = policy

    @property
    def want(self) -> ClaimRequest:
        return self.engine.want(ttl=100 * LONG_MS)

    def pick(self, some: Sequence[T], number: int) -> T:
        return some[number % len(some)]

    def adopt(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            each = claim.execution_id
            self.claims[each] = claim
            self.lost.discard(each)
            if claim.handle.kind != "reclaimed":
                # An operator's or an unrecorded one counts from now on.
                self.started[each] = self.admitted_at.get((each, claim.run), self.now)

    @rule(
        step=st.sampled_from(
            [
                *("decide", "decide", "decide", "claim", "claim", "leave", "leave"),
                *("deliver", "deliver", "deliver", "grant", "grant", "claim_granted"),
                *("cancel_granted", "cancel_granted", "replay"),
                *("roll_back", "roll_back", "confirm", "scan", "advance"),
            ]
        ),
        number=which,
    )
    def step(self, step: str, number: int) -> None:
        getattr(self, step)(number)

    # --- schedulers and workers ---------------------------------------------------------------

    def look(self) -> None:
        """Candidates for admission; what lost its lease is reclaimed without."""
        found = self.ask(self.backend.claims.claim_many(self.want, self.tag, 10))
        self.adopt(found.claims)
        if found.needing:
            self.looks = [*self.looks[-2:], found.needing]

    def decide(self, number: int) -> None:
        fresh = number % 3 > 0
        if fresh or not self.looks:
            self.look()
        if not self.looks:
            return
        asked = self.looks[-1] if fresh else self.pick(self.looks, number)
        decision: Decision = self.ask(self.admissions.decide(asked, slot_ttl_ms=LONG_MS))
        for each in decision.admitted:
            self.admitted_at.setdefault((each.execution_id, each.run), self.now)
        self.decisions.append(decision)

    def claim(self, number: int) -> None:
        if not self.decisions:
            return
        decision = self.decisions.pop(number % len(self.decisions))
        given = [part for each in decision.admitted for part in (each.execution_id, each.run)]
        if not given:
            return
        args = (*claim_args(self.want, len(decision.admitted), new_uuid()), *given)
        tag = decision.admitted[0].execution_id.tag
        reply = self.ask(self.backend.calls.fcall("ff_claim_admitted", tag, args, op="test"))
        claims = read_claims(self.want, reply[2])
        self.adopt(claims)
        self.unconfirmed += claims
        taken = {claim.execution_id for claim in claims}
        ids = [each.execution_id for each in decision.admitted]
        self.failed.append((decision, [each for each in ids if each not in taken]))
        if number % 2:
            self.confirm_all()

    def roll_back(self, number: int) -> None:
        if not self.failed and not self.decisions:
            return
        if not self.failed:
            decision = self.decisions.pop(number % len(self.decisions))
            self.failed.append((decision, [each.execution_id for each in decision.admitted]))
        self.ask(self.admissions.undo(*self.failed.pop(number % len(self.failed))))

    def confirm(self, number: int) -> None:
        if not self.unconfirmed:
            return
        claim = self.unconfirmed.pop(number % len(self.unconfirmed))
        policy = self.ids[claim.execution_id]
        confirm = self.backend.quotas.confirm_many
        self.ask(confirm(policy, [claim.execution_id], runs=[claim.run]))

    def confirm_all(self) -> None:
        while self.unconfirmed:
            self.confirm(0)

    def grant(self, _: int) -> None:
        """For a worker that claims through a server; what is refused is held back."""
        grants = WorkerGrants(self.backend)
        found = self.ask(grants.claim_for_worker(LANE, "v", "v-1", grant_ttl_ms=60_000))
        self.ask(grants._admissions.aclose())
        if isinstance(found, ClaimGrant):
            ids = [found.execution_id]
            (candidate,) = self.ask(self.backend.admission.read_candidates(ids))
            self.admitted_at.setdefault((found.execution_id, candidate.run), self.now)
            self.grants.append(found)

    def claim_granted(self, number: int) -> None:
        if not self.grants:
            return
        grant = self.grants.pop(number % len(self.grants))
        if grant.execution_id in self.ended:
            return
        claims = self.backend.claims
        options: dict[str, Any] = {"worker_id": "v", "worker_instance_id": "v-1"}
        options["lease_ttl_ms"] = 100 * LONG_MS
        for claim in (claims.claim_execution, claims.claim_resumed_execution):
            # It was cancelled and replayed since, or it needs the other call.
            with contextlib.suppress(ContentionError, StateError):
                self.adopt([self.ask(claim(grant, **options))])
                return

    # --- runs ---------------------------------------------------------------------------------

    def leave(self, number: int) -> None:
        if not self.claims:
            return
        how = self.pick(("delay", "delay", "complete", "cancel", "revoke", "renew"), number)
        each = self.pick(sorted(self.claims), number)
        claim, executions = self.claims[each], self.backend.executions
        if each in self.lost:
            how = "cancel"
        if how == "renew":
            self.ask(self.backend.leases.renew_many([claim.handle]))
            self.ask(self.backend.drains.finish())
            return
        if how == "revoke":
            self.ask(self.backend.leases.revoke_lease(each))
            self.lost.add(each)
            return
        del self.claims[each]
        self.lost.discard(each)
        if how == "delay":
            self.ask(executions.delay(claim.handle, 1))
            return
        self.ended.add(each)
        if how == "complete":
            self.ask(executions.complete(claim.handle))
        else:
            self.ask(executions.cancel_execution(each))

    def cancel_granted(self, number: int) -> None:
        if not self.grants:
            return
        each = self.pick(self.grants, number).execution_id
        if each not in self.claims and each not in self.ended:
            self.ask(self.backend.executions.cancel_execution(each))
            self.ended.add(each)
            if number % 2:
                self.run_again(each)

    def replay(self, number: int) -> None:
        if self.ended:
            self.run_again(self.pick(sorted(self.ended), number))

    def run_again(self, each: ExecutionId) -> None:
        self.replays[each] += 1
        if self.replays[each] <= MOST_REPLAYS:
            self.ended.discard(each)
            self.ask(self.backend.executions.replay_execution(each))

    # --- what runs give back ------------------------------------------------------------------

    @property
    def tag(self) -> str:
        return self.engine.new_id().tag

    def deliver(self, number: int) -> None:
        """By a deliverer that may have been slow, or may end before it removes the entries."""
        key = keys.index(self.tag, "returns")
        found = self.ask(self.backend.transport.call("ZRANGE", key, 0, -1))
        if found:
            self.deliveries = [*self.deliveries[-2:], [entry.decode() for entry in found]]
        if number % 2:
            self.ask(self.backend.admission.deliver_returns(self.tag))
        elif self.deliveries:
            entries = self.pick(self.deliveries, number // 2)
            for _, policy, run, each in (entry.split("|") for entry in entries):
                release = self.backend.quotas.release_many
                self.ask(release(policy, [ExecutionId(each)], runs=[int(run)]))

    def scan(self, _: int = 0) -> None:
        for scanner in ("unblock", "quota_reconciler"):
            assert self.ask(idle(self.engine).scan_once(scanner)).errors == 0

    def advance(self, number: int) -> None:
        """Slots do not end here: that is what a process that stops for long risks."""
        self.confirm_all()
        self.grants = []
        self.now += self.pick((1, 1000, 30_000), number)
        self.harness.freeze(self.now)

    # --- what holds at any time ---------------------------------------------------------------

    @invariant()
    def runs_have_slots_and_starts_are_counted(self) -> None:
        if hasattr(self, "started"):
            for policy, limits in self.policies.items():
                self.ask(self.check(policy, *limits))

    async def after(self, key: str, moment: int) -> set[str]:
        found: Any = await self.backend.transport.call(
            "ZRANGE", key, f"({moment}", "+inf", "BYSCORE"
        )
        return {member.decode() for member in found}

    async def check(self, policy: str, rate: int, cap: int) -> None:
        tag = f"{{q:{quota_partition(policy, self.backend.counts)}}}"
        active = {each for each in self.claims if self.ids[each] == policy}
        assert active <= await self.after(keys.quota_slots(tag, policy), self.now)
        assert len(active) <= cap
        if rate:
            edge = self.now - WINDOW_MS
            recent = {
                each for each, at in self.started.items() if self.ids[each] == policy and at > edge
            }
            assert recent <= await self.after(lua_keys.quota_window(tag, policy), edge)
            assert len(recent) <= rate

    def teardown(self) -> None:
        """Nothing is left when all runs are over and all returns are delivered."""
        if hasattr(self, "started"):
            for each in self.claims:
                self.ask(self.backend.executions.cancel_execution(each))
            self.harness.freeze(self.now + 2 * LONG_MS)
            self.scan()
            for policy in self.policies:
                status = self.ask(self.backend.quotas.get_quota_status(policy))
                assert (status.window_count, status.slots_held) == (0, 0)


@pytest.mark.timeout(180 if EXAMPLES <= 100 else 0)
def test_processes_that_stop_anywhere(valkey: TestServer, request: pytest.FixtureRequest) -> None:
    live(Stopping, valkey.url, request, examples=EXAMPLES, steps=STEPS)
