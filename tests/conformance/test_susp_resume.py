"""Resuming: at once or delayed, by signal or by hand, and what the next claim contains."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.core.conditions import AllOf, Count, CountKind, Single
from flowfabric.core.contracts.leases import ResumeCause
from flowfabric.core.contracts.suspension import Accepted, ResumePolicy, Suspended
from flowfabric.core.ids import new_uuid
from tests.support.engine import LANE, TTL, Engine, refused, untouched
from tests.support.leases import WORKER, grant, reclaim, running
from tests.support.suspension import GO, Waits


async def promote(engine: Engine, parked: Suspended) -> str:
    execution_id = parked.handle.execution_id
    (verdict,) = await engine.backend.upkeep.promote_delayed(execution_id.tag, LANE, [execution_id])
    return verdict


async def test_the_same_attempt_goes_on_with_the_next_epoch(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    outcome = await waits.send(parked)
    assert isinstance(outcome, Accepted)
    held = await grant(engine, parked.handle.execution_id)
    await refused(
        engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
        "use_claim_resumed_execution",
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


async def test_a_grant_cannot_bypass_the_delay(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(resume_policy=ResumePolicy(resume_delay_ms=1000))
    await waits.send(parked)
    await refused(grant(engine, parked.handle.execution_id), "execution_not_eligible")


async def test_the_longest_delay_saturates(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(resume_policy=ResumePolicy(resume_delay_ms=2**53 - 2))
    await waits.send(parked)
    info = await engine.backend.reads.read_execution_info(parked.handle.execution_id)
    assert info.delay_until == 2**53 - 1
    assert info.blocking_detail.startswith(f"resume delay {2**53 - 2}ms")


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
        await refused(resume(handle.execution_id, trigger_type="me"), "invalid_input")
        for delay in (-1, True, 1.5, 2**53):
            await refused(resume(handle.execution_id, resume_delay_ms=delay), "invalid_input")
        await refused(resume(engine.new_id()), "execution_not_found")
        await refused(resume(handle.execution_id), "execution_not_suspended")
    await waits.park(handle=handle)
    await resume(handle.execution_id)
    async with untouched(engine):
        await refused(resume(handle.execution_id), "execution_not_suspended")


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
    await refused(waits.backend.suspensions.suspend(stale, condition=GO), "stale_lease")
    await engine.backend.executions.complete(handle)
