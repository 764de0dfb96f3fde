"""Which partitions of a lane are believed to hold work, and where to look besides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from flowfabric.core.ids import fnv1a64
from flowfabric.core.partition import PartitionCounts, solo_partition

WINDOW = 32
"""How many partitions a sweep covers."""


def window(start: int, counts: PartitionCounts) -> list[str]:
    """The tags of the partitions from `start` on, each once."""
    return [f"{{fp:{(start + i) % counts.flow}}}" for i in range(min(WINDOW, counts.flow))]


class LaneHints:
    """The partitions of one lane that may hold work, oldest hint first.

    Hints may be lost, so a slow sweep visits all partitions in turn. Each lane has its own
    position, seeded by the worker, so that a fleet spreads out.
    """

    def __init__(self, lane_id: str, counts: PartitionCounts, seed: int) -> None:
        self.lane_id = lane_id
        self.home = f"{{fp:{solo_partition(lane_id, counts)}}}"
        self._counts = counts
        self._cursor = seed
        self._hinted: dict[str, None] = {}
        self.swept_at: float | None = None
        """When, on the monotonic clock, the last sweep began; None before the first."""

    def add(self, tag: str) -> None:
        """Hint at a partition where work was seen or announced."""
        self._hinted.setdefault(tag)

    def visited(self, tag: str, *, more: bool) -> None:
        """Drop a visited partition, or move it behind the others if work remains there."""
        self._hinted.pop(tag, None)
        if more:
            self._hinted[tag] = None

    def oldest(self) -> str | None:
        """The partition to visit next, if any."""
        return next(iter(self._hinted), None)

    def __contains__(self, tag: str) -> bool:
        return tag in self._hinted

    def __len__(self) -> int:
        return len(self._hinted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hinted)

    def sweep(self) -> list[str]:
        """The lane's own partition, then the next window of the others."""
        self.swept_at = time.monotonic()
        start, self._cursor = self._cursor, self._cursor + WINDOW
        return [self.home, *(tag for tag in window(start, self._counts) if tag != self.home)]


class LaneRotation:
    """The lanes of one worker, served in turn so that none starves another."""

    def __init__(self, lanes: Iterable[str], counts: PartitionCounts, instance: str) -> None:
        seed = fnv1a64(instance.encode())
        self._lanes = {lane: LaneHints(lane, counts, seed) for lane in dict.fromkeys(lanes)}
        self._order = list(self._lanes.values())

    def __getitem__(self, lane_id: str) -> LaneHints:
        return self._lanes[lane_id]

    def __iter__(self) -> Iterator[LaneHints]:
        return iter(self._order)

    def hinted(self) -> bool:
        """Whether any lane is believed to hold work."""
        return any(len(lane) for lane in self._order)

    def in_turn(self) -> list[LaneHints]:
        """Every lane, starting with a different one each time."""
        self._order.append(self._order.pop(0))
        return list(self._order)

    def next(self) -> LaneHints | None:
        """The next lane that is believed to hold work; it then goes to the back."""
        for position, lane in enumerate(self._order):
            if len(lane):
                self._order.append(self._order.pop(position))
                return lane
        return None
