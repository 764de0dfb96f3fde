"""Lanes take turns, and a weight gives a lane more of them (04 S11)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from flowfabric.core.errors import ConfigError, CorruptionError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey import keys
from flowfabric.scheduler.hints import LaneRotation
from flowfabric.sdk.config import WorkerConfig
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.sdk import submit

LANES = ("a", "b", "c")


def turns(count: int, weights: dict[str, int]) -> list[str]:
    rotation = LaneRotation(LANES, PartitionCounts(), "w-1", weights)
    return [rotation.in_turn()[0].lane_id for _ in range(count)]


def test_without_weights_each_lane_gets_every_third_turn() -> None:
    assert turns(6, {}) == [*LANES, *LANES]


def test_weights_share_the_turns_evenly_over_time() -> None:
    found = turns(10, {"a": 3})
    assert Counter(found) == {"a": 6, "b": 2, "c": 2}
    assert found[:5] == found[5:] == ["a", "b", "a", "c", "a"]


async def test_a_new_placement_moves_a_lanes_own_partitions(engine: Engine) -> None:
    """Without a restart: sweeps look there first."""
    (lane,) = LaneRotation(["a"], engine.backend.counts, "w-1")
    assert len(lane.own(engine.backend)) == 1
    for shards in (8, 16):
        await engine.backend.lanes.set_lane_config("a", placement="spread", shards=shards)
        own = lane.own(engine.backend)
        assert len(set(own)) == shards
        assert engine.new_id("a").tag in own
    await engine.backend.lanes.set_lane_config("a", placement="pinned")
    assert lane.own(engine.backend) == [engine.new_id("a").tag]


def test_every_lane_follows_the_one_in_turn() -> None:
    rotation = LaneRotation(LANES, PartitionCounts(), "w-1", {"b": 5})
    for _ in range(7):
        assert {lane.lane_id for lane in rotation.in_turn()} == set(LANES)


def test_only_lanes_with_hints_get_turns() -> None:
    rotation = LaneRotation(LANES, PartitionCounts(), "w-1", {"a": 9})
    assert rotation.next() is None
    for lane in ("b", "c"):
        rotation[lane].add("{fp:1}")
    found = [rotation.next() for _ in range(4)]
    assert [turn and turn[0].lane_id for turn in found] == ["b", "c", "b", "c"]


async def test_a_worker_claims_by_weight(engine: Engine, make_worker: MakeWorker) -> None:
    for lane in ("calm", "urgent"):
        await submit(engine.backend, 8, lane=lane)
    worker = await make_worker(lanes=["calm", "urgent"], lane_weights={"urgent": 3})
    found: list[str] = []
    for _ in range(8):
        task = await worker.claim()
        assert task is not None
        found.append(task.handle.lane_id)
        await task.complete()
    assert Counter(found) == {"urgent": 6, "calm": 2}


@pytest.mark.corrupts
async def test_a_fault_in_one_lane_loses_nothing_of_another(
    engine: Engine, make_worker: MakeWorker
) -> None:
    await submit(engine.backend, 2, lane="good")
    broken = engine.new_id("broken").tag
    await engine.backend.transport.call("SET", keys.lane(broken, "broken", "sigs"), "x")
    worker = await make_worker(lanes=["good", "broken"], max_concurrent_tasks=5)
    tasks = await worker.claim_many()
    assert [task.handle.lane_id for task in tasks] == ["good", "good"]
    for task in tasks:
        await task.complete()
    with pytest.raises(CorruptionError):
        await worker.claim_many()


@pytest.mark.parametrize("weights", [{"other": 1}, {"a": 0}, {"a": True}, {"a": 1001}])
def test_weights_are_checked(weights: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lane_weights"):
        WorkerConfig(lanes=["a"], lane_weights=weights)
