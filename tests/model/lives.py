"""The rules: every operation on any execution, with any lease ever handed out.

Numbers that rules draw choose a target: mostly one where the operation does something, now and then
any that ever was, so that refusals are compared too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowfabric.core.capabilities import offered_csv
from flowfabric.core.contracts.executions import Created, NewExecution
from flowfabric.core.contracts.leases import Claim, ClaimedMany, ClaimGrant, Granted, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from tests.model.harness import T0, Harness, lease_of, stored, word
from tests.model.model import Model
from tests.model.observe import Observer
from tests.model.parts import EXPIRED, PAUSED, REVOKED, Execution, Lease, Offer, Policy
from tests.support.leaks import find_leaks

TTL = 30_000
GRANT_TTL = 600_000
MAX_EXECUTIONS = 5

POLICIES = [
    Policy(),
    Policy(max_retries=2, backoff_ms=1000, attempt_timeout_ms=200_000),
    Policy(max_retries=1, backoff_ms=0, attempt_timeout_ms=45_000, retry_on_timeout=True),
    Policy(max_reclaims=1, attempt_timeout_ms=100_000),
    Policy(max_reclaims=0),
    Policy(lifetime_ms=90_000, max_replays=1),
    Policy(needs_gpu=True, max_retries=3, backoff_ms=10, attempt_timeout_ms=70_000),
]
STORED = {policy: stored(policy) for policy in POLICIES}

anything = st.integers(0, 11)
workers = st.integers(1, 2)
namespaces = st.sampled_from(["default", "default", "acme"])
ANY, KNOWING = Offer(gpu=True), Offer(gpu=True, tasks=("job", "other"), no_others=True)
OFFERS = [ANY, ANY, KNOWING, KNOWING, Offer(), Offer(gpu=True, tasks=("job",))]
offers = st.builds(
    replace,
    st.sampled_from([*OFFERS, Offer(gpu=True, tasks=("other",), no_others=True)]),
    serves=namespaces,
)


def eligible(held: Execution) -> bool:
    return held.code[2] == "e"


def lost(held: Execution) -> bool:
    return held.code in (EXPIRED, REVOKED)


def claimable(held: Execution) -> bool:
    return eligible(held) or lost(held)


def leased(held: Execution) -> bool:
    return held.leased


def runnable(held: Execution) -> bool:
    return held.phase == "runnable"


def ended(held: Execution) -> bool:
    return held.phase == "terminal"


def unended(held: Execution) -> bool:
    return held.phase != "terminal"


def timed(held: Execution) -> bool:
    return held.timer is not None or held.deadline is not None


def delayed(held: Execution) -> bool:
    return held.delay_until is not None


def wanted(worker: int, offer: Offer) -> ClaimRequest:
    gpu = ("gpu",) if offer.gpu else ()
    csv = offered_csv(gpu, offer.tasks, no_others=offer.no_others)
    return ClaimRequest(
        *("default", f"w{worker}", f"w{worker}-1"), capabilities=csv, namespaces=(offer.serves,)
    )


def granted(offer: Offer) -> dict[str, Any]:
    return {"worker_capabilities": ["gpu"] if offer.gpu else [], "worker_tasks": offer.tasks}


class Lives(RuleBasedStateMachine):
    """A few executions living at once."""

    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.harness.reset()
        self.backend = self.harness.backend
        self.backend.places.known_namespaces.clear()
        self.model = Model(T0)
        self.tag = ExecutionId.solo("default", self.backend.counts).tag
        self.observer = Observer(self.backend, self.tag)
        self.known: list[ExecutionId] = []
        self.handles: list[Handle] = []
        self.grants: dict[ExecutionId, ClaimGrant] = {}

    # --- choosing and comparing -------------------------------------------------------------

    def some(self, likely: Callable[[Execution], bool]) -> bool:
        return any(likely(held) for held in self.model.executions.values())

    def one(self, number: int, likely: Callable[[Execution], bool]) -> ExecutionId:
        fitting = [item for item, held in self.model.executions.items() if likely(held)]
        choice = fitting if fitting and number % 6 else self.known
        return choice[number % len(choice)]

    def handle(self, number: int) -> Handle:
        def current(handle: Handle) -> bool:
            held = self.model.executions.get(handle.execution_id)
            return held is not None and held.leased and held.epoch == handle.lease_epoch

        live = [handle for handle in self.handles if current(handle)]
        choice = live if live and number % 3 else self.handles
        return choice[-1 - number % len(choice)]

    def answer(self, work: Awaitable[Any]) -> Any:
        return self.harness.answer(work)

    def agree(self, actual: Any, expected: Any) -> None:
        assert actual == expected, f"the engine says {actual}, the model {expected}"

    def took(self, claim: Claim) -> None:
        self.handles.append(claim.handle)
        self.model.bind(lease_of(claim.handle))

    # --- creating and claiming --------------------------------------------------------------

    @initialize(policies=st.lists(st.sampled_from(POLICIES), min_size=2, max_size=3))
    def begin(self, policies: list[Policy]) -> None:
        for policy in policies:
            self.submit(policy, 0, None, "default")

    @precondition(lambda self: len(self.known) < MAX_EXECUTIONS)
    @rule(
        policy=st.sampled_from(POLICIES),
        priority=st.sampled_from([0, 0, 1, 9000]),
        delay=st.sampled_from([None, None, -5, 1000]),
        namespace=namespaces,
    )
    def create(self, policy: Policy, priority: int, delay: int | None, namespace: str) -> None:
        self.submit(policy, priority, delay, namespace)

    def submit(self, policy: Policy, priority: int, delay: int | None, namespace: str) -> None:
        # Not random: ids decide between equals, and an example must run the same way twice.
        count = len(self.known)
        uuid = f"{count * 2654435761 % 2**32:08x}-0000-4000-8000-{count:012x}"
        execution_id = ExecutionId.deterministic_solo("default", uuid, self.backend.counts)
        until = None if delay is None else self.model.now + delay
        new = NewExecution(
            execution_id=execution_id,
            execution_kind="job",
            namespace=namespace,
            priority=priority,
            delay_until=until,
            policy=STORED[policy],
        )
        outcome = self.answer(self.backend.executions.create_execution(new))
        expected = self.model.create(execution_id, policy, priority, until, namespace)
        if isinstance(outcome, Created):
            self.known.append(execution_id)
            outcome = outcome.public_state.value
        self.agree(outcome, expected)

    @precondition(lambda self: self.some(claimable))
    @rule(count=st.sampled_from([1, 2, 9, 9]), worker=workers, offer=offers)
    def claim(self, count: int, worker: int, offer: Offer) -> None:
        want = wanted(worker, offer)
        claimed = self.answer(self.backend.claims.claim_many(want, self.tag, count))
        self.took_all(claimed, want, offer, count)

    @precondition(lambda self: self.handles)
    @rule(
        numbers=st.lists(anything, min_size=1, max_size=2),
        count=st.sampled_from([0, 1, 2, 9]),
        worker=workers,
        offer=offers,
    )
    def complete_and_claim(self, numbers: list[int], count: int, worker: int, offer: Offer) -> None:
        want = wanted(worker, offer)
        handles = [self.handle(number) for number in numbers]
        items = [Completion(handle, b"f") for handle in handles]
        outcomes, claimed = self.answer(
            self.backend.claims.complete_and_claim(self.tag, items, want, count)
        )
        self.agree(
            [error.code if error else "completed" for error in outcomes],
            [self.model.complete(lease_of(handle), b"f") for handle in handles],
        )
        self.took_all(claimed, want, offer, count)

    def took_all(self, claimed: ClaimedMany, want: ClaimRequest, offer: Offer, count: int) -> None:
        """Compare what a claim took and what it left."""
        expected = self.model.claim_many(count, want.worker_instance_id, TTL, offer)
        actual = [
            (
                claim.execution_id,
                claim.handle.kind,
                claim.attempt_type,
                claim.attempt_index,
                claim.handle.lease_epoch,
            )
            for claim in claimed.claims
        ]
        self.agree(actual, expected)
        for claim in claimed.claims:
            self.took(claim)
        left = self.model.takeable(offer)
        if len(actual) < count:
            assert claimed.remaining == left == 0
        elif count:
            # What it did not look at may turn out to be reserved.
            assert claimed.remaining >= left

    @precondition(lambda self: self.some(eligible))
    @rule(number=anything, offer=offers)
    def grant(self, number: int, offer: Offer) -> None:
        execution_id = self.one(number, eligible)
        outcome = self.answer(
            self.backend.claims.issue_claim_grant(
                execution_id,
                worker_id="w1",
                worker_instance_id="w1-1",
                grant_ttl_ms=GRANT_TTL,
                **granted(offer),
            )
        )
        expected = self.model.issue_grant(execution_id, GRANT_TTL, offer)
        if isinstance(outcome, ClaimGrant):
            self.grants[execution_id] = outcome
            outcome = "granted"
        self.agree(outcome, expected)

    @precondition(lambda self: self.grants)
    @rule(number=anything)
    def use_grant(self, number: int) -> None:
        held = list(self.grants.values())[-1 - number % len(self.grants)]
        now = self.model.executions.get(held.execution_id)
        resumed = now is not None and now.code == PAUSED
        claim = (
            self.backend.claims.claim_resumed_execution
            if resumed
            else self.backend.claims.claim_execution
        )
        outcome = self.answer(
            claim(held, worker_id="w1", worker_instance_id="w1-1", lease_ttl_ms=TTL)
        )
        expected = self.model.use_grant(held.execution_id, "w1-1", TTL)
        if isinstance(outcome, Claim):
            self.took(outcome)
            outcome = "claimed"
        self.agree(outcome, expected)

    @precondition(lambda self: self.some(lost))
    @rule(number=anything, worker=workers, offer=offers)
    def reclaim(self, number: int, worker: int, offer: Offer) -> None:
        execution_id = self.one(number, lost)
        who: dict[str, Any] = {"worker_id": f"w{worker}", "worker_instance_id": f"w{worker}-1"}
        outcome = self.answer(
            self.backend.claims.issue_reclaim_grant(execution_id, **who, **granted(offer))
        )
        if isinstance(outcome, Granted):
            outcome = self.answer(
                self.backend.claims.reclaim_execution(outcome.grant, **who, lease_ttl_ms=TTL)
            )
        expected = self.model.reclaim(execution_id, f"w{worker}-1", TTL, offer)
        if isinstance(outcome, Claim):
            self.took(outcome)
            outcome = "claimed"
        self.agree(word(outcome), expected)

    # --- the holder's verbs -----------------------------------------------------------------

    def verb(
        self, number: int, work: Callable[[Handle], Awaitable[Any]], model: Callable[[Lease], str]
    ) -> None:
        handle = self.handle(number)
        self.agree(word(self.answer(work(handle))), model(lease_of(handle)))

    @precondition(lambda self: self.handles)
    @rule(number=anything, result=st.sampled_from([None, b"", b"r"]))
    def complete(self, number: int, result: bytes | None) -> None:
        self.verb(
            number,
            lambda handle: self.backend.executions.complete(handle, result),
            lambda lease: self.model.complete(lease, result),
        )

    @precondition(lambda self: len(self.handles) > 1)
    @rule(numbers=st.lists(anything, min_size=2, max_size=3))
    def complete_many(self, numbers: list[int]) -> None:
        handles = [self.handle(number) for number in numbers]
        outcomes = self.answer(
            self.backend.executions.complete_many([Completion(handle, b"m") for handle in handles])
        )
        expected = [self.model.complete(lease_of(handle), b"m") for handle in handles]
        actual = [item.code if isinstance(item, EngineError) else item.kind for item in outcomes]
        self.agree(actual, expected)

    @precondition(lambda self: self.handles)
    @rule(number=anything, category=st.sampled_from(["transient", "transient", "permanent"]))
    def fail(self, number: int, category: str) -> None:
        self.verb(
            number,
            lambda handle: self.backend.executions.fail(handle, "boom", category),
            lambda lease: self.model.fail(lease, category),
        )

    @precondition(lambda self: self.handles)
    @rule(number=anything)
    def cancel_by_worker(self, number: int) -> None:
        self.verb(number, self.backend.executions.cancel, self.model.cancel_by_worker)

    @precondition(lambda self: self.handles)
    @rule(number=anything, wait=st.sampled_from([-1, 0, 1, 5000]))
    def delay(self, number: int, wait: int) -> None:
        until = self.model.now + wait
        self.verb(
            number,
            lambda handle: self.backend.executions.delay(handle, until),
            lambda lease: self.model.delay(lease, until),
        )

    @precondition(lambda self: self.handles)
    @rule(number=anything)
    def release_unknown(self, number: int) -> None:
        self.verb(
            number,
            lambda handle: self.backend.executions.release_unknown(handle, "job"),
            self.model.release_unknown,
        )

    @precondition(lambda self: self.handles)
    @rule(number=anything)
    def wait_children(self, number: int) -> None:
        self.verb(number, self.backend.executions.wait_children, self.model.wait_children)

    @precondition(lambda self: self.handles)
    @rule(number=anything)
    def renew(self, number: int) -> None:
        self.verb(number, self.backend.leases.renew, self.model.renew)

    @precondition(lambda self: self.handles)
    @rule(number=anything, pct=st.integers(0, 100))
    def progress(self, number: int, pct: int) -> None:
        self.verb(
            number,
            lambda handle: self.backend.executions.progress(handle, pct),
            lambda lease: self.model.progress(lease, pct),
        )

    # --- operators --------------------------------------------------------------------------

    @precondition(lambda self: self.some(unended) and len(self.known) == MAX_EXECUTIONS)
    @rule(number=anything)
    def cancel(self, number: int) -> None:
        execution_id = self.one(number, unended)
        outcome = word(self.answer(self.backend.executions.cancel_execution(execution_id)))
        self.agree(outcome, self.model.cancel(execution_id))

    @precondition(lambda self: self.some(leased))
    @rule(number=anything)
    def revoke(self, number: int) -> None:
        execution_id = self.one(number, leased)
        outcome = word(self.answer(self.backend.leases.revoke_lease(execution_id)))
        self.agree(outcome, self.model.revoke(execution_id))

    @precondition(lambda self: self.some(ended))
    @rule(number=anything)
    def replay(self, number: int) -> None:
        execution_id = self.one(number, ended)
        outcome = word(self.answer(self.backend.executions.replay_execution(execution_id)))
        self.agree(outcome, self.model.replay(execution_id))

    @precondition(lambda self: self.some(runnable))
    @rule(number=anything, priority=st.sampled_from([0, 5]))
    def change_priority(self, number: int, priority: int) -> None:
        execution_id = self.one(number, runnable)
        outcome = word(self.answer(self.backend.executions.change_priority(execution_id, priority)))
        self.agree(outcome, self.model.change_priority(execution_id, priority))

    @rule(state=st.sampled_from(["active"] * 5 + ["paused", "draining", "disabled"]))
    def set_lane_state(self, state: str) -> None:
        # Closed lanes make dull lives: the next call opens it again.
        state = state if self.model.lane_state == "active" else "active"
        self.agree(
            self.answer(self.backend.lanes.set_lane_state("default", state)), self.model.lane_state
        )
        self.model.lane_state = state

    @rule(grace=st.sampled_from([0, 0, 1000, 50_000]))
    def set_reclaim_grace(self, grace: int) -> None:
        self.answer(self.backend.lanes.set_lane_config("default", reclaim_grace_ms=grace))
        self.model.reclaim_grace = grace

    # --- scanners and time ------------------------------------------------------------------

    def each(
        self,
        work: Callable[[list[ExecutionId]], Awaitable[Any]],
        model: Callable[[ExecutionId], str],
    ) -> None:
        """A scanner's call, on every execution there ever was."""
        self.agree(self.answer(work(self.known)), [model(item) for item in self.known])

    @precondition(lambda self: self.some(leased))
    @rule()
    def lease_scan(self) -> None:
        self.each(
            lambda ids: self.backend.upkeep.mark_lease_expired_if_due(self.tag, ids),
            self.model.mark_expired,
        )

    @precondition(lambda self: self.some(delayed))
    @rule()
    def delay_scan(self) -> None:
        self.each(
            lambda ids: self.backend.upkeep.promote_delayed(self.tag, "default", ids),
            self.model.promote,
        )

    @precondition(lambda self: self.some(timed))
    @rule(reason=st.sampled_from(list(ExpireReason)))
    def timer_scan(self, reason: ExpireReason) -> None:
        self.each(
            lambda ids: self.backend.upkeep.expire_execution(self.tag, reason, ids),
            lambda item: self.model.expire(item, reason.value),
        )

    @precondition(lambda self: self.some(ended))
    @rule()
    def retention_scan(self) -> None:
        self.each(
            lambda ids: self.backend.upkeep.trim_retention(self.tag, "default", ids),
            self.model.trim,
        )

    @rule(ms=st.sampled_from([1, 10, 1000, 5000]))
    def a_moment_passes(self, ms: int) -> None:
        self.pass_time(ms)

    @rule(ms=st.sampled_from([TTL - 1, TTL, TTL, 50_000, 100_000, GRANT_TTL, 86_400_000]))
    def a_long_time_passes(self, ms: int) -> None:
        self.pass_time(ms)

    def pass_time(self, ms: int) -> None:
        self.model.now += ms
        self.harness.freeze(self.model.now)

    # --- after every step -------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        self.harness.run(self.observer.compare(self.model))

    def teardown(self) -> None:
        assert self.harness.run(find_leaks(self.backend)) == []
