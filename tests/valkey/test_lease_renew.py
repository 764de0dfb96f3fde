"""Renewal, one by one and in batches (03 §10, D11)."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Renewed
from tests.support.engine import TTL, Engine, refused
from tests.support.leases import event_types
from tests.support.server import TestServer
from tests.support.storage import indexes, lossy, record


async def test_a_renewal_extends_the_lease_and_nothing_else(engine: Engine) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    execution_id = handle.execution_id
    before = await record(engine, execution_id)
    timeout = (await indexes(engine, execution_id))["attempt_timeout"]
    now = await engine.now() + 1000
    await engine.freeze(now)
    assert await engine.backend.leases.renew(handle) == Renewed(now + TTL, 1)
    after = await record(engine, execution_id)
    assert after == before | {
        "lease_expires_at": str(now + TTL),
        "lease_last_renewed_at": str(now),
    }
    assert await indexes(engine, execution_id) == {
        "lane:default:active": now + TTL,
        "lease_expiry": now + TTL,
        "attempt_timeout": timeout,
        "worker:w-1:leases": None,
    }
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is not None
    assert snapshot.current_lease.last_heartbeat_at == now
    assert snapshot.last_mutation_at == now
    assert await event_types(engine, execution_id) == ["acquired"]


async def test_a_lease_ends_at_its_expiry_not_after(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    handle = await engine.running()
    now = await engine.now()
    await engine.freeze(now + TTL - 1)
    renewed = await engine.backend.leases.renew(handle)
    assert renewed.expires_at == now + 2 * TTL - 1
    await engine.freeze(renewed.expires_at)
    await refused(engine.backend.leases.renew(handle), "lease_expired")
    # The refusal marked it: the next claim may take it.
    assert "lane:default:reclaimable" in await indexes(engine, handle.execution_id)


async def test_three_hundred_leases_with_their_own_ttls(engine: Engine) -> None:
    await engine.backend.executions.create_many([_new(engine) for _ in range(300)])
    claims = await engine.claim_all(256) + await engine.claim_all(256, ttl=5000)
    assert len(claims) == 300
    await engine.freeze(await engine.now() + 100)
    now = await engine.now()
    outcomes = await engine.backend.leases.renew_many([claim.handle for claim in claims])
    expiries = [item.expires_at for item in outcomes if isinstance(item, Renewed)]
    assert expiries == [now + TTL] * 256 + [now + 5000] * 44
    assert (await indexes(engine, claims[-1].execution_id))["lease_expiry"] == now + 5000


def _new(engine: Engine) -> Any:
    return NewExecution(execution_id=engine.new_id(), execution_kind="job")


async def test_a_lost_reply_is_harmless(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_renew")
        (outcome,) = await client.leases.renew_many([handle])
        assert proxy.dropped == 1
    assert isinstance(outcome, Renewed)
    await engine.backend.executions.complete(handle)
