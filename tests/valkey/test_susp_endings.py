"""Whatever ends or repairs a suspended execution: cancel, deadline, replay, purge, reconcile."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import AllOf, Count, CountKind, Single
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.upkeep import Index
from tests.support.engine import LANE, Engine, refused, untouched
from tests.support.leases import event_types
from tests.support.storage import indexes, record
from tests.support.suspension import GO, Waits

TWO = AllOf((Single("a"), Single("b")))
SIGNALS = CountKind.DISTINCT_SIGNALS


async def test_cancel_closes_everything(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(TWO, timeout_at=await engine.now() + 60_000)
    execution_id = parked.handle.execution_id
    await waits.send(parked, "half")
    await engine.backend.executions.cancel_execution(execution_id, "enough")
    for waitpoint in await waits.waitpoints(parked):
        assert waitpoint["state"] == "closed"
        assert waitpoint["close_reason"] == waitpoint["condition_closed_reason"] == "cancelled"
    suspension = await waits.suspension(execution_id)
    assert suspension["close_reason"] == "cancelled"
    assert list(await indexes(engine, execution_id)) == [f"lane:{LANE}:terminal"]
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "ended_cancelled"
    assert attempt.failure_reason == "cancelled: enough"
    left: Any = await engine.backend.transport.call("KEYS", "*satisfied_set*")
    assert left == []
    assert (await event_types(engine, execution_id))[-1] == "completion"
    async with untouched(engine):
        await refused(waits.send(parked, at=1), "target_not_signalable")
        await refused(
            waits.backend.suspensions.resume_execution(execution_id), "execution_not_suspended"
        )
        assert await waits.expire(execution_id) == "not_suspended_cleaned"


async def test_the_deadline_closes_everything(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(policy={"timeout_policy": {"execution_deadline_ms": 1000}})
    parked = await waits.park(TWO, handle=handle, timeout_at=await engine.now() + 60_000)
    execution_id = handle.execution_id
    await engine.advance(1001)
    verdicts = await engine.backend.upkeep.expire_execution(
        execution_id.tag, ExpireReason.EXECUTION_DEADLINE, [execution_id]
    )
    assert verdicts == ["expired"]
    reason = "expired:execution_deadline"
    for waitpoint in await waits.waitpoints(parked):
        assert waitpoint["close_reason"] == waitpoint["condition_closed_reason"] == reason
    assert (await waits.suspension(execution_id))["close_reason"] == reason
    assert list(await indexes(engine, execution_id)) == [f"lane:{LANE}:terminal"]
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "ended_failure"
    assert "current_waitpoint_id" not in await record(engine, execution_id)


async def test_a_replay_starts_clean(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked, idempotency_key="x")
    claim = await engine.claim()
    second = await waits.park(handle=claim.handle)
    execution_id = claim.execution_id
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.replay_execution(execution_id)
    for old in (parked, second):
        await refused(waits.send(old), "target_not_signalable")
    fresh = await engine.claim()
    assert fresh.handle.kind == "fresh"
    assert fresh.handle.attempt_index == 1
    assert fresh.resume_cause is None
    assert await waits.backend.waitpoints.observe_signals(fresh.handle) == []
    third = await waits.park(handle=fresh.handle)
    await refused(waits.send(second), "waitpoint_closed")
    outcome = await waits.send(third, idempotency_key="x")
    assert outcome.kind == "accepted", "keys are of the waitpoint, not of the execution"
    again = await engine.claim()
    assert again.resume_cause is not None
    assert again.resume_cause.suspension_id == third.details.suspension_id
    first, last = await engine.backend.reads.read_attempts(execution_id)
    assert (first.attempt_state, last.attempt_state) == ("ended_cancelled", "started")


async def test_retention_removes_every_key(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    before = await engine.dump()
    parked = await waits.park(TWO, handle=handle)
    await waits.send(parked, payload=b"x")
    await waits.send(parked, at=1, payload=b"")
    claim = await engine.claim()
    pending = await waits.backend.waitpoints.create_waitpoint(claim.handle, "k", 60_000)
    await waits.signal(claim.execution_id, pending, "early")
    await waits.backend.waitpoints.create_waitpoint(claim.handle, "unused", 60_000)
    await engine.backend.executions.cancel_execution(claim.execution_id)
    assert await waits.trim(claim.execution_id) == ["purged"]
    assert await belongings(engine) == []
    assert await engine.dump() != before


async def belongings(engine: Engine) -> list[bytes]:
    """Keys of suspensions, except the key store."""
    found: list[bytes] = []
    for pattern in ("ff:wp:*", "ff:signal:*", "ff:exec:*", "ff:dedup:*", "*suspen*", "*waitpoint*"):
        names: Any = await engine.backend.transport.call("KEYS", pattern)
        found += names
    return [n for n in found if not n.startswith(b"ff:sec:")]


async def test_retention_of_very_many(engine: Engine) -> None:
    """More waitpoints and signals than one step may delete; an interrupted purge goes on."""
    waits = await Waits.open(engine)
    handle = await engine.running()
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    pending = [
        await waits.backend.waitpoints.create_waitpoint(handle, "k", 10**9) for _ in range(700)
    ]
    for one in pending[:300]:
        await waits.signal(execution_id, one, "x", payload=b"y")
    parked = await waits.park(Count(n=9999, waitpoints=("k",), count_kind=SIGNALS), handle=handle)
    for _ in range(300):
        await waits.send(parked, "x")
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.advance(86_400_001)
    steps = 0
    assert await engine.backend.upkeep.trim_retention(tag, LANE, [execution_id]) == ["purging"]
    sizes = [len(await belongings(engine))]
    while await engine.backend.upkeep.purge(tag):
        steps += 1
        sizes.append(len(await belongings(engine)))
        assert 0 < sizes[-2] - sizes[-1] <= 520, "a bounded number of keys a step"
    assert steps >= 2
    assert await belongings(engine) == []
    index: Any = await engine.backend.transport.call("KEYS", f"ff:idx:{tag}:*pending*")
    assert index == []


@pytest.mark.parametrize("timed", [True, False])
async def test_reconcile_puts_a_suspended_execution_back(engine: Engine, timed: bool) -> None:
    waits = await Waits.open(engine)
    timeout = await engine.now() + 60_000 if timed else None
    parked = await waits.park(timeout_at=timeout)
    execution_id = parked.handle.execution_id
    right = await indexes(engine, execution_id)
    call, tag = engine.backend.transport.call, execution_id.tag
    reconcile = engine.backend.upkeep.reconcile_execution_index
    assert await reconcile(tag, [execution_id], "check") == ["consistent"]
    for index in right:
        await call("ZREM", f"ff:idx:{tag}:{index}", execution_id)
    await call("ZADD", f"ff:idx:{tag}:lane:{LANE}:eligible", 1, execution_id)
    (verdict,) = await reconcile(tag, [execution_id], "check")
    assert verdict.startswith("drifted:suspended")
    (verdict,) = await reconcile(tag, [execution_id], "repair")
    assert verdict.startswith("repaired:eligible>suspended")
    assert await indexes(engine, execution_id) == right
    if not timed:
        await call("ZADD", f"ff:idx:{tag}:suspension_timeout", 1, execution_id)
        await reconcile(tag, [execution_id], "repair")
        assert await indexes(engine, execution_id) == right


async def test_a_lost_timer_is_found_again(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(timeout_at=await engine.now() + 1000)
    execution_id = parked.handle.execution_id
    call, tag = engine.backend.transport.call, execution_id.tag
    await call("DEL", f"ff:idx:{tag}:suspension_timeout")
    await engine.backend.upkeep.reconcile_execution_index(tag, [execution_id], "repair")
    await engine.advance(1001)
    scan = await engine.backend.upkeep.scan_due([Index(tag, "suspension_timeout")], 10)
    assert list(scan.due.values()) == [[execution_id]]
    assert await waits.expire(execution_id) == "fail"


async def test_the_history_tells_of_the_pause(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(GO)
    (entry,) = await engine.backend.reads.read_execution_history(parked.handle.execution_id)
    assert entry.type == "released"
    assert entry.fields["reason"] == "suspend"
    assert entry.fields["suspension_id"] == parked.details.suspension_id
