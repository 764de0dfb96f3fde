"""Which event feeds a subscriber reads, where it starts, and reading them in order."""

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

from flowfabric.core.errors import engine_error, invalid_input
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Start
from flowfabric.engine.events.cursor import (
    BEGINNING,
    LAST_SEQ,
    FeedCursor,
    Position,
    numbered,
)
from flowfabric.engine.events.source import FeedSource, FeedState, StoredEntry

log = logging.getLogger(__name__)
CLOCK_SLACK_MS = 5000
"""How far a server's clock may step back without a subscriber missing what follows."""
_QUEUE = 1024
"""About how many entries one read returns, which bounds what is read but not processed."""


class FeedSelection:
    """The feeds that a subscription covers."""

    def __init__(
        self,
        source: FeedSource,
        counts: PartitionCounts,
        feeds: Sequence[str] | None = None,
        *,
        of_operators: bool = False,
        of_workers: bool = False,
    ) -> None:
        self.source = source
        self._counts = counts
        self._fixed = feeds
        self._of_operators = of_operators
        self._of_workers = of_workers
        self.only = feeds[0] if feeds is not None and len(feeds) == 1 else None
        """The one feed, if there is only one: its cursor names an entry, not a time."""

    async def list(self) -> Sequence[str]:
        """Their names; feeds are listed before their first entry, so that none is missed."""
        if self._fixed is not None:
            return self._fixed
        feeds = await self.source.partition_feeds(of_operators=self._of_operators)
        return [*feeds, *await self.source.worker_feeds()] if self._of_workers else feeds

    async def cursor(self, start: Start) -> FeedCursor:
        """The starting position; a cursor of another selection is `invalid_cursor`."""
        if isinstance(start, bool) or not isinstance(start, (bytes, str, int)):
            raise invalid_input("cursor", "must be now, start, a time in ms, or a cursor")
        if isinstance(start, int):
            check.whole(start, "cursor", 1)
            # Start every feed at its first entry of that millisecond.
            at = dict.fromkeys(await self.list(), (start - 1, LAST_SEQ))
            return FeedCursor(start, at, self.only)
        if start in ("", b"", "now"):
            base = 0 if self.only else max(0, await self.source.clock_ms() - CLOCK_SLACK_MS)
            return FeedCursor(base, await self._ends(base, "last"), self.only)
        if start == "start":
            return FeedCursor(0, await self._ends(0, "oldest"), self.only)
        cursor = FeedCursor.decode(start, self.only)
        if any(map(self._is_unknown, cursor.positions)):
            raise engine_error("invalid_cursor", ["names a partition that does not exist"])
        if not self._of_workers:
            return cursor
        known = {feed: cursor.positions.get(numbered(feed)) for feed in await self.list()}
        at = {feed: position for feed, position in known.items() if position is not None}
        return FeedCursor(cursor.base, at)

    def _is_unknown(self, feed: str) -> bool:
        family, _, number = feed.partition(":")
        counts = {"fp": self._counts.flow, "b": self._counts.budget, "q": self._counts.quota}
        if family == "w":
            return not self._of_workers
        return feed != self.only and int(number) >= counts[family]

    async def _ends(self, base: int, end: Literal["oldest", "last"]) -> dict[str, Position]:
        """The oldest or the newest position of each feed that reaches beyond the base time."""
        feeds = await self.list()
        states = zip(feeds, await self.source.states(feeds), strict=True)
        ends = {feed: getattr(state, end) for feed, state in states if state is not None}
        return {feed: at for feed, at in ends.items() if at > (base, 0)}


class FeedReader:
    """A position in each feed, and the reads that return what follows it."""

    def __init__(self, source: FeedSource, cursor: FeedCursor | None = None) -> None:
        cursor = cursor or FeedCursor()
        self._source = source
        self.link = source.open()
        self.base = cursor.base
        self.positions: dict[str, Position] = dict(cursor.positions)
        self.reading: AbstractSet[str] = frozenset()
        """The feeds of the current or last read."""
        self._slow: set[str] = set()

    def position(self, feed: str) -> Position:
        return self.positions.get(feed, (self.base, 0))

    async def read(
        self, feeds: Sequence[str], wait_s: float
    ) -> tuple[dict[str, Sequence[StoredEntry]], dict[str, FeedState]]:
        """New entries by feed, and the feeds that lost entries. The caller must advance."""
        self.reading = frozenset(feeds)
        share = max(1, _QUEUE // max(1, len(feeds)))
        found = dict(await self.link.read(self._at(feeds), share, wait_s))
        behind = [feed for feed, entries in found.items() if len(entries) >= share]
        if not behind:
            return found, {}
        if len(behind) < len(feeds):
            found |= await self.link.read(self._at(behind), _QUEUE // len(behind), 0)
        # Only a reader that is behind can be overtaken by trimming.
        return found, await self.gaps(behind)

    def _at(self, feeds: Iterable[str]) -> dict[str, Position]:
        return {feed: self.position(feed) for feed in feeds}

    async def gaps(self, feeds: Sequence[str]) -> dict[str, FeedState]:
        """The feeds in which entries after the position were trimmed."""
        lost: dict[str, FeedState] = {}
        for feed, state in zip(feeds, await self._source.states(feeds), strict=True):
            at = self.position(feed)
            if state is None or (feed in self.positions and at > state.last):
                self._rewind(feed, state)
            elif at < state.trimmed:
                lost[feed] = state
            elif state.trimmed > BEGINNING and _in_oldest_tenth(at, state):
                self._warn_slow(feed)
            else:
                self._slow.discard(feed)
        return lost

    def _warn_slow(self, feed: str) -> None:
        if feed in self._slow:
            return
        self._slow.add(feed)
        log.warning(
            "A subscriber of the event feed %s is slow: its next entries will be trimmed soon. "
            "Read faster, filter more, or raise FF_EVENTS_MAXLEN.",
            feed,
            extra={"action": "stream_backpressure", "feed": feed},
        )

    def _rewind(self, feed: str, state: FeedState | None) -> None:
        """Continue at the end of a feed that lost entries before this position in a failover."""
        if self.positions.get(feed, BEGINNING)[0] <= self.base:
            return
        log.warning(
            *("The event feed %s ends before the cursor; continuing at its end.", feed),
            extra={"action": "feed_behind_cursor", "feed": feed},
        )
        self.positions[feed] = BEGINNING if state is None else state.last


def _in_oldest_tenth(at: Position, state: FeedState) -> bool:
    return (at[0] - state.oldest[0]) * 10 < state.last[0] - state.oldest[0]
