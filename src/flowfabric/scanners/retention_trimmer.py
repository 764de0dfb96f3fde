"""Deletes finished executions, old events and empty lanes."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle
from flowfabric.scanners.due import DueScanner


class RetentionTrimmer(DueScanner):
    """Deletes executions at the end of their retention, and the entries of every feed by age."""

    name = "retention_trimmer"
    index = "terminal"
    per_lane = True
    page = 20

    def __init__(self, events_retention_ms: int) -> None:
        super().__init__()
        self._events_retention_ms = events_retention_ms

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.trim_retention(index.tag, index.lane, ids)

    async def scan(self, cycle: Cycle) -> None:
        await super().scan(cycle)
        upkeep = cycle.backend.upkeep
        oldest = max(0, await cycle.backend.meta.server_time_ms() - self._events_retention_ms)
        for tag in cycle.territory:
            if cycle.out_of_time():
                return
            with cycle.surviving("could not trim the feed", partition=tag):
                await upkeep.trim_events(tag, oldest)
            with cycle.surviving("could not purge", partition=tag):
                while await upkeep.purge(tag) and not cycle.out_of_time():
                    cycle.progress()
        with cycle.surviving("could not read the namespaces"):
            for namespace in await cycle.backend.places.namespaces_in_use():
                with cycle.surviving("could not trim the worker feed", namespace=namespace):
                    await upkeep.trim_worker_events(namespace, oldest)
        with cycle.surviving("could not trim the lane registry"):
            await upkeep.forget_idle_lanes()
