"""Waitpoints that exist before the pause: they buffer, expire, are used or closed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import AllOf, Condition, Count, CountKind, OperatorOnly, Single
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    PendingWaitpoint,
    Suspended,
    UsePending,
)
from flowfabric.core.ids import new_uuid
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import reclaim, running
from tests.support.suspension import Waits

MINUTE = 60_000
SOURCES = CountKind.DISTINCT_SOURCES


async def observed_names(waits: Waits, handle: Handle) -> list[str]:
    return [each.signal_name for each in await waits.backend.waitpoints.observe_signals(handle)]


async def use(
    waits: Waits, handle: Handle, pending: PendingWaitpoint, condition: Condition, **options: Any
) -> Suspended | AlreadySatisfiedSuspension:
    binding = UsePending(pending.waitpoint_id)
    return await waits.backend.suspensions.suspend(
        handle, condition=condition, waitpoints=[binding], **options
    )


@pytest.mark.parametrize("key", ["", "x" * 257, "ü" * 129, "\ud800"])
async def test_keys_are_refused_before_all_else(engine: Engine, key: str) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    await refused(
        waits.backend.waitpoints.create_waitpoint(handle, key, 0), "invalid_waitpoint_key"
    )


@pytest.mark.parametrize("expires_in", [0, -1, True, 1.5, 2**53])
async def test_lifetimes_are_refused_before_the_fence(engine: Engine, expires_in: Any) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    stale = msgspec.structs.replace(handle, lease=f"{new_uuid()}/1")
    await refused(
        waits.backend.waitpoints.create_waitpoint(stale, "k", expires_in), "invalid_input"
    )


async def test_the_fence_comes_next_and_marks_nothing(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()

    async def refuses(code: str, holder: Handle) -> None:
        async with untouched(engine):
            await refused(waits.backend.waitpoints.create_waitpoint(holder, "k", 1), code)

    ghost = msgspec.structs.replace(handle, execution_id=engine.new_id())
    await refuses("execution_not_found", ghost)
    await refuses("stale_lease", msgspec.structs.replace(handle, lease=f"{new_uuid()}/1"))
    await refuses("hmac_secret_not_initialized", handle)
    await engine.advance(TTL)
    await refuses("lease_expired", handle)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await refuses("lease_revoked", handle)
    await engine.backend.executions.cancel_execution(handle.execution_id)
    await refuses("execution_not_active", handle)


@pytest.mark.parametrize(
    ("condition", "sent", "satisfied"),
    [
        (Single("k"), ["x"], True),
        (Single("k", "go"), ["x", "y"], False),
        (Single("k", "go"), ["x", "go", "y"], True),
        (AllOf((Single("k", "a"), Single("k", "b"))), ["a"], False),
        (AllOf((Single("k", "a"), Single("k", "b"))), ["b", "x", "a"], True),
        (AllOf((AllOf((AllOf((Single("k", "a"),)),)), Single("k", "b"))), ["b", "a"], True),
        (Count(n=2, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS), ["a"], False),
        (Count(n=2, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS), ["a", "a"], True),
        (Count(n=2, waitpoints=("k",), count_kind=SOURCES), ["a", "b"], False),
        (OperatorOnly(), ["a", "OperatorOnly", "operator"], False),
    ],
)
async def test_the_whole_condition_is_judged(
    engine: Engine, condition: Condition, sent: list[str], satisfied: bool
) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    for name in sent:
        await waits.signal(handle.execution_id, pending, name)
    outcome = await use(waits, handle, pending, condition)
    assert isinstance(outcome, AlreadySatisfiedSuspension if satisfied else Suspended)


async def test_hundreds_of_buffered_signals_keep_their_order(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    node = Count(n=901, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS)
    for i in range(900):
        await waits.signal(handle.execution_id, pending, str(i))
    # Ten nodes make nine thousand marks, more than one Lua call can carry.
    outcome = await use(waits, handle, pending, AllOf((node,) * 10))
    assert isinstance(outcome, Suspended)
    assert await waits.effect(outcome, "last") == "resume_condition_satisfied"
    claim = await engine.claim()
    observed = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert [s.signal_name for s in observed] == [*map(str, range(900)), "last"]


async def test_a_waitpoint_of_another_attempt(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await running(engine)
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 10 * TTL)
    await engine.advance(TTL + 1)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        handle.execution_id.tag, [handle.execution_id]
    )
    claim = await reclaim(engine, handle.execution_id)
    assert claim.handle.attempt_index == 1
    await refused(use(waits, claim.handle, pending, Single("k")), "invalid_waitpoint_for_execution")


async def test_a_repeat_of_already_satisfied(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    await waits.signal(handle.execution_id, pending, "go")
    first = await use(waits, handle, pending, Single("k"), idempotency_key="x")
    assert isinstance(first, AlreadySatisfiedSuspension)
    async with untouched(engine):
        assert await use(waits, handle, pending, Single("k"), idempotency_key="x") == first


async def test_satisfied_twice_under_one_lease_tells_the_later(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked)
    handle = (await engine.claim()).handle
    assert await observed_names(waits, handle) == ["go"]
    for name in ("second", "third"):
        pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
        await waits.signal(handle.execution_id, pending, name)
        await use(waits, handle, pending, Single("k"))
        assert await observed_names(waits, handle) == [name]
    parked = await waits.park(handle=handle)
    await waits.send(parked)
    claim = await engine.claim()
    assert await observed_names(waits, claim.handle) == ["go"]


async def test_a_signal_after_the_end_before_the_scan(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    await engine.advance(1001)
    async with untouched(engine):
        await refused(waits.signal(handle.execution_id, pending, "go"), "pending_waitpoint_expired")


async def test_closing_an_active_waitpoint_leaves_the_pause_open(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=1, waitpoints=("a", "b")))
    execution_id = parked.handle.execution_id
    first, _ = parked.details.waitpoints
    assert await waits.backend.waitpoints.close_waitpoint(
        execution_id, first.waitpoint_id, "enough"
    )
    assert [r.__dict__["action"] for r in caplog.records] == ["waitpoint_closed"]
    await refused(waits.send(parked), "waitpoint_closed")
    assert await waits.effect(parked, at=1) == "resume_condition_satisfied"
