"""Which partition holds an execution, flow, budget or quota."""

from binascii import crc_hqx
from collections.abc import Container, Iterable
from enum import StrEnum

import msgspec

from flowfabric.core.errors import ConfigError

_MAX_COUNT = 65_535


def crc16(data: bytes) -> int:
    """CRC-16/XMODEM, the checksum behind cluster slots.

    >>> hex(crc16(b"123456789"))
    '0x31c3'
    """
    return crc_hqx(data, 0)


class PartitionCounts(msgspec.Struct, frozen=True):
    """The number of partitions of each family. It never changes in a deployment."""

    flow: int = 256
    budget: int = 32
    quota: int = 32

    def __post_init__(self) -> None:
        for family in ("flow", "budget", "quota"):
            count: object = getattr(self, family)
            if type(count) is not int or not 0 < count <= _MAX_COUNT:
                raise ConfigError(
                    "partition_config",
                    f"must be a whole number from 1 to {_MAX_COUNT}, got {count!r}",
                    f"num_{family}_partitions",
                )


def _uuid_crc(uuid: str) -> int:
    return crc_hqx(bytes.fromhex(uuid.replace("-", "")), 0)


def flow_partition(flow_id: str, counts: PartitionCounts) -> int:
    """The partition of a flow and of all its members."""
    return _uuid_crc(flow_id) % counts.flow


def solo_partition(lane_id: str, counts: PartitionCounts) -> int:
    """The home partition of a lane."""
    return crc_hqx(lane_id.encode(), 0) % counts.flow


def lane_partitions(lane_id: str, shards: int, counts: PartitionCounts) -> list[int]:
    """The partitions over which a lane is spread, its home first.

    >>> lane_partitions("default", 3, PartitionCounts())
    [86, 87, 88]
    """
    home = solo_partition(lane_id, counts)
    return [(home + shard) % counts.flow for shard in range(min(shards, counts.flow))]


def spread_partition(lane_id: str, name: bytes, shards: int, counts: PartitionCounts) -> int:
    """The lane's partition that a name hashes to."""
    return (solo_partition(lane_id, counts) + crc_hqx(name, 0) % shards) % counts.flow


def key_name(namespace: str, idempotency_key: str) -> bytes:
    """The hashed name that places an execution with an idempotency key, the same for repeats."""
    return f"{namespace}\x1f{idempotency_key}".encode(errors="surrogatepass")


def budget_partition(budget_id: str, counts: PartitionCounts) -> int:
    """The partition of a budget."""
    return _uuid_crc(budget_id) % counts.budget


def quota_partition(quota_policy_id: str, counts: PartitionCounts) -> int:
    """The partition of a quota policy."""
    return _uuid_crc(quota_policy_id) % counts.quota


class CollisionGrade(StrEnum):
    """How many lanes share a partition."""

    CLEAN = "clean"
    WATCH = "watch"
    ELEVATED = "elevated"
    REMEDIATE = "remediate"


class LaneCollisions(msgspec.Struct, frozen=True):
    """The pinned lanes that share a partition."""

    lanes: int
    """How many lanes are pinned."""
    affected: int
    shared: dict[int, list[str]]
    grade: CollisionGrade


def lane_collisions(
    lanes: Iterable[str], counts: PartitionCounts, spread: Container[str] = ()
) -> LaneCollisions:
    """Find pinned lanes that share a partition. Spread lanes share theirs by design.

    >>> lane_collisions(["default", "workers-a"], PartitionCounts()).grade
    <CollisionGrade.CLEAN: 'clean'>
    """
    by_partition: dict[int, list[str]] = {}
    names = sorted(lane for lane in set(lanes) if lane not in spread)
    for lane in names:
        by_partition.setdefault(solo_partition(lane, counts), []).append(lane)
    shared = {index: group for index, group in sorted(by_partition.items()) if len(group) > 1}
    affected = sum(map(len, shared.values()))
    return LaneCollisions(len(names), affected, shared, _grade(affected, len(names)))


def _grade(affected: int, total: int) -> CollisionGrade:
    if affected == 0:
        return CollisionGrade.CLEAN
    # Whole numbers, so that exactly 5 % and 15 % fall on the documented side.
    if affected * 100 < total * 5:
        return CollisionGrade.WATCH
    if affected * 100 <= total * 15:
        return CollisionGrade.ELEVATED
    return CollisionGrade.REMEDIATE
