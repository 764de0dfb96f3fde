"""The lanes and partitions that scanners walk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

import msgspec

from flowfabric.core import keys
from flowfabric.core.errors import CorruptionError
from flowfabric.engine.backend import Backend

__all__ = ["Territory", "TerritoryMap", "read_territory"]

log = logging.getLogger(__name__)


class Territory(msgspec.Struct, frozen=True):
    """Hash tags of the partitions in use, and every registered lane."""

    tags: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()


async def read_territory(backend: Backend) -> Territory:
    """The lanes and partitions as registered now."""
    lanes, tags = await asyncio.gather(backend.lanes_in_use(), backend.used_partitions())
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
        # Registries that could not be read the last time.
        self._damaged: set[str] = set()

    async def current(self, *, fresh: bool = False) -> Territory:
        """The same object as long as nothing changed; `fresh` reads it now."""
        async with self._gate:
            now = asyncio.get_running_loop().time()
            if fresh or self._read_at is None or now - self._read_at >= self._refresh_s:
                self._stored = await self._read()
                self._read_at = now
        tags = {*self._stored.tags, *self._backend.known_partitions}
        lanes = {*self._stored.lanes, *self._backend.known_lanes}
        if tags != set(self._current.tags) or lanes != set(self._current.lanes):
            self._current = Territory(tuple(sorted(tags)), tuple(sorted(lanes)))
        return self._current

    async def _read(self) -> Territory:
        backend, before = self._backend, self._stored
        lanes, tags = await asyncio.gather(
            self._or(before.lanes, keys.LANES, backend.lanes_in_use()),
            self._or(before.tags, keys.PARTITIONS, backend.used_partitions()),
        )
        return Territory(tuple(tags), tuple(lanes))

    async def _or(
        self, before: Sequence[str], registry: str, read: Awaitable[Sequence[str]]
    ) -> Sequence[str]:
        """What a registry holds; what it held before when the key is none."""
        try:
            found = await read
        except CorruptionError as error:
            if registry not in self._damaged:
                self._damaged.add(registry)
                log.warning(
                    "%s cannot be read, scanners go on with what they know: %s",
                    registry,
                    error,
                    extra={"action": "registry_unreadable", "registry": registry},
                )
            return before
        self._damaged.discard(registry)
        return found
