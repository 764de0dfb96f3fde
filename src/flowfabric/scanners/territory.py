"""The partitions and lanes that scanners visit."""

import asyncio
import logging
from collections.abc import Mapping

from flowfabric.core.errors import CorruptionError
from flowfabric.engine.api.backend import Backend

log = logging.getLogger(__name__)

Territory = Mapping[str, frozenset[str]]
"""The partitions in use by their tags, each with its lanes."""


class TerritoryMap:
    """Reads the territory now and then; what this process registers itself is in it at once."""

    def __init__(self, backend: Backend, refresh_s: float) -> None:
        self._places = backend.places
        self._refresh_s = refresh_s
        self._read_at: float | None = None
        self._current: Territory = {}
        self._gate = asyncio.Lock()
        self._is_damaged = False

    async def current(self, *, fresh: bool = False) -> Territory:
        """The same object as long as nothing changed; `fresh` reads it now."""
        async with self._gate:
            now = asyncio.get_running_loop().time()
            if fresh or self._read_at is None or now - self._read_at >= self._refresh_s:
                self._join(await self._read())
                self._read_at = now
        known = self._places.known_places.copy()
        current = self._current
        if any(tag not in current or not lanes <= current[tag] for tag, lanes in known.items()):
            self._join(current)
        return self._current

    def _join(self, territory: Territory) -> None:
        """Take over a territory together with what this process uses itself."""
        joined = dict(territory)
        for tag, lanes in self._places.known_places.copy().items():
            joined[tag] = joined.get(tag, frozenset()) | lanes
        if joined != self._current:
            self._current = dict(sorted(joined.items()))

    async def _read(self) -> Territory:
        try:
            read = await self._places.lanes_by_partition()
        except CorruptionError as error:
            if not self._is_damaged:
                extra = {"action": "registry_unreadable", "error": str(error)}
                message = "a registry cannot be read, scanners use what they read before: %s"
                log.warning(message, error, extra=extra)
            self._is_damaged = True
            return self._current
        self._is_damaged = False
        return read
