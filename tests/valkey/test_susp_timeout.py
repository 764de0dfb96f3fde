"""Suspension timeouts: each behaviour, at its exact time, once."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import AllOf, Single, TimeoutOnly
from flowfabric.core.contracts.leases import ResumeCause
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import ResumePolicy, Suspended
from tests.support.engine import LANE, Engine, refused, untouched
from tests.support.leases import event_types, running
from tests.support.storage import indexes, record
from tests.support.suspension import Waits

TWO = AllOf((Single("a"), Single("b")))
RETRIED = {
    "retry_policy": {"max_retries": 5, "retry_on_timeout": True},
    "timeout_policy": {"execution_deadline_ms": 3_600_000},
}


async def due(engine: Engine, behavior: str | None, **options: Any) -> tuple[Waits, Suspended]:
    """A suspension whose timeout is exactly now."""
    waits = await Waits.open(engine)
    handle = await engine.running(policy=RETRIED)
    await engine.backend.streams.append_frame(handle, Frame(payload=b"x"))
    await engine.freeze(await engine.now())
    parked = await waits.park(
        options.pop("condition", TWO),
        handle=handle,
        timeout_at=await engine.now() + 1000,
        timeout_behavior=behavior,
        **options,
    )
    await engine.freeze(await engine.now() + 999)
    async with untouched(engine):
        assert await waits.expire(handle.execution_id) == "not_yet_due"
    await engine.freeze(await engine.now() + 1)
    return waits, parked


@pytest.mark.parametrize(
    ("given", "behavior", "outcome", "attempt"),
    [
        ("fail", "fail", "failed", "ended_failure"),
        (None, "fail", "failed", "ended_failure"),
        ("cancel", "cancel", "cancelled", "ended_cancelled"),
        ("expire", "expire", "expired", "ended_failure"),
    ],
)
async def test_terminal_behaviours(
    engine: Engine, given: str | None, behavior: str, outcome: str, attempt: str
) -> None:
    waits, parked = await due(engine, given)
    execution_id = parked.handle.execution_id
    assert await waits.expire(execution_id) == behavior
    reason = f"suspension_timeout:{behavior}"
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.public_state == outcome
    assert info.state_vector.attempt_state == "attempt_terminal"
    assert info.failure_reason == reason
    assert info.cancelled_by == ("system_timeout" if behavior == "cancel" else None)
    assert info.completed_at == str(await engine.now())
    stored = await record(engine, execution_id)
    assert "current_suspension_id" not in stored
    assert "blocking_detail" not in stored
    (fields,) = await engine.backend.reads.read_attempts(execution_id)
    assert fields.attempt_state == attempt
    assert fields.ended_at == await engine.now()
    page = await engine.backend.streams.read_stream(execution_id, 0)
    assert page.closed_reason == "suspension_timeout"
    assert list(await indexes(engine, execution_id)) == [f"lane:{LANE}:terminal"]
    closed = f"timed_out_{behavior}"
    for waitpoint in await waits.waitpoints(parked):
        assert waitpoint["close_reason"] == waitpoint["condition_closed_reason"] == closed
        assert "satisfied_at" not in waitpoint
    suspension = await waits.suspension(execution_id)
    assert suspension["close_reason"] == closed
    (event,) = [e for e in await engine.events(execution_id) if e.type == "completion"]
    assert event.fields["outcome"] == outcome
    assert event.fields["reason"] == reason
    assert event.fields.get("source") == ("system_timeout" if behavior == "cancel" else None)
    assert "lease_id" not in event.fields
    async with untouched(engine):
        assert await waits.expire(execution_id) == "not_suspended_cleaned"
        await refused(waits.send(parked), "target_not_signalable")


@pytest.mark.parametrize("given", ["auto_resume", "auto_resume_with_timeout_signal"])
async def test_auto_resume(engine: Engine, given: str) -> None:
    waits, parked = await due(engine, given)
    execution_id = parked.handle.execution_id
    await waits.send(parked, "half")
    assert await waits.expire(execution_id) == "auto_resume"
    assert (await engine.vector(execution_id)).code == "ruewni"
    closed = "timed_out_auto_resume"
    for waitpoint in await waits.waitpoints(parked):
        assert waitpoint["close_reason"] == waitpoint["condition_closed_reason"] == closed
    suspension = await waits.suspension(execution_id)
    assert suspension["close_reason"] == closed
    assert "satisfied_at" not in suspension
    (event,) = [e for e in await engine.events(execution_id) if e.type == "resumed"]
    assert event.fields == {
        "suspension_id": parked.details.suspension_id,
        "trigger": "timeout",
        "close_reason": closed,
    }
    placed = await indexes(engine, execution_id)
    assert set(placed) == {f"lane:{LANE}:eligible", "execution_deadline"}
    async with untouched(engine):
        assert await waits.expire(execution_id) == "not_suspended_cleaned"
    claim = await engine.claim()
    cause = ResumeCause(parked.details.suspension_id, "timeout", closed, None)
    assert claim.resume_cause == cause
    assert await waits.backend.waitpoints.observe_signals(claim.handle) == []


async def test_auto_resume_is_not_delayed(engine: Engine) -> None:
    waits, parked = await due(
        engine, "auto_resume", resume_policy=ResumePolicy(resume_delay_ms=5000)
    )
    await waits.expire(parked.handle.execution_id)
    assert (await engine.vector(parked.handle.execution_id)).code == "ruewni"


async def test_escalate(engine: Engine) -> None:
    waits, parked = await due(engine, "escalate")
    execution_id = parked.handle.execution_id
    timeout = (await waits.suspension(execution_id))["timeout_at"]
    await waits.send(parked, "half")
    assert await waits.expire(execution_id) == "escalate"
    vector = await engine.vector(execution_id)
    assert (vector.lifecycle_phase, vector.blocking_reason) == ("suspended", "paused_by_operator")
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.blocking_detail == f"suspension escalated: timeout at {timeout}"
    suspension = await waits.suspension(execution_id)
    assert suspension["reason_code"] == "waiting_for_operator_review"
    assert "timeout_at" not in suspension
    assert "timeout_behavior" not in suspension
    for waitpoint in await waits.waitpoints(parked):
        assert waitpoint["state"] == "active"
        assert "expires_at" not in waitpoint
    placed = await indexes(engine, execution_id)
    assert placed.pop("execution_deadline")
    assert placed == {f"lane:{LANE}:suspended": 9_999_999_999_999}
    (event,) = [e for e in await engine.events(execution_id) if e.type == "escalated"]
    assert event.fields["suspension_id"] == parked.details.suspension_id
    assert event.fields["trigger"] == "timeout"
    async with untouched(engine):
        assert await waits.expire(execution_id) == "not_yet_due"
    # What came before still counts: the other signal resumes.
    assert await waits.effect(parked, at=1) == "resume_condition_satisfied"
    claim = await engine.claim()
    assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 2


async def test_an_operator_ends_what_was_escalated(engine: Engine) -> None:
    waits, parked = await due(engine, "escalate", condition=TimeoutOnly())
    await waits.expire(parked.handle.execution_id)
    await waits.backend.suspensions.resume_execution(parked.handle.execution_id)
    assert await event_types(engine, parked.handle.execution_id) == [
        *("acquired", "released", "escalated", "resumed")
    ]


@pytest.mark.corrupts
async def test_an_unknown_behaviour_fails(engine: Engine) -> None:
    waits, parked = await due(engine, "fail")
    execution_id = parked.handle.execution_id
    key = f"ff:exec:{execution_id.tag}:{execution_id}:suspension:current"
    await waits.write(key, timeout_behavior="strange")
    assert await waits.expire(execution_id) == "fail"


@pytest.mark.corrupts
async def test_stale_timers_are_cleaned(engine: Engine) -> None:
    waits, parked = await due(engine, "fail")
    execution_id = parked.handle.execution_id
    tag = execution_id.tag
    index = f"ff:idx:{tag}:suspension_timeout"
    call = engine.backend.transport.call
    ghost = engine.new_id()
    active = (await running(engine)).execution_id
    for one in (ghost, active):
        await call("ZADD", index, 1, one)
    untimed = await waits.park(handle=await running(engine))
    await call("ZADD", index, 1, untimed.handle.execution_id)
    assert await waits.backend.suspensions.expire_suspension(
        tag, [ghost, active, untimed.handle.execution_id]
    ) == ["not_found_cleaned", "not_suspended_cleaned", "not_yet_due"]
    assert await call("ZCARD", index) == 1
    await call("DEL", f"ff:exec:{tag}:{execution_id}:suspension:current")
    assert await waits.expire(execution_id) == "no_active_suspension_cleaned"
    assert await call("EXISTS", index) == 0


@pytest.mark.corrupts
async def test_one_broken_record_does_not_stop_the_others(engine: Engine) -> None:
    waits, parked = await due(engine, "fail")
    broken = engine.new_id()
    call = engine.backend.transport.call
    await call("SET", f"ff:exec:{broken.tag}:{broken}:core", "garbage")
    first, second = await waits.backend.suspensions.expire_suspension(
        broken.tag, [broken, parked.handle.execution_id]
    )
    assert first.startswith("error:")
    assert second == "fail"


async def test_timeout_only_waits_for_its_time(engine: Engine) -> None:
    waits, parked = await due(engine, "auto_resume", condition=TimeoutOnly())
    assert await waits.effect(parked, "anything") == "no_op"
    assert await waits.expire(parked.handle.execution_id) == "auto_resume"
