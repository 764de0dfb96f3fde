"""Waitpoints that exist before the pause: they buffer, expire, are used or closed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.conditions import AllOf, Count, CountKind, Single
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    Suspended,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from tests.conformance.test_susp_pending import MINUTE, SOURCES, use
from tests.support.engine import LANE, Engine, refused, untouched
from tests.support.leases import running
from tests.support.storage import indexes, record
from tests.support.suspension import Waits

# --- making -------------------------------------------------------------------------------------


async def test_a_pending_waitpoint(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    before = await engine.vector(handle.execution_id)
    await engine.freeze(await engine.now())
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
        await refused(create(other), "waitpoint_already_exists")


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
    await refused(waits.signal(execution_id, pending, "go"), "target_not_signalable")
    await engine.backend.leases.renew(handle)
    await engine.backend.executions.complete(handle)


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
    placed_at = await indexes(engine, handle.execution_id)
    assert list(placed_at) == [f"lane:{LANE}:suspended"]
    assert await send("vote", "ann") == "appended_to_waitpoint_duplicate"
    assert await send("vote", "bob") == "appended_to_waitpoint"
    assert await send("go", "eve") == "appended_to_waitpoint"
    assert await send("vote", "dan") == "resume_condition_satisfied"
    claim = await engine.claim()
    observed = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert [s.source_identity for s in observed] == ["ann", "bob", "eve", "dan"]


async def test_a_full_buffer_refuses_instead_of_forgetting(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", MINUTE)
    for _ in range(3):
        await waits.signal(handle.execution_id, pending, "x", signal_maxlen=3)
    async with untouched(engine):
        await refused(
            waits.signal(handle.execution_id, pending, "x", signal_maxlen=3),
            "signal_limit_exceeded",
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
                use(waits, holder, options.get("point", pending), Single("k", "go")), code
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
    await engine.freeze(int(stored["created_at"]) + 1000)
    await waits.write(key, expires_at=int(stored["created_at"]) + 1000)
    await refuses("pending_waitpoint_expired")
    await waits.write(key, expires_at=int(stored["created_at"]) + 1001)
    await refuses("waitpoint_not_token_bound")
    await waits.backend.waitpoints.close_waitpoint(handle.execution_id, pending.waitpoint_id)
    await refuses("waitpoint_not_pending")


# --- expiry and closing -------------------------------------------------------------------------


async def test_expiry_at_its_exact_time(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    await engine.freeze(await engine.now())
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    end = int((await waits.waitpoint(execution_id, pending.waitpoint_id))["expires_at"])
    await engine.freeze(end - 1)
    assert await waits.backend.suspensions.expire_waitpoints(tag, [pending.waitpoint_id]) == [
        "not_yet_due"
    ]
    await engine.freeze(end)
    # Not past its end: a signal is still taken.
    await waits.signal(execution_id, pending, "go", idempotency_key="once")
    assert await waits.backend.suspensions.expire_waitpoints(tag, [pending.waitpoint_id]) == [
        "closed"
    ]
    stored = await waits.waitpoint(execution_id, pending.waitpoint_id)
    assert (stored["state"], stored["close_reason"]) == ("closed", "never_committed")
    assert stored["signal_count"] == "1", "what was buffered stays as history"
    await refused(use(waits, handle, pending, Single("k")), "waitpoint_not_pending")
    await refused(waits.signal(execution_id, pending, "go"), "target_not_signalable")
    again = await waits.signal(execution_id, pending, "go", idempotency_key="once")
    assert again.kind == "duplicate"
    assert await waits.backend.suspensions.expire_waitpoints(
        tag, [pending.waitpoint_id, new_uuid()]
    ) == [
        "not_pending_cleaned",
        "not_found_cleaned",
    ]


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
        await refused(close(handle.execution_id, new_uuid()), "waitpoint_not_found")
        await refused(close(other.execution_id, pending.waitpoint_id), "waitpoint_not_found")
        await refused(close(handle.execution_id, "x"), "invalid_input")
        await refused(close(handle.execution_id, pending.waitpoint_id, ""), "invalid_input")
        stale = msgspec.structs.replace(handle, lease=f"{new_uuid()}/1")
        await refused(close(handle.execution_id, pending.waitpoint_id, handle=stale), "stale_lease")
        ghost = engine.new_id()
        await refused(close(ghost, pending.waitpoint_id, handle=handle), "execution_not_found")
    key = f"ff:wp:{handle.execution_id.tag}:{pending.waitpoint_id}"
    await waits.write(key, state="strange")
    await refused(close(handle.execution_id, pending.waitpoint_id), "waitpoint_not_open")
    await waits.write(key, state="expired")
    assert not await close(handle.execution_id, pending.waitpoint_id)


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
        await refused(waits.signal(execution_id, one, "x"), "target_not_signalable")
    assert (await waits.backend.waitpoints.list_pending_waitpoints(execution_id)).entries == ()
    assert await engine.backend.transport.call("KEYS", "*pending*") == []
    assert "waitpointed" not in await record(engine, execution_id)
