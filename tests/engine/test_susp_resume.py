"""The way back: at once or delayed, by signal or by hand, and what the next lease is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import AllOf, Count, CountKind, OperatorOnly, Single, TimeoutOnly
from flowfabric.core.contracts.leases import ResumeCause
from flowfabric.core.contracts.suspension import Accepted, ResumePolicy, Suspended
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from tests.engine.probes import (
    WORKER,
    event_types,
    fields,
    freeze,
    grant,
    placed,
    reclaim,
    refused,
    running,
    untouched,
)
from tests.support.engine import LANE, TTL, Engine
from tests.support.suspension import GO, Waits


async def promote(engine: Engine, parked: Suspended) -> str:
    execution_id = parked.handle.execution_id
    (verdict,) = await engine.backend.upkeep.promote_delayed(execution_id.tag, LANE, [execution_id])
    return verdict


# --- by a signal --------------------------------------------------------------------------------


async def test_a_signal_makes_it_claimable(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(handle=await engine.running(priority=3))
    execution_id = parked.handle.execution_id
    await freeze(engine, await engine.now())
    outcome = await waits.send(parked)
    assert isinstance(outcome, Accepted)
    assert (await engine.vector(execution_id)).code == "ruewni"
    stored = await fields(engine, execution_id)
    for gone in ("current_suspension_id", "current_waitpoint_id", "blocking_detail"):
        assert gone not in stored
    created = int(stored["created_at"])
    assert await placed(engine, execution_id) == {f"lane:{LANE}:eligible": created - 3 * 10**12}
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


async def test_the_same_attempt_goes_on_with_the_next_epoch(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    outcome = await waits.send(parked)
    assert isinstance(outcome, Accepted)
    held = await grant(engine, parked.handle.execution_id)
    await refused(
        "use_claim_resumed_execution",
        engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
    )
    claim = await engine.backend.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL)
    assert claim.handle.kind == "resumed"
    assert claim.handle.attempt == parked.handle.attempt
    assert claim.handle.lease_epoch == parked.handle.lease_epoch + 1
    assert claim.resume_cause == ResumeCause(
        parked.details.suspension_id, "signal", "resumed", outcome.signal_id
    )
    (attempt,) = await engine.backend.reads.read_attempts(claim.execution_id)
    assert attempt.attempt_state == "started"
    assert (attempt.suspended_at, attempt.suspension_id) == (None, None)
    assert attempt.resumed_at is not None
    acquired = [e for e in await engine.events(claim.execution_id) if e.type == "acquired"]
    assert acquired[-1].fields["reason"] == "claim_resumed"
    await engine.backend.executions.complete(claim.handle)


async def test_all_waitpoints_close_whoever_was_signalled(engine: Engine) -> None:
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
    await freeze(engine, await engine.now())
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
    assert await placed(engine, execution_id) == {f"lane:{LANE}:delayed": due}
    assert await engine.claim_all() == []
    await freeze(engine, due - 1)
    assert await promote(engine, parked) == "not_yet_due"
    await freeze(engine, due)
    assert await promote(engine, parked) == "promoted"
    claim = await engine.claim()
    assert claim.handle.attempt == parked.handle.attempt, "the promoter keeps the attempt"
    assert claim.resume_cause is not None
    assert claim.resume_cause.trigger == "signal"
    assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 1


async def test_a_grant_cannot_bypass_the_delay(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(resume_policy=ResumePolicy(resume_delay_ms=1000))
    await waits.send(parked)
    await refused("execution_not_eligible", grant(engine, parked.handle.execution_id))


async def test_the_longest_delay_saturates(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(resume_policy=ResumePolicy(resume_delay_ms=2**53 - 2))
    await waits.send(parked)
    info = await engine.backend.reads.read_execution_info(parked.handle.execution_id)
    assert info.delay_until == 2**53 - 1
    assert info.blocking_detail.startswith(f"resume delay {2**53 - 2}ms")


async def test_a_pause_stops_the_attempts_clock(engine: Engine) -> None:
    waits = await Waits.open(engine)
    timed = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
    handle = await engine.running(policy=timed)
    await engine.advance(4_000)
    parked = await waits.park(handle=handle)
    assert "attempt_timeout" not in await placed(engine, handle.execution_id)
    await engine.advance(3_600_000)
    tag, one = handle.execution_id.tag, [handle.execution_id]
    verdict = await engine.backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, one)
    assert verdict == ["not_yet_due"]
    await waits.send(parked)
    await engine.claim()
    left = (await placed(engine, handle.execution_id))["attempt_timeout"]
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
    assert list(await placed(engine, execution_id)) == [f"lane:{LANE}:eligible"]
    await refused("target_not_signalable", waits.send(parked))
    claim = await engine.claim()
    assert claim.resume_cause == ResumeCause(parked.details.suspension_id, cause, "resumed", None)
    assert await waits.backend.waitpoints.observe_signals(claim.handle) == []


async def test_resume_with_a_delay(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(resume_policy=ResumePolicy(resume_delay_ms=99))
    outcome = await waits.backend.suspensions.resume_execution(
        parked.handle.execution_id, resume_delay_ms=5000
    )
    assert outcome.public_state == "delayed"
    info = await engine.backend.reads.read_execution_info(parked.handle.execution_id)
    assert info.blocking_detail == "resume delay 5000ms"
    await engine.advance(5000)
    assert await promote(engine, parked) == "promoted"
    assert (await engine.claim()).resume_cause is not None


async def test_resume_refused(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    resume: Any = waits.backend.suspensions.resume_execution
    async with untouched(engine):
        await refused("invalid_input", resume(handle.execution_id, trigger_type="me"))
        for delay in (-1, True, 1.5, 2**53):
            await refused("invalid_input", resume(handle.execution_id, resume_delay_ms=delay))
        await refused("execution_not_found", resume(engine.new_id()))
        await refused("execution_not_suspended", resume(handle.execution_id))
    await waits.park(handle=handle)
    await resume(handle.execution_id)
    async with untouched(engine):
        await refused("execution_not_suspended", resume(handle.execution_id))


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
            "execution_not_suspended", waits.backend.suspensions.resume_execution(execution_id)
        )


# --- what the next lease is told ----------------------------------------------------------------


async def test_signals_are_told_to_the_lease_they_led_to(engine: Engine) -> None:
    waits = await Waits.open(engine)
    tree = AllOf(
        (Single("b"), Count(n=2, waitpoints=("a",), count_kind=CountKind.DISTINCT_SIGNALS))
    )
    parked = await waits.park(tree)
    assert await waits.backend.waitpoints.observe_signals(parked.handle) == []
    await waits.send(parked, "1", at=1)
    await waits.send(parked, "2", at=0)
    await waits.send(parked, "2", at=0)
    await waits.send(parked, "3", at=1)
    claim = await engine.claim()
    observed = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert await waits.backend.waitpoints.observe_signals(claim.handle) == observed
    told = [(s.signal_name, s.waitpoint_key) for s in observed]
    assert told == [("1", "a"), ("2", "b"), ("3", "a")]
    assert observed == sorted(observed, key=lambda s: s.accepted_at)
    assert await waits.backend.waitpoints.observe_signals(parked.handle) == [], (
        "not to the lease before"
    )


async def test_nothing_is_told_after_a_later_pause_of_another_kind(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked)
    claim = await engine.claim()
    await engine.backend.executions.delay(claim.handle, 1)
    later = await engine.claim()
    assert later.handle.kind == "resumed"
    assert later.resume_cause is None
    assert await waits.backend.waitpoints.observe_signals(later.handle) == []


async def test_nothing_is_told_to_another_attempt(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked)
    claim = await engine.claim()
    await engine.advance(TTL + 1)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        claim.execution_id.tag, [claim.execution_id]
    )
    again = await reclaim(engine, claim.execution_id)
    assert again.resume_cause is None
    assert await waits.backend.waitpoints.observe_signals(again.handle) == []


async def test_nothing_is_told_without_a_suspension(engine: Engine) -> None:
    waits = await Waits.open(engine)
    claim_handle = await engine.running()
    assert await waits.backend.waitpoints.observe_signals(claim_handle) == []


async def test_a_repeated_claim_tells_the_cause_again(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked)
    held = await grant(engine, parked.handle.execution_id)
    options: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL, "lease_id": new_uuid()}
    first = await engine.backend.claims.claim_resumed_execution(held, **options)
    again = await engine.backend.claims.claim_resumed_execution(held, **options)
    assert again == first
    assert first.resume_cause is not None


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
    await refused("corruption", waits.backend.waitpoints.observe_signals(claim.handle))


async def test_suspend_and_resume_many_times_in_one_attempt(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await running(engine)
    for epoch in range(1, 6):
        assert handle.lease_epoch == epoch
        parked = await waits.park(handle=handle)
        outcome = await waits.send(parked, payload=str(epoch).encode())
        assert isinstance(outcome, Accepted)
        claim = await engine.claim()
        (signal,) = await waits.backend.waitpoints.observe_signals(claim.handle)
        assert signal.payload == str(epoch).encode()
        handle = claim.handle
    assert await engine.backend.reads.read_total_attempt_count(handle.execution_id) == 1
    stale = msgspec.structs.replace(handle, lease=f"{new_uuid()}/1")
    await refused("stale_lease", waits.backend.suspensions.suspend(stale, condition=GO))
    await engine.backend.executions.complete(handle)
