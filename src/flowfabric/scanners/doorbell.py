"""Rings again for work that waits, in case a ring was lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowfabric.core.errors import CorruptionError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import ScanResult, Scope
from flowfabric.scanners.due import lane_indexes
from flowfabric.scanners.watch import by_partition, grouped

_LANES_PER_CALL = 100
_CLAIMABLE = ("eligible", "reclaimable", "sigs")


class Doorbell:
    """The fast pass over claimable work: one EXISTS when there is none."""

    name = "doorbell"

    def indexes(self, lanes: Iterable[str]) -> list[str]:
        """Where claimable work stands; while nothing does, the watch asks for us."""
        return [index for name in _CLAIMABLE for index in lane_indexes(lanes, name)]

    async def scan(self, backend: ValkeyBackend, scope: Scope) -> ScanResult:
        """Ring every lane and partition that holds claimable work."""
        places = [(tag, lane) for tag, lanes in scope.territory.lanes.items() for lane in lanes]
        damage: CorruptionError | None = None
        for group in grouped(places, _LANES_PER_CALL, apart=backend.transport.is_cluster):
            if scope.spent():
                return ScanResult(more=True)
            try:
                await self._ring(backend, scope, by_partition(group))
            except CorruptionError as error:
                # All others were rung, and those of the next groups are to be.
                damage = error
            scope.progress()
        if damage is not None:
            raise damage
        # Ringing is no repair: it says nothing about whether the first ring was lost.
        return ScanResult()

    async def _ring(
        self, backend: ValkeyBackend, scope: Scope, lanes: dict[str, list[str]]
    ) -> None:
        indexes = [(tag, index) for tag in lanes for index in self.indexes(lanes[tag])]
        names = [keys.index(*key) for key in indexes]
        found: Any = await backend.transport.call("EXISTS", *names, key=names[0])
        if found:
            await backend.wakeups.ring_waiting(lanes)
        elif scope.watch is not None:
            scope.watch.absent(indexes)
