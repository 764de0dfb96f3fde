"""Pages of scanners and listings, registries and secrets stay short at their limits."""

from __future__ import annotations

import pytest

from flowfabric.core.conditions import AllOf, Single
from flowfabric.core.contracts.executions import Duplicate, NewExecution
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.upkeep import Index, SurveyRequest
from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, Engine
from tests.support.server_time import assert_short, command, copy, uuids
from tests.support.suspension import SECRET, Waits

CAPABILITIES = [f"capability-{n}" for n in range(256)]


# --- pages of scanners ------------------------------------------------------------


async def test_promoting_a_page(engine: Engine) -> None:
    ids: list[ExecutionId] = []

    async def delay() -> None:
        del ids[:]
        for n in range(100):
            required = {"required_capabilities": [f"c{n}"]}
            policy = {"routing_requirements": required}
            ids.append(await engine.create(policy=policy, delay_ms=1000))
        await engine.advance(2000)

    async def promote() -> None:
        verdicts = await engine.backend.upkeep.promote_delayed(ids[0].tag, LANE, ids)
        assert set(verdicts) == {"promoted"}

    await assert_short(engine, "ff_promote_delayed", promote, delay)


async def test_expiring_suspensions_with_many_waitpoints(engine: Engine) -> None:
    waits = await Waits.open(engine)
    condition = AllOf(tuple(Single(f"k{n}") for n in range(64)))
    ids: list[ExecutionId] = []

    async def park() -> None:
        del ids[:]
        at = await engine.now() + 1000
        for _ in range(50):
            parked = await waits.park(condition, timeout_at=at, timeout_behavior="auto_resume")
            ids.append(parked.handle.execution_id)
        await engine.advance(5000)

    async def expire() -> None:
        verdicts = await engine.backend.suspensions.expire_suspension(ids[0].tag, ids)
        assert verdicts == ["auto_resume"] * 50
        await engine.claim_all(256, ttl=10_000_000)

    await assert_short(engine, "ff_expire_suspension", expire, park)


async def test_expiring_a_page_of_waitpoints(engine: Engine) -> None:
    await Waits.open(engine)
    handle = await engine.running()
    points: list[str] = []

    async def create() -> None:
        del points[:]
        for _ in range(100):
            point = await engine.backend.waitpoints.create_waitpoint(handle, "k", 10)
            points.append(point.waitpoint_id)
        await engine.advance(20)

    async def expire() -> None:
        verdicts = await engine.backend.suspensions.expire_waitpoints(
            handle.execution_id.tag, points
        )
        assert set(verdicts) == {"closed"}

    await assert_short(engine, "ff_expire_waitpoint", expire, create)


@pytest.mark.corrupts
async def test_scanning_many_full_indexes(engine: Engine) -> None:
    tag = engine.new_id().tag
    members = [part for each in uuids(500) for part in (1, f"{tag}:{each}")]
    indexes = [Index(tag, "delayed", f"l{n}") for n in range(200)]
    await command(engine, "ZADD", "filler", *members)
    await copy(engine, "filler", (keys.lane(tag, index.lane, "delayed") for index in indexes))

    async def scan() -> None:
        found = await engine.backend.upkeep.scan_due(indexes, 100)
        assert [len(ids) for ids in found.due.values()] == [100] * 200

    await assert_short(engine, "ff_scan_due", scan)


@pytest.mark.corrupts
async def test_surveying_many_lanes_with_all_their_signatures(engine: Engine) -> None:
    tag, lanes = engine.new_id().tag, [f"l{n}" for n in range(64)]
    await command(engine, "SADD", "filler", *(f"capability-{n}" for n in range(128)))
    await copy(engine, "filler", (keys.lane(tag, lane, "sigs") for lane in lanes))
    members = [part for each in uuids(500) for part in (1, f"{tag}:{each}")]
    await command(engine, "ZADD", "entries", *members)
    for index in ("eligible", "delayed", "active", "suspended", "terminal"):
        await copy(engine, "entries", (keys.lane(tag, lane, index) for lane in lanes))
    await copy(engine, "entries", [keys.index(tag, "all_executions")])
    for n in range(128):
        requiring = f"capability-{n}"
        await copy(engine, "entries", [keys.eligible(tag, "l7", requiring)])
        await copy(engine, "entries", [keys.reclaimable(tag, "l7", requiring)])

    async def survey() -> None:
        (survey,) = await engine.backend.upkeep.survey_indexes([SurveyRequest(tag, lanes)])
        assert len(survey.indexes) == 6 * 64 + 2 * 128

    await assert_short(engine, "ff_survey", survey)


