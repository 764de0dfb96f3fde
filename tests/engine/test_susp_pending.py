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
from flowfabric.core.state import ExpireReason
from tests.engine.probes import fields, freeze, placed, reclaim, refused, running, untouched
from tests.support.engine import LANE, TTL, Engine
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


# --- making -------------------------------------------------------------------------------------


async def test_a_pending_waitpoint(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    before = await engine.vector(handle.execution_id)
    await freeze(engine, await engine.now())
    now = await engine.now()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
    assert stored.pop("waitpoint_token") == pending.waitpoint_token.reveal()
    assert stored == {
        "execution_id": handle.execution_id,
        "attempt_index": "0",
        "waitpoint_key": "k",
        "state": "pending",
        "created_at": str(now),
        "expires_at": str(now + MINUTE),
    }
    assert await engine.vector(handle.execution_id) == before, "the lease is kept"
    await engine.backend.leases.renew(handle)
    index: Any = await engine.backend.transport.call(
        "ZSCORE", f"ff:idx:{handle.execution_id.tag}:pending_waitpoint_expiry", pending.waitpoint_id
    )
    assert index == now + MINUTE
    again = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    assert again.waitpoint_id != pending.waitpoint_id, "each call makes a new one"


async def test_the_longest_life_saturates(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 2**53 - 1)
    stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
    assert stored["expires_at"] == str(2**53 - 1)


@pytest.mark.parametrize("key", ["", "x" * 257, "ü" * 129, "\ud800"])
async def test_keys_are_refused_before_all_else(engine: Engine, key: str) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    await refused(
        "invalid_waitpoint_key", waits.backend.waitpoints.create_waitpoint(handle, key, 0)
    )


@pytest.mark.parametrize("expires_in", [0, -1, True, 1.5, 2**53])
async def test_lifetimes_are_refused_before_the_fence(engine: Engine, expires_in: Any) -> None:
    waits = Waits(engine)
    handle = await engine.running()
    stale = msgspec.structs.replace(handle, lease=f"{new_uuid()}/1")
    await refused(
        "invalid_input", waits.backend.waitpoints.create_waitpoint(stale, "k", expires_in)
    )


async def test_the_fence_comes_next_and_marks_nothing(engine: Engine) -> None:
    waits = Waits(engine)
    handle = await engine.running()

    async def refuses(code: str, holder: Handle) -> None:
        async with untouched(engine):
            await refused(code, waits.backend.waitpoints.create_waitpoint(holder, "k", 1))

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


async def test_an_id_in_use_is_refused_and_a_repeated_call_answered(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await running(engine)
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)

    async def create(holder: Handle) -> Any:
        args = (holder.execution_id, holder.wire, pending.waitpoint_id, "k", MINUTE)
        return await waits.backend.calls.fcall(
            "ff_create_waitpoint", holder.execution_id.tag, args, op="create_waitpoint"
        )

    async with untouched(engine):
        reply = await create(handle)
        assert reply[4].decode() == pending.waitpoint_token.reveal()
    other = await running(engine)
    async with untouched(engine):
        await refused("waitpoint_already_exists", create(other))


# --- buffering ----------------------------------------------------------------------------------


async def test_signals_before_the_pause_are_kept_for_it(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    early = await waits.signal(handle.execution_id, pending, "go", payload=b"early")
    assert early.kind == "accepted"
    assert early.effect == "buffered_for_pending_waitpoint"
    stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
    assert (stored["signal_count"], "matched_signal_count" in stored) == ("1", False)
    before = await engine.dump()
    outcome = await use(waits, handle, pending, Single("k", "go"))
    assert isinstance(outcome, AlreadySatisfiedSuspension)
    assert outcome.details.waitpoint_token == pending.waitpoint_token
    assert outcome.details.waitpoint_key == "k"
    after = await engine.dump()
    changed = {
        name.decode() for name in before.keys() | after if before.get(name) != after.get(name)
    }
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    prefix = f"ff:exec:{tag}:{execution_id}:"
    assert changed == {
        f"ff:wp:{tag}:{pending.waitpoint_id}",
        f"ff:idx:{tag}:pending_waitpoint_expiry",
        f"{prefix}waitpoints:pending",
        f"{prefix}suspension:met",
        f"ff:dedup:suspend:{tag}:{execution_id}",
    }, "core, lease, attempt and indexes are as they were"
    stored = await waits.waitpoint(execution_id, pending.waitpoint_id)
    assert (stored["state"], stored["close_reason"]) == ("closed", "resumed")
    assert "satisfied_at" in stored
    (signal,) = await waits.backend.waitpoints.observe_signals(handle)
    assert (signal.signal_id, signal.payload) == (early.signal_id, b"early")
    await refused("target_not_signalable", waits.signal(execution_id, pending, "go"))
    await engine.backend.leases.renew(handle)
    await engine.backend.executions.complete(handle)


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


async def test_what_was_buffered_counts_after_activation(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)

    async def send(name: str, who: str) -> str:
        outcome = await waits.signal(handle.execution_id, pending, name, source_identity=who)
        assert outcome.kind == "accepted"
        return outcome.effect

    await send("vote", "ann")
    await send("vote", "ann")
    await send("noise", "bob")
    created = (await waits.waitpoint(handle.execution_id, pending.waitpoint_id))["created_at"]
    votes = Count(n=3, waitpoints=("k",), count_kind=SOURCES, signal_name="vote")
    await engine.advance(5)
    outcome = await use(waits, handle, pending, AllOf((votes, Single("k", "go"))))
    assert isinstance(outcome, Suspended)
    assert outcome.details.waitpoint_token == pending.waitpoint_token, "the token stays valid"
    stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
    assert stored["state"] == "active"
    assert stored["created_at"] == created
    assert "expires_at" not in stored, "the suspension has no timeout"
    assert stored["suspension_id"] == outcome.details.suspension_id
    placed_at = await placed(engine, handle.execution_id)
    assert list(placed_at) == [f"lane:{LANE}:suspended"]
    assert await send("vote", "ann") == "appended_to_waitpoint_duplicate"
    assert await send("vote", "bob") == "appended_to_waitpoint"
    assert await send("go", "eve") == "appended_to_waitpoint"
    assert await send("vote", "dan") == "resume_condition_satisfied"
    claim = await engine.claim()
    observed = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert [s.source_identity for s in observed] == ["ann", "bob", "eve", "dan"]


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


async def test_a_full_buffer_refuses_instead_of_forgetting(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    for _ in range(3):
        await waits.signal(handle.execution_id, pending, "x", signal_maxlen=3)
    async with untouched(engine):
        await refused(
            "signal_limit_exceeded",
            waits.signal(handle.execution_id, pending, "x", signal_maxlen=3),
        )
    outcome = await use(
        waits,
        handle,
        pending,
        Count(n=5, waitpoints=("k",), count_kind=CountKind.DISTINCT_SIGNALS),
    )
    assert isinstance(outcome, Suspended)
    # An active waitpoint goes on, and lists what contributes.
    await waits.send(outcome, "y", signal_maxlen=3)
    listing = f"ff:wp:{handle.execution_id.tag}:{pending.waitpoint_id}:signals"
    assert await engine.backend.transport.call("LLEN", listing) == 4
    assert await waits.effect(outcome, "z", signal_maxlen=3) == "resume_condition_satisfied"


# --- using: refusals in their order -------------------------------------------------------------


async def test_use_of_a_waitpoint_that_cannot_be_used(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await running(engine)
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    key = f"ff:wp:{handle.execution_id.tag}:{pending.waitpoint_id}"

    async def refuses(code: str, holder: Handle = handle, **options: Any) -> str:
        async with untouched(engine):
            problem = await refused(
                code, use(waits, holder, options.get("point", pending), Single("k", "go"))
            )
        return problem.detail

    unknown = msgspec.structs.replace(pending, waitpoint_id=new_uuid())
    await refuses("waitpoint_not_found", point=unknown)
    await refuses("invalid_waitpoint_for_execution", await running(engine))
    parked = await waits.park(handle=await running(engine))
    (active,) = parked.details.waitpoints
    await refuses("waitpoint_not_pending", point=active)
    wrong_key = await waits.backend.waitpoints.create_waitpoint(handle, "other", MINUTE)
    detail = await refuses("invalid_input", point=wrong_key)
    assert detail == "referenced_waitpoint_key_missing_binding: k"
    await engine.backend.transport.call("HDEL", key, "waitpoint_token")
    await refuses("waitpoint_not_token_bound")
    stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
    await freeze(engine, int(stored["created_at"]) + 1000)
    await waits.write(key, expires_at=int(stored["created_at"]) + 1000)
    await refuses("pending_waitpoint_expired")
    await waits.write(key, expires_at=int(stored["created_at"]) + 1001)
    await refuses("waitpoint_not_token_bound")
    await waits.backend.waitpoints.close_waitpoint(handle.execution_id, pending.waitpoint_id)
    await refuses("waitpoint_not_pending")


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
    await refused("invalid_waitpoint_for_execution", use(waits, claim.handle, pending, Single("k")))


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


# --- expiry and closing -------------------------------------------------------------------------


async def test_expiry_at_its_exact_time(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    await freeze(engine, await engine.now())
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    end = int((await waits.waitpoint(execution_id, pending.waitpoint_id))["expires_at"])
    await freeze(engine, end - 1)
    assert await waits.backend.suspensions.expire_waitpoints(tag, [pending.waitpoint_id]) == [
        "not_yet_due"
    ]
    await freeze(engine, end)
    # Not past its end: a signal is still taken.
    await waits.signal(execution_id, pending, "go", idempotency_key="once")
    assert await waits.backend.suspensions.expire_waitpoints(tag, [pending.waitpoint_id]) == [
        "closed"
    ]
    stored = await waits.waitpoint(execution_id, pending.waitpoint_id)
    assert (stored["state"], stored["close_reason"]) == ("closed", "never_committed")
    assert stored["signal_count"] == "1", "what was buffered stays as history"
    await refused("waitpoint_not_pending", use(waits, handle, pending, Single("k")))
    await refused("target_not_signalable", waits.signal(execution_id, pending, "go"))
    again = await waits.signal(execution_id, pending, "go", idempotency_key="once")
    assert again.kind == "duplicate"
    assert await waits.backend.suspensions.expire_waitpoints(
        tag, [pending.waitpoint_id, new_uuid()]
    ) == [
        "not_pending_cleaned",
        "not_found_cleaned",
    ]


async def test_a_signal_after_the_end_before_the_scan(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    await engine.advance(1001)
    async with untouched(engine):
        await refused("pending_waitpoint_expired", waits.signal(handle.execution_id, pending, "go"))


async def test_closing_a_pending_waitpoint(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    close = waits.backend.waitpoints.close_waitpoint
    assert await close(handle.execution_id, pending.waitpoint_id, handle=handle)
    stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
    assert stored["close_reason"] == stored["condition_closed_reason"] == "proactive_close"
    async with untouched(engine):
        assert not await close(handle.execution_id, pending.waitpoint_id, "other")
    assert await engine.backend.transport.call("KEYS", "*pending*") == []


async def test_closing_what_cannot_be_closed(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await running(engine)
    other = await running(engine)
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    close = waits.backend.waitpoints.close_waitpoint
    async with untouched(engine):
        await refused("waitpoint_not_found", close(handle.execution_id, new_uuid()))
        await refused("waitpoint_not_found", close(other.execution_id, pending.waitpoint_id))
        await refused("invalid_input", close(handle.execution_id, "x"))
        await refused("invalid_input", close(handle.execution_id, pending.waitpoint_id, ""))
        stale = msgspec.structs.replace(handle, lease=f"{new_uuid()}/1")
        await refused("stale_lease", close(handle.execution_id, pending.waitpoint_id, handle=stale))
        ghost = engine.new_id()
        await refused("execution_not_found", close(ghost, pending.waitpoint_id, handle=handle))
    key = f"ff:wp:{handle.execution_id.tag}:{pending.waitpoint_id}"
    await waits.write(key, state="strange")
    await refused("waitpoint_not_open", close(handle.execution_id, pending.waitpoint_id))
    await waits.write(key, state="expired")
    assert not await close(handle.execution_id, pending.waitpoint_id)


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
    await refused("waitpoint_closed", waits.send(parked))
    assert await waits.effect(parked, at=1) == "resume_condition_satisfied"


async def test_a_waitpoint_closes_once_with_its_own_reason(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(Count(n=1, waitpoints=("a", "b")))
    await waits.backend.waitpoints.close_waitpoint(
        parked.handle.execution_id, parked.details.waitpoint_id, "enough"
    )
    await waits.send(parked, at=1)
    assert [w["close_reason"] for w in await waits.waitpoints(parked)] == ["enough", "resumed"]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("complete", "never_committed"),
        ("fail", "never_committed"),
        ("cancel", "cancelled"),
        ("attempt_timeout", "expired:attempt_timeout"),
        ("execution_deadline", "expired:execution_deadline"),
    ],
)
async def test_unused_waitpoints_close_with_their_execution(
    engine: Engine, ending: str, reason: str
) -> None:
    waits = await Waits.open(engine)
    limits = {"attempt_timeout_ms": 1000, "execution_deadline_ms": 1000}
    handle = await engine.running(policy={"timeout_policy": limits})
    execution_id = handle.execution_id
    create = waits.backend.waitpoints.create_waitpoint
    pending = [await create(handle, "k", 10**9) for _ in range(3)]
    if ending == "complete":
        await engine.backend.executions.complete(handle)
    elif ending == "fail":
        await engine.backend.executions.fail(handle, "x", "permanent")
    elif ending == "cancel":
        await engine.backend.executions.cancel_execution(execution_id)
    else:
        await engine.advance(1001)
        await engine.backend.upkeep.expire_execution(
            execution_id.tag, ExpireReason(ending), [execution_id]
        )
    for one in pending:
        stored = await waits.waitpoint(execution_id, one.waitpoint_id)
        assert (stored["state"], stored["close_reason"]) == ("closed", reason)
        assert stored["condition_closed_reason"] == reason
        await refused("target_not_signalable", waits.signal(execution_id, one, "x"))
    assert (await waits.backend.waitpoints.list_pending_waitpoints(execution_id)).entries == ()
    assert await engine.backend.transport.call("KEYS", "*pending*") == []
    assert "waitpointed" not in await fields(engine, execution_id)
