"""The operator's fused claim, and claims whose reply was lost (03 §8, D1, D3)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey import keys
from tests.engine.probes import (
    WORKER,
    a_grant,
    event_types,
    fused,
    grant,
    grant_fields,
    lapsed,
    lossy,
    paused,
    placed,
    refused,
    untouched,
    write,
)
from tests.support.engine import TTL, Engine
from tests.support.server import TestServer

# --- fused ---------------------------------------------------------------------


async def test_an_operator_takes_a_named_execution(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    await engine.create(priority=9)
    execution_id = await engine.create(policy=policy)
    claim = await fused(engine, execution_id)
    assert (claim.handle.kind, claim.attempt_type) == ("fresh", "initial")
    assert claim.handle.worker_instance_id == "operator"
    assert await grant_fields(engine, execution_id) == {}
    assert set(await placed(engine, execution_id)) == {
        "lane:default:active",
        "lease_expiry",
        "worker:operator:leases",
    }
    (event,) = await engine.events(execution_id)
    assert event.get("reason") == "issue_grant_and_claim"
    await engine.backend.executions.complete(claim.handle, b"by hand")


async def test_an_operator_resumes_a_paused_execution(engine: Engine) -> None:
    handle = await paused(engine)
    claim = await fused(engine, handle.execution_id, worker_id="me", worker_instance_id="me-1")
    assert (claim.handle.kind, claim.handle.attempt_id) == ("resumed", handle.attempt_id)
    assert (claim.handle.lease_epoch, claim.handle.worker_instance_id) == (2, "me-1")
    last = (await engine.events(handle.execution_id))[-1]
    assert last.get("reason") == "issue_grant_and_claim_resumed"
    await engine.backend.executions.complete(claim.handle)


async def test_an_operator_passes_by_a_paused_lane(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert (await fused(engine, execution_id)).execution_id == execution_id


@pytest.mark.corrupts
async def test_check_order_of_the_fused_claim(engine: Engine) -> None:
    execution_id = engine.new_id()
    await refused("execution_not_found", fused(engine, execution_id))
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
            await refused(code, fused(engine, execution_id))
    await engine.advance(5001)
    await write(engine, execution_id, state="ruddni")
    await refused("execution_not_eligible", fused(engine, execution_id))
    await write(engine, execution_id, state="ruddnf")
    await engine.backend.transport.call(
        "ZREM", keys.eligible(execution_id.tag, "default"), execution_id
    )
    await refused("execution_not_in_eligible_set", fused(engine, execution_id))
    await write(engine, execution_id, state="ruewnf")
    await refused("execution_not_in_eligible_set", fused(engine, execution_id))
    await engine.backend.transport.call(
        "ZADD", keys.eligible(execution_id.tag, "default"), 1, execution_id
    )
    await write(engine, execution_id, state="ruddnf")
    await refused("execution_not_eligible", fused(engine, execution_id))


async def test_a_lapsed_grant_does_not_stop_the_operator(engine: Engine) -> None:
    execution_id = await engine.create()
    await grant(engine, execution_id)
    await engine.advance(5001)
    await fused(engine, execution_id)
    assert await grant_fields(engine, execution_id) == {}


# --- lost replies (D1) ---------------------------------------------------------


async def test_a_repeated_fresh_claim_gives_the_same_claim(engine: Engine) -> None:
    execution_id = await engine.create(input_payload=b"x", tags={"a.b": "c"})
    held = await grant(engine, execution_id)
    ids: dict[str, Any] = {"lease_id": new_uuid(), "attempt_id": new_uuid()}
    first = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids)
    async with untouched(engine):
        again = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids)
        assert again == first
        for other in ({**ids, "lease_id": new_uuid()}, {**ids, "attempt_id": new_uuid()}):
            await refused(
                "execution_not_leaseable",
                engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **other),
            )


async def test_a_repeated_resumed_claim_gives_the_same_claim(engine: Engine) -> None:
    held = await grant(engine, (await paused(engine)).execution_id)
    lease_id = new_uuid()
    first = await engine.backend.claims.claim_resumed_execution(
        held, **WORKER, lease_ttl_ms=TTL, lease_id=lease_id
    )
    async with untouched(engine):
        again = await engine.backend.claims.claim_resumed_execution(
            held, **WORKER, lease_ttl_ms=TTL, lease_id=lease_id
        )
    assert again == first


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_repeated_fused_claim_gives_the_same_claim(engine: Engine, resumed: bool) -> None:
    execution_id = (await paused(engine)).execution_id if resumed else await engine.create()
    request_id = new_uuid()
    first = await fused(engine, execution_id, request_id=request_id)
    async with untouched(engine):
        assert await fused(engine, execution_id, request_id=request_id) == first
        await refused("execution_not_eligible", fused(engine, execution_id, request_id=new_uuid()))
    await refused("invalid_input", fused(engine, execution_id, request_id="mine"))


async def test_a_repeat_after_the_lease_ran_out_is_refused(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    ids: dict[str, Any] = {"lease_id": new_uuid(), "attempt_id": new_uuid()}
    await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids)
    await engine.advance(TTL)
    async with untouched(engine):
        await refused(
            "execution_not_leaseable",
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids),
        )


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


async def test_terminal_and_lost_executions_take_no_claim(engine: Engine) -> None:
    lost = await lapsed(engine)
    await refused("execution_not_eligible", grant(engine, lost.execution_id))
    await engine.backend.executions.cancel_execution(lost.execution_id)
    await refused("execution_not_eligible", grant(engine, lost.execution_id))
    await refused("execution_not_eligible", fused(engine, lost.execution_id))
