"""Partition math and the lane-collision report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.errors import ConfigError, ValidationError
from flowfabric.core.partition import (
    PartitionCounts,
    budget_partition,
    crc16,
    flow_partition,
    lane_collisions,
    lane_partitions,
    quota_partition,
    shard_of_key,
    solo_partition,
)

COUNTS = PartitionCounts()


def test_crc_vectors() -> None:
    assert crc16(b"123456789") == 0x31C3
    assert crc16(b"default") == 54_870
    assert crc16(b"workers-a") == 11_969


@pytest.mark.parametrize(
    ("uuid", "of_256", "of_32"),
    [
        ("550e8400-e29b-41d4-a716-446655440000", 24, 24),
        ("11111111-2222-4333-8444-555555555555", 101, 5),
    ],
)
def test_uuid_vectors(uuid: str, of_256: int, of_32: int) -> None:
    assert flow_partition(uuid, COUNTS) == of_256
    assert budget_partition(uuid, COUNTS) == of_32
    assert quota_partition(uuid, COUNTS) == of_32


def test_each_family_uses_its_own_count() -> None:
    counts = PartitionCounts(flow=1, budget=7, quota=1000)
    uuid = "550e8400-e29b-41d4-a716-446655440000"
    assert flow_partition(uuid, counts) == 0
    assert budget_partition(uuid, counts) == 36_888 % 7
    assert quota_partition(uuid, counts) == 888
    assert solo_partition("default", counts) == 0


def test_lane_vectors() -> None:
    assert solo_partition("default", COUNTS) == 86
    assert solo_partition("workers-a", COUNTS) == 193


@pytest.mark.parametrize("family", ["flow", "budget", "quota"])
@pytest.mark.parametrize("count", [0, -1, 65_536, True, 2.0, None])
def test_bad_counts_are_a_configuration_error(family: str, count: object) -> None:
    with pytest.raises(ConfigError) as error:
        PartitionCounts(**{family: count})  # pyright: ignore[reportArgumentType]
    assert str(error.value).startswith(f"config: partition_config.num_{family}_partitions: ")


def test_the_largest_count_is_allowed() -> None:
    assert PartitionCounts(65_535, 65_535, 1).flow == 65_535


@given(lane=st.text(min_size=1, max_size=64), flow=st.integers(1, 65_535))
def test_a_pinned_lane_is_a_spread_lane_with_one_shard(lane: str, flow: int) -> None:
    counts = PartitionCounts(flow=flow)
    assert lane_partitions(lane, counts) == [solo_partition(lane, counts)]


@given(st.data())
def test_shards_are_distinct_and_in_range(data: st.DataObject) -> None:
    counts = PartitionCounts(flow=data.draw(st.integers(1, 300)))
    shards = data.draw(st.integers(1, counts.flow))
    partitions = lane_partitions("bulk", counts, shards)
    assert len(set(partitions)) == shards
    assert all(0 <= index < counts.flow for index in partitions)
    assert partitions[0] == solo_partition("bulk", counts)


@pytest.mark.parametrize("shards", [0, 257])
def test_shards_out_of_range(shards: int) -> None:
    with pytest.raises(ValidationError, match="shards: must be from 1 to 256"):
        lane_partitions("bulk", COUNTS, shards)


def test_the_key_shard_separates_namespace_from_key() -> None:
    # With a plain join, ("a", "bc") and ("ab", "c") would always share a shard.
    assert shard_of_key("a", "bc", 65_535) != shard_of_key("ab", "c", 65_535)


def spread(lanes: int, sharing: int) -> list[str]:
    """Lanes of which `sharing` (2 or more) fall on one partition, under `by_name`."""
    return [f"0-{n}" for n in range(sharing)] + [f"{n + 1}-" for n in range(lanes - sharing)]


def by_name(lane_id: str, counts: PartitionCounts, /) -> int:
    return int(lane_id.split("-", maxsplit=1)[0]) % counts.flow


@pytest.mark.parametrize(
    ("lanes", "sharing", "grade"),
    [
        (1, 0, "clean"),
        (100, 0, "clean"),
        (100, 2, "watch"),
        (100, 4, "watch"),
        (100, 5, "elevated"),
        (100, 15, "elevated"),
        (100, 16, "remediate"),
        (2, 2, "remediate"),
    ],
)
def test_collision_grades(lanes: int, sharing: int, grade: str) -> None:
    report = lane_collisions(spread(lanes, sharing), PartitionCounts(flow=1000), by_name)
    assert (report.lanes, report.affected, report.grade) == (lanes, sharing, grade)
    assert report.share == sharing / lanes
    assert list(report.shared) == ([0] if sharing else [])


def test_collisions_with_the_default_partitioner() -> None:
    report = lane_collisions(["b", "a", "a"], PartitionCounts(flow=1))
    assert report.shared == {0: ["a", "b"]}
    assert lane_collisions(["default", "workers-a"], COUNTS).grade == "clean"
    empty = lane_collisions([], COUNTS)
    assert (empty.lanes, empty.share, empty.grade) == (0, 0.0, "clean")
