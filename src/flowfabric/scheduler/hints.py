"""Which partitions of a lane are believed to hold work, and the visits to them.

Hints come from doorbell rings, sweeps, and what an earlier visit left over. `WorkerClaims` follows
them for the handlers of its own process, `WorkerGrants` for workers that claim through a server.
"""

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from flowfabric.core.ids import fnv1a64
from flowfabric.core.partition import PartitionCounts, solo_partition
from flowfabric.engine.api.backend import Backend

T = TypeVar("T")

WINDOW = 32
"""How many partitions a sweep covers."""

Take = Callable[[str, str, int], Awaitable[tuple[list[T], bool]]]
"""Takes up to N executions of a lane and partition; also tells whether to come back for more."""


def window(start: int, counts: PartitionCounts) -> list[str]:
    """The tags of the partitions from `start` on, each once."""
    return [f"{{fp:{(start + i) % counts.flow}}}" for i in range(min(WINDOW, counts.flow))]


class LaneHints:
    """The partitions of one lane that may hold work.

    Hints may be lost, so a slow sweep visits all partitions in turn. Each lane has its own
    position, seeded by the worker, so that a fleet spreads out.
    """

    def __init__(self, lane_id: str, counts: PartitionCounts, seed: int) -> None:
        self.lane_id = lane_id
        self.home = f"{{fp:{solo_partition(lane_id, counts)}}}"
        self._counts = counts
        self._cursor = seed
        self.hinted: dict[str, None] = {}
        """The tags of the partitions, oldest hint first."""
        self.swept_at = -math.inf
        """When, on the monotonic clock, the last sweep began."""

    def add(self, tag: str) -> None:
        """Hint at a partition where work was seen or announced."""
        self.hinted.setdefault(tag)

    def visited(self, tag: str, *, more: bool) -> None:
        """Drop a visited partition, or move it behind the others if work remains there."""
        self.hinted.pop(tag, None)
        if more:
            self.hinted[tag] = None

    def oldest(self) -> str | None:
        """The partition to visit next, if any."""
        return next(iter(self.hinted), None)

    async def sweep(self, backend: Backend) -> list[str]:
        """Where work waits in the lane's own partition and the next window; not what is hinted."""
        self.swept_at = time.monotonic()
        start, self._cursor = self._cursor, self._cursor + WINDOW
        tags = dict.fromkeys((self.home, *window(start, self._counts)))
        unknown = [tag for tag in tags if tag not in self.hinted]
        return await backend.wakeups.find_work(self.lane_id, unknown) if unknown else []

    async def visit(self, tags: Iterable[str], wanted: int, take: Take[T]) -> list[T]:
        """Go to the partitions in this order until `wanted` executions were taken.

        Claims and grants alike pass here, so budgets and quotas are to be checked here. A call that
        completes also claims, beside this: it must leave out what needs the check.
        """
        taken: list[T] = []
        for tag in tags:
            if len(taken) >= wanted:
                break
            found, more = await take(self.lane_id, tag, wanted - len(taken))
            self.visited(tag, more=more)
            taken += found
        return taken


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

    def in_turn(self) -> list[LaneHints]:
        """Every lane, starting with a different one each time."""
        self._order.append(self._order.pop(0))
        return list(self._order)

    def next(self) -> tuple[LaneHints, str] | None:
        """The next lane with a hint, which then goes to the back, and the partition to visit."""
        for position, lane in enumerate(self._order):
            if (tag := lane.oldest()) is not None:
                self._order.append(self._order.pop(position))
                return lane, tag
        return None
