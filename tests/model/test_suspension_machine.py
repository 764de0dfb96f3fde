"""Random pauses and signals of a few executions, step by step against the model.

Run one seed again with `--hypothesis-seed=N`; run long with `FF_MODEL_EXAMPLES=2000`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from flowfabric.core.conditions import (
    AcceptedSignal,
    AllOf,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    referenced_waitpoint_keys,
)
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    Accepted,
    AlreadySatisfiedSuspension,
    DuplicateSignal,
    FreshWaitpoint,
    ResumePolicy,
    Suspended,
    UsePending,
)
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.model.harness import T0, Harness
from tests.model.running import live
from tests.model.suspension_model import TTL, Pause, Run, Waitpoint
from tests.support.server import TestServer

EXAMPLES = int(os.environ.get("FF_MODEL_EXAMPLES", "60"))
STEPS = int(os.environ.get("FF_MODEL_STEPS", "40"))
SECRET = "ab" * 32
LANE = "default"
WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}

names = st.sampled_from(["go", "no"])
keys = st.sampled_from("ab")
leaf: Any = st.one_of(
    st.builds(Single, keys, st.one_of(st.none(), names)),
    st.builds(
        Count,
        n=st.integers(1, 3),
        waitpoints=st.just(("a",)),
        count_kind=st.sampled_from([CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES]),
        signal_name=st.one_of(st.none(), names),
    ),
    st.builds(Count, n=st.integers(1, 2), waitpoints=st.just(("a", "b"))),
)
trees: Any = st.one_of(
    leaf,
    st.builds(AllOf, st.lists(leaf, min_size=1, max_size=3).map(tuple)),
    st.just(OperatorOnly()),
    st.just(TimeoutOnly()),
)
behaviors = st.sampled_from(["fail", "cancel", "expire", "auto_resume", "escalate"])
which = st.integers(0, 63)
sent = st.tuples(names, st.sampled_from("pq"), st.sampled_from(["", "", "once", "twice"]))

# What each act needs, and how often it is chosen.
Draws = dict[str, st.SearchStrategy[Any]]
ONE: Draws = {"number": which}
ACTS: dict[str, Draws] = {
    "create": {},
    "claim": ONE,
    "complete": ONE,
    "give_back": ONE,
    "cancel": ONE,
    "suspend": {
        **ONE,
        "tree": trees,
        "timeout": st.sampled_from([None, 0, 10, 500]),
        "behavior": behaviors,
        "delay": st.sampled_from([0, 0, 20]),
    },
    "create_waitpoint": {**ONE, "key": keys, "lifetime": st.sampled_from([5, 300])},
    "use_pending": {
        **ONE,
        "tree": trees,
        "timeout": st.sampled_from([None, 10]),
        "behavior": behaviors,
    },
    "signals": {**ONE, "sent": st.lists(sent, min_size=1, max_size=4)},
    "resume": ONE,
    "close_waitpoint": ONE,
    "wait": {"ms": st.sampled_from([1, 5, 20, 400])},
    "scan": {},
    "expire_waitpoint": ONE,
}
LIKELY = {
    "create": 2,
    "claim": 6,
    "suspend": 5,
    "create_waitpoint": 4,
    "use_pending": 4,
    "signals": 10,
    "wait": 2,
    "scan": 2,
}
WEIGHTED = [act for act in ACTS for _ in range(LIKELY.get(act, 1))]
NEED_WAITPOINT = frozenset({"use_pending", "signals", "close_waitpoint", "expire_waitpoint"})


class Pauses(RuleBasedStateMachine):
    """Up to three executions, one worker, one operator, one scanner."""

    harness: ClassVar[Harness]

    @initialize()
    def begin(self) -> None:
        self.harness.reset()
        self.backend: ValkeyBackend = self.harness.backend
        self.backend.places.known_places.clear()
        self.backend.places.known_namespaces.clear()
        self.harness.run(self.backend.meta.prepare())
        self.harness.freeze(T0)
        self.harness.run(self.backend.secrets.seed_at_boot(SECRET))
        self.now = T0
        self.runs: dict[ExecutionId, Run] = {}
        self.handles: dict[ExecutionId, Handle] = {}

    def pick(self, number: int) -> tuple[ExecutionId, Run]:
        """One of the executions, mostly of those that still live."""
        ids = self.living() if number % 8 != 7 else []
        ids = ids or list(self.runs)
        execution_id = ids[number % len(ids)]
        return execution_id, self.runs[execution_id]

    def living(self) -> list[ExecutionId]:
        return [one for one, run in self.runs.items() if not run.terminal]

    def ask(self, work: Any) -> Any:
        return self.harness.answer(work)

    @rule(act=st.sampled_from(WEIGHTED), data=st.data())
    def step(self, act: str, data: st.DataObject) -> None:
        """One act of somebody; those of a healthy life are more likely than ends."""
        if act == "create" and len(self.living()) >= 2:
            act = "claim"
        if not self.runs:
            act = "create"
        if act in NEED_WAITPOINT and not any(run.waitpoints for run in self.runs.values()):
            act = "create_waitpoint"
        drawn = {name: data.draw(strategy, name) for name, strategy in ACTS[act].items()}
        getattr(self, act)(**drawn)

    # --- work -----------------------------------------------------------------------------

    def create(self) -> None:
        execution_id = ExecutionId.solo(LANE, self.backend.counts)
        new = NewExecution(execution_id=execution_id, execution_kind="job", lane_id=LANE)
        self.harness.run(self.backend.executions.create_execution(new))
        self.runs[execution_id] = Run()
        self.take(execution_id, self.runs[execution_id])

    def claim(self, number: int) -> None:
        self.take(*self.pick(number))

    def take(self, execution_id: ExecutionId, run: Run) -> None:
        expected = run.claim()

        async def take() -> Any:
            grant = await self.backend.claims.issue_claim_grant(execution_id, **WORKER)
            mode = self.backend.claims.claim_resumed_execution
            if expected == "fresh":
                return await self.backend.claims.claim_execution(grant, **WORKER, lease_ttl_ms=TTL)
            return await mode(grant, **WORKER, lease_ttl_ms=TTL)

        claim = self.ask(take())
        if expected == "refused":
            assert isinstance(claim, str)
            return
        assert claim.handle.kind == expected
        assert claim.handle.lease_epoch == run.epoch
        assert claim.handle.attempt_index == 0
        cause = claim.resume_cause
        assert (None if cause is None else (cause.trigger, cause.close_reason)) == run.cause()
        self.handles[execution_id] = claim.handle

    def complete(self, number: int) -> None:
        execution_id, run = self.held(number)
        active = run.state == "active"
        answer = self.ask(self.backend.executions.complete(self.handles[execution_id]))
        if active:
            run.complete()
        elif run.state != "completed":
            assert isinstance(answer, str)

    def give_back(self, number: int) -> None:
        execution_id, run = self.held(number)
        if run.state == "active":
            self.harness.run(self.backend.executions.delay(self.handles[execution_id], 1))
            run.give_back()

    def held(self, number: int) -> tuple[ExecutionId, Run]:
        ids = [one for one in self.handles if self.runs[one].state == "active"]
        ids = (ids if number % 8 != 7 else []) or list(self.handles)
        execution_id = ids[number % len(ids)]
        return execution_id, self.runs[execution_id]

    def cancel(self, number: int) -> None:
        execution_id, run = self.pick(number)
        expected = run.cancel()
        answer = self.ask(self.backend.executions.cancel_execution(execution_id))
        if expected == "refused":
            assert answer == "execution_not_active"
        else:
            assert answer.public_state == "cancelled"

    # --- pauses ---------------------------------------------------------------------------

    def options(
        self, tree: Condition, timeout: int | None, behavior: str, delay: int
    ) -> dict[str, Any]:
        if isinstance(tree, TimeoutOnly) and timeout is None:
            timeout = 10
        return {
            "condition": tree,
            "timeout_at": None if timeout is None else self.now + timeout,
            "timeout_behavior": behavior,
            "resume_policy": ResumePolicy(resume_delay_ms=delay or None),
            "suspension_id": new_uuid(),
        }

    def pause(self, options: dict[str, Any], delay: int, waitpoints: list[Waitpoint]) -> Pause:
        return Pause(
            options["suspension_id"],
            options["condition"],
            waitpoints,
            options["timeout_at"],
            options["timeout_behavior"],
            delay,
        )

    def suspend(
        self, number: int, tree: Condition, timeout: int | None, behavior: str, delay: int
    ) -> None:
        execution_id, run = self.held(number)
        options = self.options(tree, timeout, behavior, delay)
        keys_of = referenced_waitpoint_keys(tree) or ["alone"]
        bindings = [FreshWaitpoint(new_uuid(), key) for key in keys_of]
        answer = self.ask(
            self.backend.suspensions.suspend(
                self.handles[execution_id], waitpoints=bindings, **options
            )
        )
        if run.state != "active":
            assert answer == "execution_not_active"
            return
        assert isinstance(answer, Suspended)
        made = [
            Waitpoint(
                w.waitpoint_id,
                w.waitpoint_key,
                w.waitpoint_token.reveal(),
                "active",
                options["timeout_at"],
            )
            for w in answer.details.waitpoints
        ]
        run.suspend(self.pause(options, delay, made))

    def create_waitpoint(self, number: int, key: str, lifetime: int) -> None:
        execution_id, run = self.held(number)
        answer = self.ask(
            self.backend.waitpoints.create_waitpoint(self.handles[execution_id], key, lifetime)
        )
        if run.state != "active":
            assert answer == "execution_not_active"
            return
        run.waitpoints[answer.waitpoint_id] = Waitpoint(
            answer.waitpoint_id,
            key,
            answer.waitpoint_token.reveal(),
            "pending",
            self.now + lifetime,
        )

    def use_pending(self, number: int, tree: Condition, timeout: int | None, behavior: str) -> None:
        execution_id, run, waitpoint = self.some_waitpoint(number, pending_first=True)
        if execution_id not in self.handles:
            return
        options = self.options(tree, timeout, behavior, 0)
        expected = run.use(self.pause(options, 0, [waitpoint]), self.now)
        answer = self.ask(
            self.backend.suspensions.suspend(
                self.handles[execution_id],
                waitpoints=[UsePending(waitpoint.waitpoint_id)],
                **options,
            )
        )
        kinds = {Suspended: "suspended", AlreadySatisfiedSuspension: "already_satisfied"}
        told = answer if isinstance(answer, str) else kinds[type(answer)]
        assert told == ("execution_not_active" if expected == "refused" else expected)

    def some_waitpoint(
        self, number: int, *, pending_first: bool = False
    ) -> tuple[ExecutionId, Run, Waitpoint]:
        rows = [
            (execution_id, run, waitpoint)
            for execution_id, run in self.runs.items()
            for waitpoint in run.waitpoints.values()
        ]
        if pending_first:
            rows = [row for row in rows if row[2].state == "pending"] or rows
        elif number % 8 != 7:
            rows = [row for row in rows if row[2].state != "closed"] or rows
        return rows[number % len(rows)]

    def signals(self, number: int, sent: list[tuple[str, str, str]]) -> None:
        for one in sent:
            self.signal(number, *one)

    def signal(self, number: int, name: str, who: str, key: str) -> None:
        execution_id, run, waitpoint = self.some_waitpoint(number)
        identity = new_uuid()
        seen = AcceptedSignal(identity, waitpoint.key, name, "t", who)
        expected = run.signal(waitpoint, seen, key, self.now)
        answer = self.ask(
            self.backend.signals.deliver_signal(
                execution_id,
                waitpoint.waitpoint_id,
                waitpoint.token,
                name,
                signal_id=identity,
                source_type="t",
                source_identity=who,
                idempotency_key=key,
            )
        )
        if isinstance(answer, Accepted):
            answer = answer.effect
        elif isinstance(answer, DuplicateSignal):
            answer = f"duplicate {answer.existing_signal_id}"
        assert answer == expected

    def resume(self, number: int) -> None:
        execution_id, run = self.pick(number)
        expected = run.resume()
        answer = self.ask(self.backend.suspensions.resume_execution(execution_id))
        assert (answer if isinstance(answer, str) else answer.public_state) == expected

    def close_waitpoint(self, number: int) -> None:
        execution_id, run, waitpoint = self.some_waitpoint(number)
        expected = run.close_waitpoint(waitpoint)
        answer = self.ask(
            self.backend.waitpoints.close_waitpoint(execution_id, waitpoint.waitpoint_id)
        )
        assert str(answer) == expected

    # --- time -----------------------------------------------------------------------------

    def wait(self, ms: int) -> None:
        self.now += ms
        self.harness.freeze(self.now)

    def scan(self) -> None:
        ids = list(self.runs)
        expected = [self.runs[one].expire(self.now) for one in ids]
        assert self.ask(self.backend.suspensions.expire_suspension(ids[0].tag, ids)) == expected
        for execution_id in ids:
            self.ask(self.backend.upkeep.promote_delayed(execution_id.tag, LANE, [execution_id]))
            self.runs[execution_id].promote(self.now)

    def expire_waitpoint(self, number: int) -> None:
        execution_id, run, waitpoint = self.some_waitpoint(number)
        expected = run.expire_waitpoint(waitpoint, self.now)
        answer = self.ask(
            self.backend.suspensions.expire_waitpoints(execution_id.tag, [waitpoint.waitpoint_id])
        )
        assert answer == [expected]

    # --- what must hold -------------------------------------------------------------------

    @invariant()
    def same_as_the_model(self) -> None:
        for execution_id, run in getattr(self, "runs", {}).items():
            self.harness.run(self.compare(execution_id, run))

    async def compare(self, execution_id: ExecutionId, run: Run) -> None:
        backend = self.backend
        info = await backend.reads.read_execution_info(execution_id)
        assert info.public_state == run.state
        assert info.delay_until == run.delay_until
        described = await backend.reads.describe_execution(execution_id)
        assert described is not None
        pause = run.pause
        primary = pause.waitpoints[0].waitpoint_id if pause and run.state == "suspended" else None
        assert described.current_waitpoint == primary
        await self.compare_indexes(execution_id, run)
        listed = await backend.waitpoints.list_pending_waitpoints(execution_id)
        wanted = {w.waitpoint_id: w.state for w in run.waitpoints.values() if w.state != "closed"}
        assert {entry.waitpoint_id: entry.state for entry in listed.entries} == wanted
        for waitpoint in run.waitpoints.values():
            await self.compare_waitpoint(execution_id, waitpoint)
        count: Any = await backend.transport.call(
            "ZCARD", f"ff:exec:{execution_id.tag}:{execution_id}:signals"
        )
        assert count == run.recorded
        if run.state == "active":
            observed = await backend.waitpoints.observe_signals(self.handles[execution_id])
            assert [signal.signal_id for signal in observed] == run.observed()

    async def compare_indexes(self, execution_id: ExecutionId, run: Run) -> None:
        call = self.backend.transport.call
        suspended: Any = await call(
            "ZSCORE", f"ff:idx:{execution_id.tag}:lane:{LANE}:suspended", execution_id
        )
        timer: Any = await call(
            "ZSCORE", f"ff:idx:{execution_id.tag}:suspension_timeout", execution_id
        )
        timeout = run.pause.timeout_at if run.pause and run.state == "suspended" else None
        assert timer == timeout
        if run.state == "suspended":
            assert suspended == (timeout or 9_999_999_999_999)
        else:
            assert suspended is None
        verdict = await self.backend.upkeep.reconcile_execution_index(
            execution_id.tag, [execution_id], "check"
        )
        assert verdict == ["consistent"]

    async def compare_waitpoint(self, execution_id: ExecutionId, waitpoint: Waitpoint) -> None:
        stored: Any = await self.backend.transport.call(
            "HMGET",
            f"ff:wp:{execution_id.tag}:{waitpoint.waitpoint_id}",
            *("state", "close_reason", "signal_count"),
        )
        state, reason, count = (None if part is None else part.decode() for part in stored)
        assert (state, reason) == (waitpoint.state, waitpoint.close_reason)
        assert int(count or 0) == len(waitpoint.signals)


@pytest.mark.timeout(180 if EXAMPLES <= 100 else 0)
def test_suspensions_live_like_the_model(
    valkey: TestServer, request: pytest.FixtureRequest
) -> None:
    live(Pauses, valkey.url, request, examples=EXAMPLES, steps=STEPS)
