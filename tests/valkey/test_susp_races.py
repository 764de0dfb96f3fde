"""Two calls at once, in both orders; and calls whose reply never arrived."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.contracts.suspension import (
    Accepted,
    PendingWaitpoint,
    Suspended,
)
from flowfabric.core.errors import TransportError
from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.conformance.test_susp_races import keyed, told
from tests.support.engine import LANE, TTL, Engine, refused
from tests.support.leases import event_types, running
from tests.support.server import TestServer
from tests.support.storage import lossy
from tests.support.suspension import GO, Waits

Act = Callable[[Waits, Suspended], Awaitable[Any]]


# --- who comes first ----------------------------------------------------------------------------


async def signal(waits: Waits, parked: Suspended) -> Any:
    return await waits.send(parked)


async def timeout(waits: Waits, parked: Suspended) -> Any:
    return await waits.expire(parked.handle.execution_id)


async def cancel(waits: Waits, parked: Suspended) -> Any:
    return await waits.backend.executions.cancel_execution(parked.handle.execution_id)


async def resume(waits: Waits, parked: Suspended) -> Any:
    return await waits.backend.suspensions.resume_execution(parked.handle.execution_id)


async def deadline(waits: Waits, parked: Suspended) -> Any:
    execution_id = parked.handle.execution_id
    (verdict,) = await waits.backend.upkeep.expire_execution(
        execution_id.tag, ExpireReason.EXECUTION_DEADLINE, [execution_id]
    )
    return verdict


async def close(waits: Waits, parked: Suspended) -> Any:
    return await waits.backend.waitpoints.close_waitpoint(
        parked.handle.execution_id, parked.details.waitpoint_id
    )


# First, then second: the state it ends in, the suspension's reason, and what the second is told.
RACES: list[tuple[Act, Act, str, str, str]] = [
    (signal, signal, "waiting", "resumed", "target_not_signalable"),
    (signal, timeout, "waiting", "resumed", "not_suspended_cleaned"),
    (signal, cancel, "cancelled", "resumed", "ok"),
    (signal, resume, "waiting", "resumed", "execution_not_suspended"),
    (signal, deadline, "expired", "resumed", "expired"),
    (signal, close, "waiting", "resumed", "False"),
    (timeout, signal, "failed", "timed_out_fail", "target_not_signalable"),
    (timeout, timeout, "failed", "timed_out_fail", "not_suspended_cleaned"),
    (timeout, cancel, "failed", "timed_out_fail", "execution_not_active"),
    (timeout, resume, "failed", "timed_out_fail", "execution_not_suspended"),
    (timeout, deadline, "failed", "timed_out_fail", "already_terminal"),
    (cancel, signal, "cancelled", "cancelled", "target_not_signalable"),
    (cancel, timeout, "cancelled", "cancelled", "not_suspended_cleaned"),
    (cancel, resume, "cancelled", "cancelled", "execution_not_suspended"),
    (cancel, deadline, "cancelled", "cancelled", "already_terminal"),
    (resume, signal, "waiting", "resumed", "target_not_signalable"),
    (resume, timeout, "waiting", "resumed", "not_suspended_cleaned"),
    (resume, cancel, "cancelled", "resumed", "ok"),
    (resume, resume, "waiting", "resumed", "execution_not_suspended"),
    (deadline, signal, "expired", "expired:execution_deadline", "target_not_signalable"),
    (deadline, timeout, "expired", "expired:execution_deadline", "not_suspended_cleaned"),
    (deadline, cancel, "expired", "expired:execution_deadline", "execution_not_active"),
    (deadline, resume, "expired", "expired:execution_deadline", "execution_not_suspended"),
    (close, signal, "suspended", "", "waitpoint_closed"),
    (close, timeout, "failed", "timed_out_fail", "fail"),
    (close, resume, "waiting", "resumed", "ok"),
]


@pytest.mark.parametrize(
    ("first", "second", "state", "reason", "answer"),
    RACES,
    ids=[f"{row[0].__name__}-{row[1].__name__}" for row in RACES],
)
async def test_one_after_the_other(
    engine: Engine, first: Act, second: Act, state: str, reason: str, answer: str
) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(policy={"timeout_policy": {"execution_deadline_ms": 1000}})
    parked = await waits.park(handle=handle, timeout_at=await engine.now() + 1000)
    execution_id = handle.execution_id
    await engine.advance(1001)
    await first(waits, parked)
    assert await told(second(waits, parked)) == answer
    assert await engine.backend.reads.read_execution_state(execution_id) == state
    assert (await waits.suspension(execution_id)).get("close_reason", "") == reason
    types = await event_types(engine, execution_id)
    assert types.count("completion") == (state in ("failed", "cancelled", "expired"))
    assert types.count("signal") <= 1


async def test_all_at_once(engine: Engine) -> None:
    """Whoever wins, the suspension closes once and one cause stands everywhere."""
    rng = random.Random(random.getrandbits(64))
    waits = await Waits.open(engine)
    acts: list[Act] = [signal, signal, timeout, cancel, resume]
    for _ in range(30):
        handle = await running(engine)
        parked = await waits.park(handle=handle, timeout_at=await engine.now() + 1)
        await engine.advance(2)
        rng.shuffle(acts)
        await asyncio.gather(*(told(act(waits, parked)) for act in acts))
        suspension = await waits.suspension(handle.execution_id)
        (waitpoint,) = await waits.waitpoints(parked)
        assert waitpoint["state"] == "closed"
        assert waitpoint["close_reason"] == suspension["close_reason"]
        types = await event_types(engine, handle.execution_id)
        ends = types.count("signal") + types.count("resumed")
        if suspension["close_reason"] == "resumed":
            assert ends == 1
        else:
            assert ends == 0
        assert types.count("completion") <= 1


@pytest.mark.parametrize("suspend_first", [True, False])
async def test_suspend_and_lease_expiry(engine: Engine, suspend_first: bool) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    execution_id = handle.execution_id

    async def mark() -> list[str]:
        await engine.advance(TTL)
        return await engine.backend.upkeep.mark_lease_expired_if_due(
            execution_id.tag, [execution_id]
        )

    if suspend_first:
        await waits.park(handle=handle)
        assert await mark() == ["not_active"]
        assert (await engine.vector(execution_id)).lifecycle_phase == "suspended"
        return
    assert await mark() == ["marked_expired"]
    await refused(waits.backend.suspensions.suspend(handle, condition=GO), "lease_expired")
    assert await waits.suspension(execution_id) == {}


# --- lost replies -------------------------------------------------------------------------------


async def test_a_lost_suspend_is_answered_from_memory(engine: Engine, valkey: TestServer) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_suspend")
        outcome = await client.suspensions.suspend(handle, condition=GO)
        assert proxy.dropped == 1
    assert isinstance(outcome, Suspended)
    assert await event_types(engine, handle.execution_id) == ["acquired", "released"]
    await waits.send(outcome)


async def test_a_lost_suspend_without_a_key_is_ambiguous(
    engine: Engine, valkey: TestServer
) -> None:
    await Waits.open(engine)
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_suspend")
        with pytest.raises(TransportError) as caught:
            await client.suspensions.suspend(handle, condition=GO, idempotency_key="")
        assert caught.value.ambiguous
        problem = await refused(
            client.suspensions.suspend(handle, condition=GO, idempotency_key=""),
            "execution_not_active",
        )
    # Own epoch and attempt, phase suspended: it was committed.
    assert problem.details == ("none", "1", "suspended", handle.attempt_id)


async def test_a_lost_request_suspends_nothing_twice(engine: Engine, valkey: TestServer) -> None:
    await Waits.open(engine)
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_request(b"ff_suspend")
        outcome = await client.suspensions.suspend(handle, condition=GO)
    assert isinstance(outcome, Suspended)
    assert await event_types(engine, handle.execution_id) == ["acquired", "released"]


async def test_a_lost_pending_waitpoint_is_the_same_one(engine: Engine, valkey: TestServer) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_create_waitpoint")
        pending = await client.waitpoints.create_waitpoint(handle, "k", 60_000)
        assert proxy.dropped == 1
    assert isinstance(pending, PendingWaitpoint)
    listed = await waits.backend.waitpoints.list_pending_waitpoints(handle.execution_id)
    assert [entry.waitpoint_id for entry in listed.entries] == [pending.waitpoint_id]
    await waits.signal(handle.execution_id, pending, "go")


Send = Callable[[ValkeyBackend, Suspended], Awaitable[Any]]


async def plain(client: ValkeyBackend, parked: Suspended) -> Any:
    return await client.signals.deliver_signal(
        parked.handle.execution_id,
        parked.details.waitpoint_id,
        parked.details.waitpoint_token,
        "go",
    )


async def undeduplicated(client: ValkeyBackend, parked: Suspended) -> Any:
    return await client.signals.deliver_signal(
        parked.handle.execution_id,
        parked.details.waitpoint_id,
        parked.details.waitpoint_token,
        "go",
        idempotency_key="k",
        dedup_ttl_ms=0,
    )


async def approval(client: ValkeyBackend, parked: Suspended) -> Any:
    return await client.signals.deliver_approval_signal(
        parked.handle.execution_id, parked.details.waitpoint_id, "go"
    )


@pytest.mark.parametrize("send", [plain, keyed, undeduplicated, approval])
async def test_a_lost_signal_counts_once_and_tells_its_effect(
    engine: Engine, valkey: TestServer, send: Send
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_signal")
        outcome = await send(client, parked)
        assert proxy.dropped == 1
    assert isinstance(outcome, Accepted)
    assert outcome.effect == "resume_condition_satisfied", "although it had resumed before"
    types = await event_types(engine, parked.handle.execution_id)
    assert types.count("signal") == 1
    claim = await engine.claim()
    (signal,) = await waits.backend.waitpoints.observe_signals(claim.handle)
    assert signal.signal_id == outcome.signal_id


async def test_a_lost_resume_is_ambiguous_and_not_repeated(
    engine: Engine, valkey: TestServer
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id = parked.handle.execution_id
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_resume")
        with pytest.raises(TransportError) as caught:
            await client.suspensions.resume_execution(execution_id)
        assert caught.value.ambiguous
        await refused(client.suspensions.resume_execution(execution_id), "execution_not_suspended")
    assert (await event_types(engine, execution_id)).count("resumed") == 1


async def test_a_lost_timeout_scan_acts_once(engine: Engine, valkey: TestServer) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(timeout_at=await engine.now() + 1)
    execution_id = parked.handle.execution_id
    await engine.advance(2)
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_expire_suspension")
        verdicts = await client.suspensions.expire_suspension(execution_id.tag, [execution_id])
    assert verdicts == ["not_suspended_cleaned"]
    assert (await event_types(engine, execution_id)).count("completion") == 1


async def test_a_lost_claim_after_the_resume(engine: Engine, valkey: TestServer) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    await waits.send(parked)
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_claim_many")
        want = engine.want(lane=LANE)
        claimed = await client.claims.claim_many(want, parked.handle.execution_id.tag, 1)
        assert proxy.dropped == 1
    (claim,) = claimed.claims
    assert claim.resume_cause is not None
    assert claim.handle.lease_epoch == 2
    assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 1


async def test_a_lost_rotation_is_a_noop(engine: Engine, valkey: TestServer) -> None:
    await Waits.open(engine)
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_rotate_secret")
        done = await client.secrets.rotate_waitpoint_hmac_secret(0, "k2", "cd" * 32)
        assert done.status == "noop"
        proxy.drop_next_reply(b"ff_rotate_secret")
        summary = await client.secrets.rotate_waitpoint_hmac_secret_all("k3", "ef" * 32)
    assert summary.rotated == engine.backend.counts.flow
