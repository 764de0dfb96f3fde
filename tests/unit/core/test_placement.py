"""Which partitions a lane's executions are created on (04 S5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts, lane_partitions, solo_partition

LANES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=64)
COUNTS = st.integers(1, 400).map(lambda flow: PartitionCounts(flow=flow))


@given(LANES, COUNTS, st.data())
def test_every_id_falls_on_a_shard_of_its_lane(
    lane: str, counts: PartitionCounts, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, counts.flow))
    key = data.draw(st.none() | st.tuples(st.just("default"), st.text(max_size=20)))
    own = lane_partitions(lane, shards, counts)
    assert len(set(own)) == len(own) == shards
    assert own[0] == solo_partition(lane, counts)
    minted = [ExecutionId.solo(lane, counts, shards, key).partition for _ in range(3)]
    assert set(minted) <= set(own)
    if key is not None:
        assert len(set(minted)) == 1


def test_test_vectors() -> None:
    counts = PartitionCounts()
    assert lane_partitions("default", 3, counts) == [86, 87, 88]
    assert lane_partitions("workers-a", 100, counts)[62:64] == [255, 0]
    assert ExecutionId.solo("default", counts, 64, ("default", "order-1")).partition == 126
