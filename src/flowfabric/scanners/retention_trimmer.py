"""Finished executions and old events are deleted when their retention is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import ScanResult, Scope, Tally
from flowfabric.scanners.due import DueScanner, lane_indexes
from flowfabric.scanners.idle_lanes import forget_idle_lanes


class RetentionTrimmer(DueScanner):
    """Trims lanes' terminal indexes in order of due time, finishes large purges, ages the feeds."""

    name = "retention_trimmer"
    page = 20
    settled = frozenset({"purged", "purging", "not_terminal", "orphan_removed"})
    left = frozenset({"not_due"})

    def __init__(self, events_retention_ms: int) -> None:
        super().__init__()
        self._events_retention_ms = events_retention_ms

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:
        """One index per lane, ordered by the end of retention."""
        return lane_indexes(lanes, "terminal")

    async def act(
        self, backend: ValkeyBackend, tag: str, lane: str, ids: Sequence[str]
    ) -> list[str]:
        """Delete what is due, each execution with all its keys."""
        return await backend.upkeep.trim_retention(tag, lane, ids)

    async def scan(self, backend: ValkeyBackend, scope: Scope) -> ScanResult:
        """Trim executions, then what large ones left behind, event feeds and empty lanes."""
        trimmed = await super().scan(backend, scope)
        tally = Tally()
        tally.processed, tally.errors, tally.more = trimmed.processed, trimmed.errors, trimmed.more
        oldest = max(0, await backend.meta.server_time_ms() - self._events_retention_ms)
        for tag in scope.territory.tags:
            if scope.spent():
                tally.more = True
                break
            await self._finish(backend, scope, tag, oldest, tally)
        try:
            for namespace in await backend.places.namespaces_in_use():
                await backend.upkeep.trim_events(keys.worker_events(f"{{{namespace}}}"), oldest)
            await forget_idle_lanes(backend, scope)
        except EngineError as error:
            tally.errors += 1
            scope.trouble("registries not trimmed", error)
        return tally.result()

    async def _finish(
        self, backend: ValkeyBackend, scope: Scope, tag: str, oldest: int, tally: Tally
    ) -> None:
        backlog = keys.index(tag, "purge_backlog")
        try:
            owed: Any
            owed, _ = await asyncio.gather(
                backend.transport.call("EXISTS", backlog, key=backlog),
                backend.upkeep.trim_events(keys.events(tag), oldest),
            )
            while owed:
                owed = await backend.upkeep.purge(tag)
                scope.progress()
                if scope.spent():
                    tally.more = tally.more or owed > 0
                    return
        except EngineError as error:
            tally.errors += 1
            scope.trouble("feed or purge failed", error, partition=tag)
