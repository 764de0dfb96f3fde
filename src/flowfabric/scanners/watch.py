"""Deciding with one cheap command that nothing is due, for all due-index scanners at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.upkeep import DueScan
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.clock import ServerClock
from flowfabric.scanners.territory import Territory

Key = tuple[str, str]
"""A partition's tag and the name of an index there."""
Indexes = Callable[[Iterable[str]], Iterable[str]]
"""The index names a scanner reads, given the lanes."""

_LAST_TIME = 2**53 - 1
_MAX_PEEKS = 16
_EXISTS_KEYS = 1000
_UNDER_WAY = 16


class DueWatch:
    """What the last looks at the due indexes found, and the cheapest next look.

    An index that did not exist needs no scan until it exists: one EXISTS covers all of those,
    whoever asks, so an idle deployment costs one command per tick. An index whose earliest entry
    lies ahead is asked for its head, because another process may have added an earlier one.
    """

    def __init__(
        self, backend: ValkeyBackend, indexes: Mapping[str, Indexes], trust_s: float
    ) -> None:
        self.clock = ServerClock()
        self._backend = backend
        self._indexes = indexes
        self._trust_s = trust_s
        # Earliest time per index, None where it does not exist; not here: must be scanned.
        self._heads: dict[Key, int | None] = {}
        self._covered: dict[str, float] = {}
        self._territory: Territory | None = None
        self._keys: dict[str, list[Key]] = {}

    def watches(self, scanner: str) -> bool:
        """Whether a scanner's indexes are among those looked at."""
        return scanner in self._indexes

    def covered_at(self, scanner: str) -> float | None:
        """When, on the loop's clock, a look last showed that the scanner has nothing to do."""
        return self._covered.get(scanner)

    def next_due(self, scanner: str) -> float | None:
        """When, on the loop's clock, the scanner's earliest known entry is due."""
        heads = [self._heads.get(key) for key in self._keys.get(scanner, ())]
        known = [head for head in heads if head is not None]
        return self.clock.loop_time(min(known)) if known else None

    def learn(self, scanned: Iterable[Key], scan: DueScan) -> None:
        """Take over what a scan of these indexes found."""
        self.clock.observe(scan.now_ms)
        again = {(page.tag, page.index) for page in scan.pages} | scan.unreadable.keys()
        for key in scanned:
            if key in again:
                self._heads.pop(key, None)
            else:
                self._heads[key] = scan.armed.get(key)

    def absent(self, absent: Iterable[Key]) -> None:
        """Take over that none of these indexes exists."""
        self._heads.update(dict.fromkeys(absent))

    async def quiet(self, scanner: str, territory: Territory) -> bool:
        """Whether the scanner can be left out; False when only a scan can tell."""
        self._enter(territory)
        mine = self._keys[scanner]
        if any(key not in self._heads for key in mine):
            return False
        armed = [key for key in mine if self._heads[key] is not None]
        if armed and (len(armed) > _MAX_PEEKS or self.clock.age_s > self._trust_s):
            return False
        # The same command asks for the other scanners, so that they need not ask themselves.
        absent = [key for key, head in self._heads.items() if head is None]
        if len(armed) == len(mine):
            absent = []
        asked_at = asyncio.get_running_loop().time()
        appeared, heads = await asyncio.gather(
            self._any_exists(absent), asyncio.gather(*(self._head(key) for key in armed))
        )
        if appeared:
            # Which one is not told: every scanner looks for itself at its own time.
            for key in absent:
                self._heads.pop(key, None)
            return False
        self._heads.update(zip(armed, heads, strict=True))
        self._cover(absent, asked_at)
        now = self.clock.now_ms()
        return all(head is None or head > now for head in heads)

    def _enter(self, territory: Territory) -> None:
        if territory is self._territory:
            return
        self._territory = territory
        self._keys = {
            scanner: [
                (tag, index) for tag, lanes in territory.lanes.items() for index in indexes(lanes)
            ]
            for scanner, indexes in self._indexes.items()
        }
        known = {key for own in self._keys.values() for key in own}
        self._heads = {key: head for key, head in self._heads.items() if key in known}

    def _cover(self, absent: list[Key], asked_at: float) -> None:
        empty = set(absent)
        for scanner, own in self._keys.items():
            if own and empty.issuperset(own):
                self._covered[scanner] = asked_at

    async def _any_exists(self, absent: list[Key]) -> bool:
        groups = grouped(absent, _EXISTS_KEYS, apart=self._backend.transport.is_cluster)
        # A few at once: the server does other work in between.
        for start in range(0, len(groups), _UNDER_WAY):
            part = groups[start : start + _UNDER_WAY]
            if any(await asyncio.gather(*(self._exists(group) for group in part))):
                return True
        return False

    async def _exists(self, group: list[Key]) -> bool:
        names = [keys.index(*key) for key in group]
        found: Any = await self._backend.transport.call("EXISTS", *names, key=names[0])
        return found > 0

    async def _head(self, key: Key) -> int | None:
        """The earliest time. What cannot be read counts as due: the scan says why."""
        name = keys.index(*key)
        try:
            found: Any = await self._backend.transport.call(
                "ZRANGE", name, 0, 0, "WITHSCORES", key=name
            )
        except EngineError as error:
            if error.retryable:
                raise
            return 0
        # A damaged score may be infinite.
        return int(min(max(found[0][1], 0), _LAST_TIME)) if found else None


def grouped(keys: Iterable[Key], size: int, *, apart: bool) -> list[list[Key]]:
    """Parts of at most so many; `apart` is for clusters, where no call covers two partitions."""
    groups: list[list[Key]] = []
    for key in sorted(keys) if apart else keys:
        if not groups or len(groups[-1]) >= size or (apart and groups[-1][0][0] != key[0]):
            groups.append([])
        groups[-1].append(key)
    return groups


def by_partition(keys: Iterable[Key]) -> dict[str, list[str]]:
    """The names of each partition."""
    names: dict[str, list[str]] = {}
    for tag, name in keys:
        names.setdefault(tag, []).append(name)
    return names
