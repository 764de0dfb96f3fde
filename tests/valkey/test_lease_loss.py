"""How a lease is lost: expiry marking and revocation (03 §11, §12, D7)."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import Revoked
from flowfabric.core.state import StateVector
from flowfabric.engine.valkey import keys
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import event_types, mark, reclaim, running
from tests.support.server import TestServer
from tests.support.storage import indexes, lossy, record, write

EXPIRED = StateVector.from_code("axnwni")
REVOKED = StateVector.from_code("avnwni")


async def test_marking_keeps_the_lease_and_offers_the_execution(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    handle = await engine.running(
        priority=3, policy={"timeout_policy": {"attempt_timeout_ms": 90_000}}
    )
    execution_id = handle.execution_id
    before, placed = await record(engine, execution_id), await indexes(engine, execution_id)
    now = await engine.now() + TTL
    await engine.freeze(now - 1)
    async with untouched(engine):
        assert await mark(engine, [execution_id]) == ["not_yet_expired"]
    await engine.freeze(now)
    assert await mark(engine, [execution_id]) == ["marked_expired"]

    assert await engine.vector(execution_id) == EXPIRED
    assert await record(engine, execution_id) == before | {
        "state": "axnwni",
        "lease_expired_at": str(now),
        "last_transition_at": str(now),
        "blocking_detail": "lease expired, awaiting reclaim",
    }
    del placed["lease_expiry"]
    score = float(before["created_at"]) - 3e12
    assert await indexes(engine, execution_id) == placed | {"lane:default:reclaimable": score}
    event = (await engine.events(execution_id))[-1]
    assert (event.type, event.at) == ("expired", now)
    assert dict(event.fields) == {
        "lease_id": handle.lease_id,
        "lease_epoch": 1,
        "attempt_id": handle.attempt_id,
        "attempt_index": 0,
        "worker_id": "w",
        "worker_instance_id": "w-1",
    }
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.public_state.value == "active"
    assert snapshot.current_lease is not None
    assert snapshot.current_lease.expires_at == now
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "started"


@pytest.mark.corrupts
async def test_every_situation_and_its_clean_up(engine: Engine) -> None:
    call = engine.backend.transport.call
    missing = engine.new_id()
    waiting = await engine.create()
    ended = (await running(engine)).execution_id
    await engine.backend.executions.cancel_execution(ended)
    unowned = (await running(engine)).execution_id
    await write(engine, unowned, state="aunnnr")
    revoked = (await running(engine)).execution_id
    await engine.backend.leases.revoke_lease(revoked)
    live = (await running(engine)).execution_id
    live_expiry = keys.index(missing.tag, "lease_expiry")
    everyone = [missing, waiting, ended, unowned, revoked, live]
    for execution_id in everyone:
        await call("ZADD", live_expiry, 1, execution_id)
    await call("ZREM", keys.lane(missing.tag, "default", "reclaimable"), revoked)
    assert await mark(engine, everyone) == [
        "execution_not_found",
        "not_active",
        "not_active",
        "unowned",
        "already_revoked",
        "not_yet_expired",
    ]
    assert await call("ZRANGE", live_expiry, 0, -1) == [live.encode()]
    assert "lane:default:reclaimable" in await indexes(engine, revoked)


# --- revoke ------------------------------------------------------------------------


async def test_revoking_takes_the_lease_and_offers_the_execution(engine: Engine) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    execution_id = handle.execution_id
    before, placed = await record(engine, execution_id), await indexes(engine, execution_id)
    now = await engine.now() + 10
    await engine.freeze(now)
    outcome = await engine.backend.leases.revoke_lease(execution_id, reason="maintenance")
    assert outcome == Revoked(handle.lease_id, 1)
    assert await engine.vector(execution_id) == REVOKED
    stored = await record(engine, execution_id)
    assert stored.pop("operator_requests").endswith(f" {handle.lease_id}/1\n")
    assert stored == before | {
        "state": "avnwni",
        "lease_revoked_at": str(now),
        "lease_revoke_reason": "maintenance",
        "last_transition_at": str(now),
        "blocking_detail": "lease revoked: maintenance",
    }
    del placed["lease_expiry"], placed["worker:w-1:leases"]
    score = float(before["created_at"])
    assert await indexes(engine, execution_id) == placed | {"lane:default:reclaimable": score}
    event = (await engine.events(execution_id))[-1]
    assert (event.type, event.at) == ("revoked", now)
    assert (event.get("reason"), event.get("revoked_by")) == ("maintenance", "operator")
    assert (event.get("lease_id"), event.get("worker_instance_id")) == (handle.lease_id, "w-1")
    await refused(engine.backend.executions.complete(handle), "lease_revoked")


async def test_a_revocation_reason_is_cut_at_its_limit(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id, reason="ä" * 5000)
    stored = (await record(engine, handle.execution_id))["lease_revoke_reason"]
    assert stored == "ä" * 2048


async def test_a_lost_revoke_reply(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_revoke")
        outcome = await client.leases.revoke_lease(handle.execution_id)
        assert proxy.dropped == 1
    # The repeat gets the answer that was lost.
    assert outcome == Revoked(handle.lease_id, 1)
    assert await event_types(engine, handle.execution_id) == ["acquired", "revoked"]


async def test_loss_is_forgotten_once_somebody_takes_over(engine: Engine) -> None:
    for lose in ("expire", "revoke"):
        handle = await running(engine)
        if lose == "expire":
            await engine.advance(TTL + 1)
            await mark(engine, [handle.execution_id])
        else:
            await engine.backend.leases.revoke_lease(handle.execution_id)
        await reclaim(engine, handle.execution_id)
        stored = await record(engine, handle.execution_id)
        assert not {name for name in stored if name.startswith(("lease_revo", "lease_expired"))}
        assert "blocking_detail" not in stored
