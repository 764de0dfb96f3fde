"""The lanes and partitions that scanners walk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import msgspec

from flowfabric.core.errors import CorruptionError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.places import ANYWHERE

log = logging.getLogger(__name__)

T = TypeVar("T")


class Territory(msgspec.Struct, frozen=True):
    """The partitions in use by their hash tags, each with the lanes in use there."""

    lanes: Mapping[str, frozenset[str]] = {}

    @property
    def tags(self) -> tuple[str, ...]:
        """The partitions, in order."""
        return tuple(self.lanes)


async def read_territory(backend: ValkeyBackend) -> Territory:
    """The places as registered now."""
    return await TerritoryMap(backend, 0).current()


class TerritoryMap:
    """The territory, read rarely; what this process registered itself is there at once."""

    def __init__(self, backend: ValkeyBackend, refresh_s: float) -> None:
        self._backend = backend
        self._refresh_s = refresh_s
        self._read_at: float | None = None
        self._places: Mapping[str, Mapping[str, str]] = {}
        self._partitions: Sequence[str] = ()
        self._current = Territory()
        self._gate = asyncio.Lock()
        # Registries that could not be read the last time.
        self._damaged: set[str] = set()

    async def current(self, *, fresh: bool = False) -> Territory:
        """The same object as long as nothing changed; `fresh` reads it now."""
        async with self._gate:
            now = asyncio.get_running_loop().time()
            if fresh or self._read_at is None or now - self._read_at >= self._refresh_s:
                await self._read()
                self._read_at = now
                self._take({tag: frozenset(lanes) for tag, lanes in self._places.items()})
        known = self._backend.places.known_places.copy()
        current = self._current.lanes
        if any(tag not in current or not lanes <= current[tag] for tag, lanes in known.items()):
            self._take(dict(current))
        return self._current

    def _take(self, lanes: dict[str, frozenset[str]]) -> None:
        """Join the registered places with what this process knows itself."""
        lanes.pop(ANYWHERE, None)
        for tag in self._partitions:
            lanes.setdefault(tag, frozenset())
        for tag, own in self._backend.places.known_places.copy().items():
            lanes[tag] = lanes.get(tag, frozenset()) | own
        if lanes != self._current.lanes:
            self._current = Territory(dict(sorted(lanes.items())))

    async def _read(self) -> None:
        backend = self._backend
        self._places, self._partitions = await asyncio.gather(
            self._or(self._places, keys.PLACES, backend.places.places_in_use()),
            self._or(self._partitions, keys.PARTITIONS, backend.places.used_partitions()),
        )

    async def _or(self, before: T, registry: str, read: Awaitable[T]) -> T:
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
