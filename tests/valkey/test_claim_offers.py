"""What a claim passes over: foreign requirements, live grants, graces, closed lanes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from flowfabric.core.contracts.leases import ClaimedMany
from flowfabric.engine.valkey import keys
from tests.support.claims import GPU, claim_many, create_many, ids
from tests.support.engine import TTL, Engine
from tests.support.leases import grant, lapsed, mark
from tests.support.storage import grant_fields, indexes, record


async def test_an_emptied_signature_leaves_no_trace(engine: Engine) -> None:
    await engine.create(policy=GPU)
    claim = await engine.claim(capabilities=["gpu"])
    await engine.backend.executions.complete(claim.handle)
    assert await claim_many(engine, capabilities=["gpu"]) == ClaimedMany([], 0)
    sigs = keys.lane(claim.execution_id.tag, "default", "sigs")
    assert await engine.backend.transport.call("EXISTS", sigs) == 0
    await engine.create(policy=GPU)
    await engine.claim(capabilities=["gpu"])


@pytest.mark.corrupts
@pytest.mark.parametrize("lost", [False, True])
async def test_an_index_does_not_decide_who_may_claim(engine: Engine, lost: bool) -> None:
    """An entry among those without requirements is passed over, whatever brought it there."""
    execution_id = await engine.create(policy=GPU)
    if lost:
        await engine.claim(capabilities=["gpu"])
        await engine.backend.leases.revoke_lease(execution_id)
    index = keys.reclaimable if lost else keys.eligible
    await engine.backend.transport.call("ZADD", index(execution_id.tag, "default"), 1, execution_id)
    assert await claim_many(engine) == ClaimedMany([], 0)


async def in_grace(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=10**12)
    await lapsed(engine)


async def granted(engine: Engine) -> None:
    await grant(engine, await engine.create())


async def unreadable(engine: Engine) -> None:
    execution_id = await engine.create()
    core = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HSET", core, "state", "??????")


@pytest.mark.corrupts
@pytest.mark.parametrize("stand", [in_grace, granted, unreadable])
async def test_what_nobody_can_take_now_is_not_left_for_the_taking(
    engine: Engine, stand: Callable[[Engine], Awaitable[None]]
) -> None:
    """And it hides nothing, however much of it stands in front."""
    for _ in range(60):
        await stand(engine)
    assert await claim_many(engine, 1) == ClaimedMany([], 0)
    behind = await engine.create()
    assert ids((await claim_many(engine, 1)).claims) == [behind]


async def test_a_whole_index_that_nobody_can_take_now_hides_no_other(engine: Engine) -> None:
    """And a claim that takes nothing wakes nobody."""
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=10**12)
    held = await create_many(engine, 300)
    tag = held[0].tag
    assert len((await claim_many(engine, 256)).claims + (await claim_many(engine)).claims) == 300
    await engine.advance(TTL + 1)
    await mark(engine, held)
    bell = keys.wake("default")
    await engine.backend.transport.call("DEL", bell)
    assert (await claim_many(engine, 1)).claims == []
    assert await engine.backend.transport.call("EXISTS", bell) == 0
    other = await engine.create()
    assert other.tag == tag
    assert ids((await claim_many(engine, 1)).claims) == [other]


async def test_a_lapsed_grant_is_no_obstacle(engine: Engine) -> None:
    execution_id = await engine.create()
    await grant(engine, execution_id, grant_ttl_ms=5000)
    await engine.advance(5001)
    assert ids((await claim_many(engine)).claims) == [execution_id]
    assert await grant_fields(engine, execution_id) == {}
    assert "grant_expires_at" not in await record(engine, execution_id)


async def test_expired_work_is_offered_after_the_lanes_grace(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=10_000)
    await engine.freeze(await engine.now())
    handle = await engine.running()
    revoked = await engine.running()
    expiry = await engine.now() + TTL
    await engine.freeze(expiry - 1)
    await engine.backend.leases.revoke_lease(revoked.execution_id)
    await engine.freeze(expiry)
    assert await mark(engine, [handle.execution_id]) == ["marked_expired"]
    # Revoked work is offered at once.
    assert ids((await claim_many(engine)).claims) == [revoked.execution_id]
    await engine.freeze(expiry + 9_999)
    assert (await claim_many(engine)).claims == []
    assert "lane:default:reclaimable" in await indexes(engine, handle.execution_id)
    await engine.freeze(expiry + 10_000)
    assert ids((await claim_many(engine)).claims) == [handle.execution_id]
