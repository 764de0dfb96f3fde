"""Which partitions of a lane are believed to hold work, and where to look besides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from flowfabric.core.ids import fnv1a64
from flowfabric.core.partition import PartitionCounts, solo_partition

_WINDOW = 32


class LaneHints:
    """One lane's believed-non-empty partitions, oldest belief first, and a slow sweep of the rest.

    Hints may be lost, so the sweep visits every partition in turn; each lane keeps its own
    position, seeded by the worker, so that a fleet spreads out.
    """

    def __init__(self, lane_id: str, counts: PartitionCounts, seed: int) -> None:
        self.lane_id = lane_id
        self.home = f"{{fp:{solo_partition(lane_id, counts)}}}"
        self._count = counts.flow
        self._cursor = seed % counts.flow
        self._hinted: dict[str, None] = {}
        self.swept_at: float | None = None
        """When, on the monotonic clock, the last sweep began; None before the first."""

    def add(self, tag: str) -> None:
        """Work was seen or announced there."""
        self._hinted.setdefault(tag)

    def drop(self, tag: str) -> None:
        """Nothing was left there."""
        self._hinted.pop(tag, None)

    def oldest(self) -> str | None:
        """The partition to visit next, if any is believed to hold work."""
        return next(iter(self._hinted), None)

    def rotate(self, tag: str) -> None:
        """Visited, but work remains: the others go first."""
        if tag in self._hinted:
            del self._hinted[tag]
            self._hinted[tag] = None

    def __contains__(self, tag: str) -> bool:
        return tag in self._hinted

    def __len__(self) -> int:
        return len(self._hinted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._hinted)

    def sweep(self) -> list[str]:
        """The lane's own partition, then the next window of all others."""
        self.swept_at = time.monotonic()
        size = min(_WINDOW, self._count)
        window = [f"{{fp:{(self._cursor + i) % self._count}}}" for i in range(size)]
        self._cursor = (self._cursor + size) % self._count
        return [self.home, *(tag for tag in window if tag != self.home)]


class Lanes:
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
        """Every lane, beginning with another one each time."""
        self._order.append(self._order.pop(0))
        return list(self._order)

    def next(self) -> LaneHints | None:
        """The next lane that is believed to hold work; it then goes to the back."""
        for position, lane in enumerate(self._order):
            if len(lane):
                self._order.append(self._order.pop(position))
                return lane
        return None
