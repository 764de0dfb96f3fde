"""The lanes and partitions that scanners walk."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric.engine.backend import Backend

__all__ = ["Territory", "TerritoryMap", "read_territory"]


class Territory(msgspec.Struct, frozen=True):
    """Hash tags of the partitions in use, and every registered lane."""

    tags: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()


async def _all_lanes(backend: Backend) -> list[str]:
    lanes, cursor = await backend.list_lanes()
    while cursor is not None:
        page, cursor = await backend.list_lanes(cursor)
        lanes += page
    return lanes


async def read_territory(backend: Backend) -> Territory:
    """The lanes and partitions as registered now."""
    lanes, tags = await asyncio.gather(_all_lanes(backend), backend.used_partitions())
    return Territory(tuple(tags), tuple(lanes))


class TerritoryMap:
    """The territory, read rarely; what this process registered itself is there at once."""

    def __init__(self, backend: Backend, refresh_s: float) -> None:
        self._backend = backend
        self._refresh_s = refresh_s
        self._read_at: float | None = None
        self._stored = Territory()
        self._current = Territory()
        self._gate = asyncio.Lock()

    async def current(self, *, fresh: bool = False) -> Territory:
        """The same object as long as nothing changed; `fresh` reads it now."""
        async with self._gate:
            now = asyncio.get_running_loop().time()
            if fresh or self._read_at is None or now - self._read_at >= self._refresh_s:
                self._stored = await read_territory(self._backend)
                self._read_at = now
        tags = {*self._stored.tags, *self._backend.known_partitions}
        lanes = {*self._stored.lanes, *self._backend.known_lanes}
        if tags != set(self._current.tags) or lanes != set(self._current.lanes):
            self._current = Territory(tuple(sorted(tags)), tuple(sorted(lanes)))
        return self._current
