"""Lanes on one partition or on many, and idempotency keys when that changes (04 S5, S8)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.executions import Created, Duplicate, NewExecution
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import lane_partitions
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import PublicState
from flowfabric.engine.api.places import LaneLoad, PartitionLoad
from tests.support.engine import Engine, refused, untouched

LANE = "busy"
GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


def keyed(engine: Engine, key: str, shards: int = 1, **fields: Any) -> NewExecution:
    """As a submitter mints it that believes in this number of shards."""
    execution_id = ExecutionId.solo(LANE, engine.backend.counts, shards, ("default", key))
    return NewExecution(
        execution_id=execution_id,
        execution_kind="job",
        lane_id=LANE,
        idempotency_key=key,
        shards=shards,
        **fields,
    )


async def spread(engine: Engine, shards: int) -> None:
    await engine.backend.lanes.set_lane_config(LANE, placement="spread", shards=shards)


def moves(engine: Engine, *shards: int) -> str:
    """A key that has another partition for each of these numbers of shards."""
    for n in range(10_000):
        tags = {keyed(engine, f"key-{n}", each).execution_id.tag for each in shards}
        if len(tags) == len(shards):
            return f"key-{n}"
    raise AssertionError("there is no such key")


# --- load of partitions ------------------------------------------------------------------


async def test_the_busiest_partitions(engine: Engine) -> None:
    lanes = engine.backend.lanes
    assert await lanes.busiest_partitions() == []
    await engine.create(lane="later", delay_until=await engine.now() + 60_000)
    assert await lanes.busiest_partitions() == []
    quiet = await engine.create(lane=LANE)
    await engine.running()
    await engine.running()
    await engine.create(policy=GPU)
    await engine.create(lane="mails")
    busiest, *rest = await lanes.busiest_partitions()
    assert busiest == PartitionLoad(
        partition=engine.new_id().partition,
        waiting=1,
        active=2,
        lanes=(LaneLoad(lane_id="default", waiting=1, active=2),),
    )
    homes = [quiet.partition, engine.new_id("mails").partition]
    assert [load.partition for load in rest] == sorted(homes)
    assert await lanes.busiest_partitions(1) == [busiest]
    assert await lanes.busiest_partitions(0) == []
    await refused(lanes.busiest_partitions(-1), "invalid_input")


async def test_work_that_lost_its_worker_counts_as_waiting(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    (load,) = await engine.backend.lanes.busiest_partitions()
    assert (load.waiting, load.active) == (1, 0)


async def test_a_spread_lane_heats_each_of_its_partitions(engine: Engine) -> None:
    await spread(engine, 2)
    items = [keyed(engine, f"key-{n}", 2) for n in range(20)]
    await engine.backend.executions.create_many(items)
    loads = await engine.backend.lanes.busiest_partitions()
    assert {load.partition for load in loads} == {*lane_partitions(LANE, 2, engine.backend.counts)}
    assert sum(load.waiting for load in loads) == 20
    assert {lane.lane_id for load in loads for lane in load.lanes} == {LANE}


# --- settings ------------------------------------------------------------------------


async def test_settings_and_counts_of_a_lane(engine: Engine) -> None:
    await engine.running(lane=LANE)
    await engine.create(lane=LANE)
    await engine.create(lane=LANE, delay_until=await engine.now() + 60_000)
    await spread(engine, 8)
    await engine.freeze(await engine.now())
    await engine.backend.lanes.set_lane_state(LANE, "paused", "why")
    lane = await engine.backend.lanes.get_lane(LANE)
    assert (lane.state, lane.reason, lane.changed_at) == ("paused", "why", await engine.now())
    assert (lane.placement, lane.shards) == ("spread", 8)
    counted = {name: count for name, count in lane.counts.items() if count}
    assert counted == {"active": 1, "eligible": 1, "delayed": 1}
    fresh = await engine.backend.lanes.get_lane("default")
    assert (fresh.placement, fresh.shards, fresh.changed_at) == ("pinned", 256, None)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"placement": "everywhere"},
        {"placement": ""},
        {"shards": 0},
        {"shards": 257},
        {"shards": True},
        {"placement": "spread", "shards": -1},
    ],
)
async def test_a_placement_out_of_range_is_refused(engine: Engine, bad: dict[str, Any]) -> None:
    async with untouched(engine):
        await refused(engine.backend.lanes.set_lane_config(LANE, **bad), "invalid_input")


async def test_this_process_knows_the_placement_that_it_set(engine: Engine) -> None:
    places = engine.backend.places
    assert places.shards(LANE) == 1
    await spread(engine, 8)
    assert places.shards(LANE) == 8
    await engine.backend.lanes.set_lane_config(LANE, placement="pinned")
    assert places.shards(LANE) == 1
    await engine.backend.lanes.set_lane_config(LANE, placement="spread")
    assert places.shards(LANE) == 8, "the number is kept"


# --- minting -------------------------------------------------------------------------


def test_ids_are_spread_over_the_shards_of_the_lane(engine: Engine) -> None:
    counts = engine.backend.counts
    own = lane_partitions(LANE, 8, counts)
    minted = {each.partition for each in ExecutionId.mint_solo_many(LANE, counts, 500, 8)}
    assert minted == set(own)
    assert own[0] == ExecutionId.solo(LANE, counts).partition
    everywhere = ExecutionId.mint_solo_many(LANE, counts, 5000, counts.flow)
    assert len({each.partition for each in everywhere}) > 250


def test_a_key_decides_the_shard(engine: Engine) -> None:
    tags = {keyed(engine, "same", 64).execution_id.tag for _ in range(20)}
    assert len(tags) == 1
    counts = engine.backend.counts
    others = {
        ExecutionId.solo(LANE, counts, 64, (namespace, "same")).tag
        for namespace in ("a", "b", "c", "d", "e", "f")
    }
    assert len(others) > 1


# --- keys when the placement changes ---------------------------------------------------


async def create(engine: Engine, new: NewExecution) -> Any:
    (outcome,) = await engine.backend.executions.create_many([new])
    return outcome


async def test_an_outdated_submitter_is_corrected(engine: Engine) -> None:
    """It minted for one partition; repeats look on the eight of today."""
    key = moves(engine, 1, 8)
    await spread(engine, 8)
    first = await create(engine, keyed(engine, key, 1))
    assert isinstance(first, Created)
    assert first.execution_id.tag == keyed(engine, key, 8).execution_id.tag
    assert await create(engine, keyed(engine, key, 8)) == Duplicate(first.execution_id)


@pytest.mark.parametrize("path", [(1, 8), (8, 1), (8, 64), (1, 8, 64), (64, 8, 1)])
async def test_a_repeat_finds_the_first_whatever_changed(
    engine: Engine, path: tuple[int, ...]
) -> None:
    key = moves(engine, *path)
    if path[0] != 1:
        await spread(engine, path[0])
    first = await create(engine, keyed(engine, key, path[0]))
    assert isinstance(first, Created)
    for shards in path[1:]:
        await spread(engine, shards)
        for view in (shards, path[0]):
            assert await create(engine, keyed(engine, key, view)) == Duplicate(first.execution_id)


async def test_a_conflict_is_found_too(engine: Engine) -> None:
    key = moves(engine, 1, 8)
    await create(engine, keyed(engine, key, 1, idempotency_digest=b"one"))
    await spread(engine, 8)
    outcome = await create(engine, keyed(engine, key, 8, idempotency_digest=b"two"))
    assert isinstance(outcome, EngineError)
    assert outcome.code == "idempotency_conflict"


async def test_the_window_of_a_policy_counts(engine: Engine) -> None:
    key, policy = moves(engine, 1, 8), parse_policy({"dedup_window_ms": 3_600_000})
    first = await create(engine, keyed(engine, key, 1, policy=policy))
    await spread(engine, 8)
    again = await create(engine, keyed(engine, key, 8, policy=policy))
    assert again == Duplicate(first.execution_id)


async def test_what_others_are_in_the_batch_is_created(engine: Engine) -> None:
    key = moves(engine, 1, 8)
    first = await create(engine, keyed(engine, key, 1))
    await spread(engine, 8)
    plain = NewExecution(execution_id=engine.new_id(), execution_kind="job")
    other = moves(engine, 1, 8)
    items = [keyed(engine, key, 1), plain, keyed(engine, f"{other}+", 1)]
    outcomes = await engine.backend.executions.create_many(items)
    assert outcomes[0] == Duplicate(first.execution_id)
    assert all(isinstance(each, Created) for each in outcomes[1:])


async def test_an_id_of_the_caller_stays_where_it_is(engine: Engine) -> None:
    await spread(engine, 8)
    new = msgspec.structs.replace(keyed(engine, "k", 1), shards=0)
    assert await create(engine, new) == Created(new.execution_id, PublicState.WAITING)
