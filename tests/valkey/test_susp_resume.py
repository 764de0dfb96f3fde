"""Resuming: at once or delayed, by signal or by hand, and what the next claim contains."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import AllOf, Count, CountKind, OperatorOnly, Single, TimeoutOnly
from flowfabric.core.contracts.leases import ResumeCause
from flowfabric.core.contracts.suspension import Accepted, ResumePolicy
from flowfabric.core.state import ExpireReason
from tests.conformance.test_susp_resume import promote
from tests.support.engine import LANE, Engine, refused, untouched
from tests.support.leases import event_types
from tests.support.storage import indexes, record
from tests.support.suspension import GO, Waits

# --- by a signal --------------------------------------------------------------------------------


async def test_a_signal_makes_it_claimable(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(handle=await engine.running(priority=3))
    execution_id = parked.handle.execution_id
    await engine.freeze(await engine.now())
    outcome = await waits.send(parked)
    assert isinstance(outcome, Accepted)
    assert (await engine.vector(execution_id)).code == "ruewni"
    stored = await record(engine, execution_id)
    for gone in ("current_suspension_id", "current_waitpoint_id", "blocking_detail"):
        assert gone not in stored
    created = int(stored["created_at"])
    assert await indexes(engine, execution_id) == {f"lane:{LANE}:eligible": created - 3 * 10**12}
    now = str(await engine.now())
    suspension = await waits.suspension(execution_id)
    assert suspension["closed_at"] == suspension["satisfied_at"] == now
    assert suspension["close_reason"] == "resumed"
    assert (
        suspension["closer_signal_id"] == suspension["all_satisfier_signals"] == outcome.signal_id
    )
    (waitpoint,) = await waits.waitpoints(parked)
    assert waitpoint["state"] == "closed"
    assert waitpoint["closed_at"] == waitpoint["satisfied_at"] == now
    assert waitpoint["close_reason"] == "resumed"
    assert waitpoint["condition_closed_reason"] == "satisfied"
    left: Any = await engine.backend.transport.call("KEYS", "*satisfied_set*")
    assert left == [], "composite state is deleted"
    assert "resumed" not in await event_types(engine, execution_id)


async def test_all_waitpoints_close_whichever_was_signalled(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=1, waitpoints=("a", "b", "c")))
    await waits.send(parked, at=1)
    assert {w["close_reason"] for w in await waits.waitpoints(parked)} == {"resumed"}
    assert {w["condition_closed_reason"] for w in await waits.waitpoints(parked)} == {"satisfied"}


@pytest.mark.parametrize(
    ("policy", "argument", "delay"),
    [(None, 700, 700), (500, 0, 500), (500, 700, 500), (0, 700, 0), (None, 0, 0)],
)
async def test_the_delay_of_the_policy_comes_first(
    engine: Engine, policy: int | None, argument: int, delay: int
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(resume_policy=ResumePolicy(resume_delay_ms=policy))
    execution_id = parked.handle.execution_id
    await engine.freeze(await engine.now())
    due = await engine.now() + delay
    await waits.send(parked, resume_delay_ms=argument)
    vector = await engine.vector(execution_id)
    if delay == 0:
        assert vector.code == "ruewni"
        return
    assert vector.blocking_reason == "waiting_for_resume_delay"
    assert vector.eligibility_state == "not_eligible_until_time"
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.public_state == "delayed"
    assert info.delay_until == due
    assert info.blocking_detail == f"resume delay {delay}ms after signal go"
    assert await indexes(engine, execution_id) == {f"lane:{LANE}:delayed": due}
    assert await engine.claim_all() == []
    await engine.freeze(due - 1)
    assert await promote(engine, parked) == "not_yet_due"
    await engine.freeze(due)
    assert await promote(engine, parked) == "promoted"
    claim = await engine.claim()
    assert claim.handle.attempt == parked.handle.attempt, "the promoter keeps the attempt"
    assert claim.resume_cause is not None
    assert claim.resume_cause.trigger == "signal"
    assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 1


async def test_a_pause_stops_the_attempts_clock(engine: Engine) -> None:
    waits = await Waits.open(engine)
    timed = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
    handle = await engine.running(policy=timed)
    await engine.advance(4_000)
    parked = await waits.park(handle=handle)
    assert "attempt_timeout" not in await indexes(engine, handle.execution_id)
    await engine.advance(3_600_000)
    tag, one = handle.execution_id.tag, [handle.execution_id]
    verdict = await engine.backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, one)
    assert verdict == ["not_yet_due"]
    await waits.send(parked)
    await engine.claim()
    left = (await indexes(engine, handle.execution_id))["attempt_timeout"]
    assert left is not None
    assert 5_500 < left - await engine.now() <= 6_000
    await engine.advance(6_000)
    verdict = await engine.backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, one)
    assert verdict == ["expired"]


# --- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "condition", [GO, OperatorOnly(), TimeoutOnly(), AllOf((Single("a"), Single("b")))]
)
@pytest.mark.parametrize("trigger", ["operator", "auto_resume", "signal"])
async def test_an_operator_overrides_every_condition(
    engine: Engine, condition: Any, trigger: str
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(condition, timeout_at=await engine.now() + 60_000)
    execution_id = parked.handle.execution_id
    outcome = await waits.backend.suspensions.resume_execution(execution_id, trigger_type=trigger)
    assert outcome.public_state == "waiting"
    for waitpoint in await waits.waitpoints(parked):
        assert waitpoint["close_reason"] == waitpoint["condition_closed_reason"] == "resumed"
        assert "satisfied_at" not in waitpoint
    suspension = await waits.suspension(execution_id)
    cause = "timeout" if trigger == "auto_resume" else trigger
    assert suspension["resume_trigger"] == cause
    assert "satisfied_at" not in suspension
    (event,) = [e for e in await engine.events(execution_id) if e.type == "resumed"]
    assert event.fields == {
        "suspension_id": parked.details.suspension_id,
        "trigger": cause,
        "close_reason": "resumed",
    }
    assert list(await indexes(engine, execution_id)) == [f"lane:{LANE}:eligible"]
    await refused(waits.send(parked), "target_not_signalable")
    claim = await engine.claim()
    assert claim.resume_cause == ResumeCause(parked.details.suspension_id, cause, "resumed", None)
    assert await waits.backend.waitpoints.observe_signals(claim.handle) == []


@pytest.mark.corrupts
@pytest.mark.parametrize("lost", ["suspension", "waitpoint"])
async def test_resume_without_its_records(engine: Engine, lost: str) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    prefix = f"ff:exec:{execution_id.tag}:{execution_id}:"
    if lost == "suspension":
        await engine.backend.transport.call("DEL", f"{prefix}suspension:current")
    else:
        await engine.backend.transport.call("HDEL", f"{prefix}core", "current_waitpoint_id")
    async with untouched(engine):
        await refused(
            waits.backend.suspensions.resume_execution(execution_id), "execution_not_suspended"
        )


@pytest.mark.corrupts
async def test_damaged_records(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=2, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS))
    first = await waits.send(parked)
    await waits.send(parked, "second")
    assert isinstance(first, Accepted)
    claim = await engine.claim()
    await engine.backend.transport.call("DEL", f"ff:signal:{claim.execution_id}:{first.signal_id}")
    observed = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert [s.signal_name for s in observed] == ["second"], "a deleted record is skipped"
    key = f"ff:exec:{claim.execution_id.tag}:{claim.execution_id}:suspension:current"
    await waits.write(key, waitpoints="not-an-id")
    await refused(waits.backend.waitpoints.observe_signals(claim.handle), "corruption")