@pytest.mark.corrupts
async def test_reading_lanes_with_all_their_signatures(engine: Engine) -> None:
    tag, lanes = engine.new_id().tag, [f"l{n}" for n in range(32)]
    await engine.backend.places.register_places({tag: lanes})
    await command(engine, "SADD", "filler", *(f"capability-{n}" for n in range(128)))
    await copy(engine, "filler", (keys.lane(tag, lane, "sigs") for lane in lanes))
    # Executions that are gone never end the search for the oldest early.
    members = [part for n, each in enumerate(uuids(300)) for part in (n, f"{tag}:{each}")]
    await command(engine, "ZADD", "entries", *members)
    for lane in lanes:
        await copy(engine, "entries", [keys.lane(tag, lane, "eligible")])
        for n in range(128):
            await copy(engine, "entries", [keys.eligible(tag, lane, f"capability-{n}")])

    async def count() -> None:
        counts = await engine.backend.listings.count_lanes(lanes)
        # No worker can take those that require a capability.
        sizes = [(of["eligible"], of["blocked_route"]) for of in counts.values()]
        assert sizes == [(300, 300 * 128)] * 32

    async def find_oldest() -> None:
        assert await engine.backend.listings.oldest_eligible(lanes) == dict.fromkeys(lanes, 0)

    await assert_short(engine, "ff_count_lanes", count)
    await assert_short(engine, "ff_oldest_eligible", find_oldest)


