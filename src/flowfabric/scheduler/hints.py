"""Which partitions of a lane are believed to hold work, and the visits to them.

Hints come from doorbell rings, sweeps, and what an earlier visit left over. `WorkerClaims` follows
them for the handlers of its own process, `WorkerGrants` for workers that claim through a server.
"""

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from flowfabric.core.ids import fnv1a64
from flowfabric.core.partition import PartitionCounts, lane_partitions
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.places import WorkPlace

T = TypeVar("T")

WINDOW = 32
"""How many partitions a sweep covers."""

Take = Callable[[str, str, int], Awaitable[tuple[list[T], bool]]]
"""Takes up to N executions of a lane and partition; also tells whether to come back for more."""


def window(start: int, counts: PartitionCounts, width: int = WINDOW) -> list[str]:
    """The tags of the partitions from `start` on, each once."""
    return [f"{{fp:{(start + i) % counts.flow}}}" for i in range(min(width, counts.flow))]


class LaneHints:
    """The partitions of one lane that may hold work.

    Hints may be lost, so a slow sweep visits all partitions in turn. Each lane has its own
    position, seeded by the worker, so that a fleet spreads out.
    """

    def __init__(self, lane_id: str, counts: PartitionCounts, seed: int) -> None:
        self.lane_id = lane_id
        self._counts = counts
        self._own = self._spread(1)
        self.home = self._own[0]
        self._cursor = seed
        self.hinted: dict[str, None] = {}
        """The tags of the partitions, oldest hint first."""
        self.swept_at = -math.inf
        """When, on the monotonic clock, the last sweep began."""
        self.sticky: dict[str, int] = {}
        """How often completing calls claimed from a partition since the last visit to it."""

    def _spread(self, shards: int) -> list[str]:
        return [f"{{fp:{each}}}" for each in lane_partitions(self.lane_id, shards, self._counts)]

    def own(self, backend: Backend, start: int | None = None, width: int = WINDOW) -> list[str]:
        """The partitions where the lane's executions are created, or the next window of them."""
        shards = backend.places.shards(self.lane_id)
        if shards != len(self._own):
            self._own = self._spread(shards)
        start = self._cursor if start is None else start
        return [self._own[(start + i) % shards] for i in range(min(width, shards))]

    def add(self, tag: str) -> None:
        """Hint at a partition where work was seen or announced."""
        self.hinted.setdefault(tag)

    def take_hints(self) -> list[str]:
        """All hints, which are forgotten."""
        hinted = list(self.hinted)
        self.hinted.clear()
        return hinted

    def places(self) -> Iterator[WorkPlace]:
        """The partitions that are hinted at, oldest hint first."""
        return ((self.lane_id, tag) for tag in self.hinted)

    def visited(self, tag: str, *, more: bool) -> None:
        """Note a visit: `claimed`, after which completing calls may claim there again."""
        self.sticky.pop(tag, None)
        self.claimed(tag, more=more)

    def claimed(self, tag: str, *, more: bool) -> None:
        """Drop the hint at a partition, or move it after the others if work remains there."""
        self.hinted.pop(tag, None)
        if more:
            self.hinted[tag] = None

    def oldest(self) -> str | None:
        """The partition to visit next, if any."""
        return next(iter(self.hinted), None)

    def next_sweep(self, backend: Backend, width: int = WINDOW) -> list[WorkPlace]:
        """The lane's own partitions and the next window, without what is hinted."""
        self.swept_at = time.monotonic()
        own = self.own(backend, width=width)
        tags = dict.fromkeys((*own, *window(self._cursor, self._counts, width)))
        self._cursor += width
        return [(self.lane_id, tag) for tag in tags if tag not in self.hinted]

    async def visit(self, tags: Iterable[str], wanted: int, take: Take[T]) -> list[T]:
        """Visit the partitions in this order until `wanted` executions were taken.

        Claims and grants both pass here, so budgets and quotas must be checked here. A call that
        completes also claims, but not here: it must leave out what needs the check.
        """
        taken: list[T] = []
        for tag in tags:
            if len(taken) >= wanted:
                break
            found, more = await take(self.lane_id, tag, wanted - len(taken))
            self.visited(tag, more=more)
            taken += found
        return taken


async def sweep(
    lanes: Iterable[LaneHints], backend: Backend, width: int = WINDOW
) -> list[WorkPlace]:
    """Where work waits in the lanes' own partitions and their next windows; not what is hinted."""
    found = [lane.next_sweep(backend, width) for lane in lanes]
    # Most often it is in a lane's own partition, which comes first.
    own = [places[0] for places in found if places]
    rest = [place for places in found for place in places[1:]]
    return await backend.wakeups.find_work([*own, *rest], len(own)) if own else []


class LaneRotation:
    """The lanes of one worker, served in turn so that none starves another.

    A lane of weight 3 gets three turns where one of weight 1, the default, gets one.
    """

    def __init__(
        self,
        lanes: Iterable[str],
        counts: PartitionCounts,
        instance: str,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        seed = fnv1a64(instance.encode())
        self._lanes = {lane: LaneHints(lane, counts, seed) for lane in dict.fromkeys(lanes)}
        self._order = list(self._lanes.values())
        """The lane that has waited longest for a turn comes first."""
        self._weights = dict.fromkeys(self._lanes, 1) | dict(weights or {})
        self._credits = dict.fromkeys(self._lanes, 0)

    def __getitem__(self, lane_id: str) -> LaneHints:
        return self._lanes[lane_id]

    def __iter__(self) -> Iterator[LaneHints]:
        return iter(self._order)

    def hint_own(self, backend: Backend) -> None:
        """Hint at the partitions where the executions of the lanes are created."""
        for lane in self._order:
            for tag in lane.own(backend):
                lane.add(tag)

    def some(self, most: int) -> list[LaneHints]:
        """Up to `most` lanes, in turn, so that an idle worker with many lanes stays quiet."""
        return [self.in_turn()[0] for _ in range(min(most, len(self._order)))]

    def in_turn(self) -> list[LaneHints]:
        """Every lane, starting with a different one each time."""
        first = self._take_turn(self._order)
        return [first, *self._order[:-1]]

    def next(self) -> tuple[LaneHints, str] | None:
        """The next lane with a hint, which then goes to the back, and the partition to visit."""
        hinted = [lane for lane in self._order if lane.hinted]
        if not hinted:
            return None
        lane = self._take_turn(hinted)
        return lane, next(iter(lane.hinted))

    def _take_turn(self, waiting: Sequence[LaneHints]) -> LaneHints:
        """The lane in turn, which goes to the back: smooth weighted round robin."""
        if len(waiting) == 1:
            (chosen,) = waiting
        else:
            for lane in waiting:
                self._credits[lane.lane_id] += self._weights[lane.lane_id]
            chosen = max(waiting, key=lambda lane: self._credits[lane.lane_id])
            shared = sum(self._weights[lane.lane_id] for lane in waiting)
            self._credits[chosen.lane_id] -= shared
        self._order.remove(chosen)
        self._order.append(chosen)
        return chosen
