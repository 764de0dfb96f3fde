"""`flowfabric admin`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric.core.partition import PartitionCounts, solo_partition
from tests.support.command import Cli

FEW = PartitionCounts(flow=64)


@pytest.fixture
def offline(tmp_path: Path) -> Cli:
    """No deployment can be reached."""
    return Cli(tmp_path, FF_URL="valkey://127.0.0.1:1", FF_FLOW_PARTITIONS=str(FEW.flow))


def shared(count: int) -> list[str]:
    """So many lanes, of which the first two share a partition."""
    names = [f"lane-{n}" for n in range(1000)]
    first = names[0]
    second = next(n for n in names[1:] if solo_partition(n, FEW) == solo_partition(first, FEW))
    lanes = {solo_partition(name, FEW): name for name in names}
    lanes.pop(solo_partition(first, FEW))
    return [first, second, *list(lanes.values())[: count - 2]]


async def test_lanes_that_share_a_partition(offline: Cli) -> None:
    lanes = shared(10)
    done = await offline("admin", "partition-collisions", FF_LANES=",".join(lanes))
    assert (done.code, done.err) == (0, "")
    assert done.lines[0].split() == ["PARTITION", "LANE", "COLLIDES", "WITH"]
    rows = [line.split() for line in done.lines[1:11]]
    assert rows == sorted(rows, key=lambda row: (int(row[0]), row[1]))
    by_lane = {row[1]: (row[0], row[2]) for row in rows}
    home = str(solo_partition(lanes[0], FEW))
    assert (by_lane[lanes[0]], by_lane[lanes[1]]) == ((home, lanes[1]), (home, lanes[0]))
    assert {by_lane[lane][1] for lane in lanes[2:]} == {"-"}
    assert "2 of 10 lanes (20.0 %) share a partition (64 partitions): Remediate" in done.out
    assert "--placement spread" in done.out


async def test_no_collision(offline: Cli) -> None:
    done = await offline("admin", "partition-collisions")
    assert done.code == 0
    assert done.lines[-1] == "0 of 1 lane (0.0 %) share a partition (64 partitions): Clean"
    (found,) = (await offline("admin", "partition-collisions", "--json")).objects
    assert (found["lanes"], found["colliding"], found["severity"]) == (1, 0, "clean")
    assert [(each["lane"], each["collides_with"]) for each in found["places"]] == [("default", [])]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("partition-collisions",), {"FF_LANES": "a,a"}, "a is listed more than once"),
        (("partition-collisions",), {"FF_LANES": "a" * 65}, "invalid value for FF_LANES"),
        (("partition-collisions",), {"FF_FLOW_PARTITIONS": "0"}, "FF_FLOW_PARTITIONS"),
        (("nothing",), {}, "No such command"),
    ],
)
async def test_mistakes(
    offline: Cli, arguments: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    done = await offline("admin", *arguments, **variables)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
