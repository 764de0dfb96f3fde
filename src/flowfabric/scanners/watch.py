"""Where and when scanners look: the places in use, the server's clock, and what is due."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from flowfabric.core.errors import CorruptionError, TransportError
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import SOUGHT_AT_ONCE, DueScan, Index

log = logging.getLogger(__name__)

Territory = Mapping[str, frozenset[str]]
"""The partitions in use by their tags, each with its lanes."""
IndexesOf = Callable[[Territory], list[Index]]

_MAX_PEEKS = 16
_READ_S = 1.0
"""How long to wait for registries that have been read before."""


class TerritoryMap:
    """Reads the territory periodically; includes at once what this process itself registers."""

    def __init__(self, backend: Backend, refresh_s: float) -> None:
        self._places = backend.places
        self._refresh_s = refresh_s
        self._read_at = -math.inf
        self._current: Territory = {}
        self._gate = asyncio.Lock()
        self._is_damaged = False

    async def current(self, *, fresh: bool = False) -> Territory:
        """The same object as long as nothing changed; `fresh` reads it now."""
        async with self._gate:
            now, joined = asyncio.get_running_loop().time(), dict(self._current)
            if fresh or now - self._read_at >= self._refresh_s:
                joined = dict(await self._read())
                self._read_at = asyncio.get_running_loop().time()
            for tag, lanes in self._places.known_places.copy().items():
                if not lanes <= joined.setdefault(tag, frozenset()):
                    joined[tag] |= lanes
            if joined != self._current:
                self._current = dict(sorted(joined.items()))
            return self._current

    async def _read(self) -> Territory:
        try:
            async with asyncio.timeout(_READ_S if self._current else None):
                read = await self._places.lanes_by_partition()
        except (TimeoutError, TransportError):
            # In a cluster, the registries may be on an unreachable node.
            if not self._current:
                raise
            return self._current
        except CorruptionError as error:
            if not self._is_damaged:
                extra = {"action": "registry_unreadable", "error": str(error)}
                message = "cannot read a registry; scanners use what they read before: %s"
                log.warning(message, error, extra=extra)
            self._is_damaged = True
            return self._current
        self._is_damaged = False
        return read


class ServerClock:
    """Extrapolates the server's time on the loop's clock; lags by at most one round trip."""

    def __init__(self) -> None:
        self._offset_ms = 0.0
        self._seen_at = -math.inf

    def observe(self, server_ms: int) -> None:
        self._seen_at = asyncio.get_running_loop().time()
        self._offset_ms = server_ms - self._seen_at * 1000

    @property
    def age_s(self) -> float:
        """Seconds since the last observation; infinite before the first."""
        return asyncio.get_running_loop().time() - self._seen_at

    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000 + self._offset_ms

    def loop_time(self, server_ms: float) -> float:
        """When, on the loop's clock, the server's time will be `server_ms`."""
        return (server_ms - self._offset_ms) / 1000


class DueWatch:
    """Remembers the last result for each due index, to make the next scan cheap.

    An index that did not exist needs no scan until it does. One command checks all of those, so an
    idle deployment costs one command per tick. An index whose earliest entry lies in the future is
    checked again, because another process may have added an earlier one.
    """

    def __init__(
        self, backend: Backend, indexes: Mapping[str, IndexesOf], clock_trust_s: float
    ) -> None:
        self.clock = ServerClock()
        self._upkeep = backend.upkeep
        self._indexes_of = indexes
        self._clock_trust_s = clock_trust_s
        # The earliest time in each index, None if it did not exist; one that must be scanned
        # is not in it.
        self._earliest: dict[Index, int | None] = {}
        # When, on the loop's clock, all indexes of a scanner were last seen not to exist.
        self._absent_at: dict[str, float] = {}
        self._territory: Territory | None = None
        self._indexes: dict[str, list[Index]] = {}

    def watches(self, scanner: str) -> bool:
        return scanner in self._indexes_of

    def next_due(self, scanner: str) -> float | None:
        """When, on the loop's clock, the scanner's earliest known entry is due."""
        found = [self._earliest.get(index) for index in self._indexes.get(scanner, ())]
        times = [time for time in found if time is not None]
        return self.clock.loop_time(min(times)) if times else None

    def learn(self, scanned: Iterable[Index], scan: DueScan) -> None:
        self.clock.observe(scan.now_ms)
        again = scan.due.keys() | scan.unreadable.keys()
        for index in scanned:
            if index in again:
                self._earliest.pop(index, None)
            else:
                self._earliest[index] = scan.armed.get(index)

    def learn_absent(self, indexes: Iterable[Index]) -> None:
        self._earliest.update(dict.fromkeys(indexes))

    async def idle_since(
        self, scanner: str, territory: Territory, after: float | None = None
    ) -> float | None:
        """When, on the loop's clock, the scanner was seen to have nothing to do.

        That may be a look for another scanner later than `after`; None if only a scan can tell.
        """
        self._enter(territory)
        own = self._indexes[scanner]
        if any(index not in self._earliest for index in own):
            return None
        armed = [index for index in own if self._earliest[index] is not None]
        seen = self._absent_at.get(scanner)
        if not armed and seen is not None and after is not None and seen > after:
            return seen
        if armed and (len(armed) > _MAX_PEEKS or self.clock.age_s > self._clock_trust_s):
            return None
        absent = [index for index in own if self._earliest[index] is None]
        if absent:
            absent += self._absent_of_others(scanner, SOUGHT_AT_ONCE - len(absent))
        asked_at = asyncio.get_running_loop().time()
        try:
            appeared, times = await asyncio.gather(
                self._upkeep.any_exists(absent), asyncio.gather(*map(self._upkeep.earliest, armed))
            )
        except TransportError:
            # Some indexes may be on an unreachable node; a scan reads those on other nodes.
            return None
        if appeared:
            # The answer does not say which one, so every scanner checks its own.
            for index in absent:
                self._earliest.pop(index, None)
            return None
        self._earliest.update(zip(armed, times, strict=True))
        confirmed = set(absent)
        for name, indexes in self._indexes.items():
            if indexes and confirmed.issuperset(indexes):
                self._absent_at[name] = asked_at
        now = self.clock.now_ms()
        return asked_at if all(time is None or time > now for time in times) else None

    def _absent_of_others(self, scanner: str, room: int) -> list[Index]:
        """Absent indexes of other scanners to check in the same command.

        Those checked longest ago come first, because with many lanes not all fit.
        """
        found: list[Index] = []
        for name in sorted(self._indexes, key=lambda name: self._absent_at.get(name, -math.inf)):
            indexes = self._indexes[name]
            fits = name != scanner and len(found) + len(indexes) <= room
            if fits and all(self._earliest.get(index, 0) is None for index in indexes):
                found += indexes
        return found

    def _enter(self, territory: Territory) -> None:
        if territory is self._territory:
            return
        self._territory = territory
        self._indexes = {name: of(territory) for name, of in self._indexes_of.items()}
        known = {index for own in self._indexes.values() for index in own}
        self._earliest = {i: time for i, time in self._earliest.items() if i in known}
