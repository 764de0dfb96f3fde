"""Rings again for waiting work, in case a ring was lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle

_LANES_AT_ONCE = 100
_CLAIMABLE = ("eligible", "reclaimable", "sigs")


class DoorbellScanner:
    """Rings for every lane and partition that holds claimable work."""

    name = "doorbell"

    def indexes(self, territory: Mapping[str, Collection[str]]) -> list[Index]:
        return [
            Index(tag, name, lane)
            for tag, lanes in territory.items()
            for lane in lanes
            for name in _CLAIMABLE
        ]

    async def scan(self, cycle: Cycle) -> None:
        places = [(tag, lane) for tag, lanes in cycle.territory.items() for lane in lanes]
        for start in range(0, len(places), _LANES_AT_ONCE):
            if cycle.out_of_time():
                return
            some: dict[str, list[str]] = {}
            for tag, lane in places[start : start + _LANES_AT_ONCE]:
                some.setdefault(tag, []).append(lane)
            indexes = self.indexes(some)
            with cycle.surviving("could not ring"):
                if await cycle.backend.upkeep.any_exists(indexes):
                    await cycle.backend.wakeups.ring_waiting(some)
                elif cycle.watch is not None:
                    cycle.watch.learn_absent(indexes)