@pytest.mark.corrupts
async def test_listing_the_suspended_of_many_lanes(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await waits.park(handle=handle)
    tag, first = handle.execution_id.tag, handle.execution_id
    partition = first.partition
    ids = [f"{tag}:{each}" for each in uuids(1500)]
    await copy(
        engine,
        keys.suspension(tag, first),
        (keys.suspension(tag, ExecutionId(each)) for each in ids),
    )
    await command(engine, "DEL", keys.lane(tag, LANE, "suspended"))
    # More lanes than a deployment may have: entries that lost their registration come back.
    lanes = [f"lane{n:05d}" for n in range(10_050)]
    for start in range(0, len(lanes), 2000):
        places = (f"{partition} {lane}" for lane in lanes[start : start + 2000])
        await command(engine, "HSET", keys.PLACES, *(part for each in places for part in (each, 1)))
    for n, each in enumerate(ids):
        lane = ("lane00000", "lane05000", "lane10049")[n % 3]
        await command(engine, "ZADD", keys.lane(tag, lane, "suspended"), n, each)

    async def listing() -> None:
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await engine.backend.suspensions.list_suspended(
                partition=partition, cursor=cursor, limit=1000
            )
            found += [entry.execution_id for entry in page.entries]
            cursor = page.next_cursor
        assert found == ids

    await assert_short(engine, "ff_list_suspended", listing)


@pytest.mark.corrupts
async def test_one_lane_after_another_with_a_full_page(engine: Engine) -> None:
    tag = engine.new_id().tag
    members = [part for n, each in enumerate(uuids(3000)) for part in (n, f"{tag}:{each}")]
    await command(engine, "ZADD", "entries", *members)
    lanes = [f"l{n}" for n in range(50)]
    await command(engine, "SADD", keys.LANES, *lanes)
    await copy(engine, "entries", (keys.lane(tag, lane, "suspended") for lane in lanes))
    after = (1000, f"{tag}:{uuids(1001)[-1]}")
    args = (1001, *after, *lanes)

    async def read() -> None:
        reply = await engine.backend.calls.fcall("ff_list_suspended", tag, args, op="test")
        assert (len(reply[2]), reply[3]) == (1001, 2)

    await assert_short(engine, "ff_list_suspended", read)


# --- registries and secrets -------------------------------------------------------


async def test_registries_of_lanes(engine: Engine) -> None:
    tag, lanes = engine.new_id().tag, [f"lane{n}" for n in range(500)]
    backend = engine.backend

    async def register() -> None:
        backend.places.known_places.clear()
        await backend.places.register_places({tag: lanes})

    async def ring() -> None:
        assert await backend.wakeups.ring_waiting({tag: lanes[200:300]}) == 100

    async def forget() -> None:
        assert await backend.upkeep.forget_idle_lanes() == 399, "one has settings"

    async def set_lane() -> None:
        await backend.lanes.set_lane_config("lane1", reclaim_grace_ms=5)

    await assert_short(engine, "ff_register_places", register)
    await assert_short(engine, "ff_register_names", register)
    await assert_short(engine, "ff_set_lane", set_lane)
    await assert_short(engine, "ff_store_lane", set_lane)
    for lane in lanes[200:300]:
        execution_id = ExecutionId(f"{tag}:{new_uuid()}")
        await engine.create(lane=lane, execution_id=execution_id)
    await assert_short(engine, "ff_ring_waiting", ring)

    async def leave() -> None:
        await register()
        await engine.advance(60_001)

    await assert_short(engine, "ff_idle_lanes", forget, leave)
    await assert_short(engine, "ff_forget_places", forget, leave)


async def test_new_scores(engine: Engine) -> None:
    tag, backend = engine.new_id().tag, engine.backend
    for n in range(100):
        routing = {"routing_requirements": {"required_capabilities": [f"c{n}"]}}
        await engine.create(policy=routing)
    new = [
        NewExecution(execution_id=engine.new_id(), execution_kind="job", priority=n % 100)
        for n in range(5000)
    ]
    await backend.executions.create_many(new)
    weight = 1000

    async def change() -> None:
        nonlocal weight
        weight += 1
        await backend.lanes.set_lane_config("default", priority_weight_ms=weight)

    async def rescore() -> None:
        await backend.upkeep.rescore(tag)

    await assert_short(engine, "ff_set_lane", change)
    await assert_short(engine, "ff_rescore", rescore, change)


async def test_keys_of_a_moved_lane(engine: Engine) -> None:
    backend = engine.backend

    def batch(shards: int) -> list[NewExecution]:
        return [
            NewExecution(
                execution_id=ExecutionId.solo("busy", backend.counts, shards, ("default", f"k{n}")),
                execution_kind="job",
                lane_id="busy",
                idempotency_key=f"k{n}",
                shards=shards,
            )
            for n in range(500)
        ]

    await backend.executions.create_many(batch(1))
    await backend.lanes.set_lane_config("busy", placement="spread", shards=8)

    async def repeat() -> None:
        outcomes = await backend.executions.create_many(batch(8))
        assert all(isinstance(outcome, Duplicate) for outcome in outcomes)

    await assert_short(engine, "ff_find_keys", repeat)


async def test_the_registry_of_workers(engine: Engine) -> None:
    backend = engine.backend
    lanes = [f"lane{n}" for n in range(1000)]

    async def register() -> None:
        await backend.workers.register_worker(
            worker_id="w", worker_instance_id="w-1", lanes=lanes, capabilities=CAPABILITIES
        )

    await assert_short(engine, "ff_worker_register", register)

    async def vanish() -> None:
        listed = [part for each in uuids(1000) for part in (each, "w")]
        await command(engine, "HSET", keys.workers("{default}"), *listed)

    async def sweep() -> None:
        assert await backend.upkeep.sweep_workers("default") == 1000

    await assert_short(engine, "ff_worker_sweep", sweep, vanish)


async def test_secrets_after_many_rotations(engine: Engine) -> None:
    backend = engine.backend

    async def seed() -> None:
        await backend.secrets.seed_at_boot(SECRET)

    await assert_short(engine, "ff_seed_secret", seed)
    for n in range(200):
        await backend.secrets.rotate_waitpoint_hmac_secret(
            0, f"r{n}", f"{n:064x}"[::-1].replace("0", "1")
        )
    number = iter(range(1000))

    async def rotate() -> None:
        await backend.secrets.rotate_waitpoint_hmac_secret(0, f"s{next(number)}", "ef" * 32)

    async def kids() -> None:
        assert len((await backend.secrets.list_waitpoint_hmac_kids(0)).verifying) >= 200

    await assert_short(engine, "ff_rotate_secret", rotate)
    await assert_short(engine, "ff_list_kids", kids)
