"""Partition math and the lane-collision report."""

from __future__ import annotations

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.core.partition import (
    PartitionCounts,
    budget_partition,
    crc16,
    flow_partition,
    lane_collisions,
    quota_partition,
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


MANY = PartitionCounts(flow=1000)


def spread(lanes: int, sharing: int) -> list[str]:
    """Lanes of which `sharing` (2 or more) have one home, and the others one each."""
    home = solo_partition("lane-0", MANY)
    names = [f"lane-{n}" for n in range(100_000)]
    alone = {solo_partition(name, MANY): name for name in names}
    del alone[home]
    together = [name for name in names if solo_partition(name, MANY) == home]
    return together[:sharing] + list(alone.values())[: lanes - sharing]


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
    report = lane_collisions(spread(lanes, sharing), MANY)
    assert (report.lanes, report.affected, report.grade) == (lanes, sharing, grade)
    assert list(report.shared) == ([solo_partition("lane-0", MANY)] if sharing else [])


def test_collisions_of_few_lanes() -> None:
    report = lane_collisions(["b", "a", "a"], PartitionCounts(flow=1))
    assert report.shared == {0: ["a", "b"]}
    assert lane_collisions(["default", "workers-a"], COUNTS).grade == "clean"
    spread = lane_collisions(["a", "b", "c"], PartitionCounts(flow=1), {"b", "x"})
    assert (spread.lanes, spread.affected, spread.shared) == (2, 2, {0: ["a", "c"]})
    assert lane_collisions(["a", "b"], PartitionCounts(flow=1), {"b"}).grade == "clean"
    empty = lane_collisions([], COUNTS)
    assert (empty.lanes, empty.grade) == (0, "clean")
