"""Claims without a grant: choice, order, repeats (04 S2, S3, S6, S8, 03 D7)."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import ClaimedMany
from flowfabric.core.errors import EngineError
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from tests.support.claims import claim_many, ids
from tests.support.engine import TTL, Engine
from tests.support.leases import OTHER, event_types, lapsed, mark, paused
from tests.support.server import TestServer
from tests.support.storage import indexes, lossy

# --- choice and order ------------------------------------------------------------


async def test_fresh_resumed_and_reclaimed_in_one_call(engine: Engine) -> None:
    lost = await lapsed(engine, input_payload=b"lost")
    resumable = await paused(engine, input_payload=b"paused")
    await engine.advance(2)
    fresh = await engine.create(input_payload=b"fresh")
    claimed = await claim_many(engine, worker="v", instance="v-1")
    kinds = {claim.input_payload: claim for claim in claimed.claims}
    assert ids(claimed.claims) == [lost.execution_id, resumable.execution_id, fresh]
    assert claimed.remaining == 0

    assert kinds[b"lost"].handle.kind == "reclaimed"
    assert (kinds[b"lost"].attempt_type, kinds[b"lost"].attempt_index) == ("reclaim", 1)
    assert kinds[b"lost"].handle.attempt_id != lost.attempt_id
    assert kinds[b"paused"].handle.kind == "resumed"
    assert kinds[b"paused"].handle.attempt_id == resumable.attempt_id
    assert kinds[b"fresh"].handle.kind == "fresh"
    assert [claim.handle.lease_epoch for claim in claimed.claims] == [2, 2, 1]
    lease_ids = {claim.handle.lease_id for claim in claimed.claims}
    assert len(lease_ids) == 3
    for claim in claimed.claims:
        placed = await indexes(engine, claim.execution_id)
        assert set(placed) == {"lane:default:active", "lease_expiry", "worker:v-1:leases"}
        await engine.backend.executions.complete(claim.handle)


@pytest.mark.parametrize(
    "first",
    ["granted", "at the cap", pytest.param("without a record", marks=pytest.mark.corrupts)],
)
async def test_what_is_passed_over_does_not_hide_the_next_best_of_its_index(
    engine: Engine, first: str
) -> None:
    """Two lost ones before a fresh one, of which the first cannot be taken."""
    passed = await engine.running(
        priority=9, policy={"max_reclaim_count": 0} if first == "at the cap" else None
    )
    lost = await engine.running(priority=5)
    await engine.advance(TTL + 1)
    await mark(engine, [passed.execution_id, lost.execution_id])
    fresh = await engine.create()
    if first == "granted":
        await engine.backend.claims.issue_reclaim_grant(passed.execution_id, **OTHER)
    elif first == "without a record":
        await engine.backend.transport.call(
            "DEL", keys.core(passed.execution_id.tag, passed.execution_id)
        )
    one_by_one = [ids((await claim_many(engine, 1)).claims) for _ in range(2)]
    assert one_by_one == [[lost.execution_id], [fresh]]


async def test_a_lost_reply_costs_no_execution(engine: Engine, valkey: TestServer) -> None:
    made = {await engine.create() for _ in range(3)}
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_claim_many")
        claimed = await client.claims.claim_many(engine.want(), engine.new_id().tag, 10)
        assert proxy.dropped == 1
        assert set(ids(claimed.claims)) == made
        for claim in claimed.claims:
            await client.executions.complete(claim.handle)
    for execution_id in made:
        assert await event_types(engine, execution_id) == ["acquired", "completion"]


# --- drift ---------------------------------------------------------------------------


async def test_members_without_a_record_are_cleaned_and_do_not_hide_others(
    engine: Engine,
) -> None:
    ghost = engine.new_id()
    call = engine.backend.transport.call
    for index in (
        keys.eligible(ghost.tag, "default"),
        keys.eligible(ghost.tag, "default", "gpu"),
        keys.lane(ghost.tag, "default", "reclaimable"),
    ):
        await call("ZADD", index, 1, ghost)
    await call("SADD", keys.lane(ghost.tag, "default", "sigs"), "gpu")
    execution_id = await engine.create()
    claimed = await claim_many(engine, capabilities=["gpu"])
    assert (ids(claimed.claims), claimed.remaining) == ([execution_id], 0)
    assert await indexes(engine, ghost) == {}


async def test_members_in_the_wrong_state_are_cleaned(engine: Engine) -> None:
    call = engine.backend.transport.call
    active = (await engine.running()).execution_id
    ended = (await engine.running()).execution_id
    await engine.backend.executions.cancel_execution(ended)
    delayed = await engine.create(delay_until=await engine.now() + 60_000)
    for execution_id in (active, ended, delayed):
        before = await indexes(engine, execution_id)
        for index in ("eligible", "reclaimable"):
            await call("ZADD", keys.lane(execution_id.tag, "default", index), 1, execution_id)
            assert await claim_many(engine) == ClaimedMany([], 0)
            assert await indexes(engine, execution_id) == before


async def test_an_execution_in_two_indexes_is_claimed_once(engine: Engine) -> None:
    execution_id = await engine.create()
    reclaimable = keys.lane(execution_id.tag, "default", "reclaimable")
    await engine.backend.transport.call("ZADD", reclaimable, 1, execution_id)
    assert ids((await claim_many(engine)).claims) == [execution_id]
    assert await claim_many(engine) == ClaimedMany([], 0)
    assert "lane:default:reclaimable" not in await indexes(engine, execution_id)


async def test_a_result_over_the_limit_stops_nobody_else(engine: Engine) -> None:
    large, small = await engine.running(), await engine.running()
    following = await engine.create()
    limit = engine.backend.calls.max_payload_bytes
    outcomes, claimed = await engine.backend.claims.complete_and_claim(
        large.execution_id.tag,
        [Completion(large, b"x" * (limit + 1)), Completion(small, b"x" * limit)],
        engine.want(),
        1,
    )
    assert [error.code if isinstance(error, EngineError) else error for error in outcomes] == [
        "payload_too_large",
        None,
    ]
    assert ids(claimed.claims) == [following]
    await engine.backend.leases.renew(large)


async def test_a_lost_reply_of_the_fused_call(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    following = await engine.create()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_complete")
        outcomes, claimed = await client.claims.complete_and_claim(
            handle.execution_id.tag, [Completion(handle)], engine.want(), 5
        )
        assert proxy.dropped == 1
    assert outcomes == [None]
    assert ids(claimed.claims) == [following]
    assert await event_types(engine, handle.execution_id) == ["acquired", "completion"]
    assert await event_types(engine, following) == ["acquired"]


async def test_the_reclaim_cap_ends_an_execution_found_by_a_claim(engine: Engine) -> None:
    handle = await lapsed(engine, policy={"max_reclaim_count": 0})
    behind = await engine.create()
    claimed = await claim_many(engine, 1, worker=OTHER["worker_id"])
    assert ids(claimed.claims) == [behind]
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.public_state.value, info.failure_reason) == ("failed", "max_reclaims_exceeded")
    assert set(await indexes(engine, handle.execution_id)) == {"lane:default:terminal"}
