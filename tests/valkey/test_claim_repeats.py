"""The operator's fused claim, and claims whose reply was lost (03 §8, D1, D3)."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey import keys
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import WORKER, a_grant, event_types, fused, grant, paused
from tests.support.server import TestServer
from tests.support.storage import grant_fields, indexes, lossy, write

# --- fused ---------------------------------------------------------------------


async def test_an_operator_takes_a_named_execution(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    await engine.create(priority=9)
    execution_id = await engine.create(policy=policy)
    claim = await fused(engine, execution_id)
    assert (claim.handle.kind, claim.attempt_type) == ("fresh", "initial")
    assert claim.handle.worker_instance_id == "operator"
    assert await grant_fields(engine, execution_id) == {}
    assert set(await indexes(engine, execution_id)) == {
        "lane:default:active",
        "lease_expiry",
        "worker:operator:leases",
    }
    (event,) = await engine.events(execution_id)
    assert event.get("reason") == "issue_grant_and_claim"
    await engine.backend.executions.complete(claim.handle, b"by hand")


@pytest.mark.corrupts
async def test_check_order_of_the_fused_claim(engine: Engine) -> None:
    execution_id = engine.new_id()
    await refused(fused(engine, execution_id), "execution_not_found")
    await engine.create(execution_id=execution_id)
    await write(engine, execution_id, lease=f"{new_uuid()}/1", lease_expires_at=1)
    await grant(engine, execution_id)
    for state, code in (
        ("alnnnr", "execution_not_eligible"),
        ("avnwni", "execution_not_eligible"),
        ("tunnsz", "execution_not_eligible"),
        ("rlewsr", "lease_conflict"),
        ("ruewsr", "execution_not_eligible"),
        ("ruewnr", "active_attempt_exists"),
        ("ruddni", "grant_already_exists"),
        ("ruewnf", "grant_already_exists"),
    ):
        await write(engine, execution_id, state=state)
        async with untouched(engine):
            await refused(fused(engine, execution_id), code)
    await engine.advance(5001)
    await write(engine, execution_id, state="ruddni")
    await refused(fused(engine, execution_id), "execution_not_eligible")
    await write(engine, execution_id, state="ruddnf")
    await engine.backend.transport.call(
        "ZREM", keys.eligible(execution_id.tag, "default"), execution_id
    )
    await refused(fused(engine, execution_id), "execution_not_in_eligible_set")
    await write(engine, execution_id, state="ruewnf")
    await refused(fused(engine, execution_id), "execution_not_in_eligible_set")
    await engine.backend.transport.call(
        "ZADD", keys.eligible(execution_id.tag, "default"), 1, execution_id
    )
    await write(engine, execution_id, state="ruddnf")
    await refused(fused(engine, execution_id), "execution_not_eligible")


async def test_a_lapsed_grant_does_not_stop_the_operator(engine: Engine) -> None:
    execution_id = await engine.create()
    await grant(engine, execution_id)
    await engine.advance(5001)
    await fused(engine, execution_id)
    assert await grant_fields(engine, execution_id) == {}


@pytest.mark.parametrize(
    "function", ["ff_claim_execution", "ff_claim_resumed", "ff_grant_and_claim"]
)
async def test_a_lost_claim_reply_is_answered_again(
    engine: Engine, valkey: TestServer, function: str
) -> None:
    resumed = function == "ff_claim_resumed"
    execution_id = (await paused(engine)).execution_id if resumed else await engine.create()
    held = a_grant(execution_id)
    if function != "ff_grant_and_claim":
        held = await grant(engine, execution_id)
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(function.encode())
        if function == "ff_grant_and_claim":
            claim = await client.claims.issue_grant_and_claim(execution_id, lease_duration_ms=TTL)
        elif resumed:
            claim = await client.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL)
        else:
            claim = await client.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
        assert proxy.dropped == 1
    await engine.backend.executions.complete(claim.handle)
    acquired = [kind for kind in await event_types(engine, execution_id) if kind == "acquired"]
    assert len(acquired) == (2 if resumed else 1)
