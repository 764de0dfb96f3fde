"""Reading event feeds in order, from positions that can be kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from flowfabric.engine.events.cursor import BEGINNING, FeedCursor, Position
from flowfabric.engine.events.source import FeedSource, FeedState, StoredEntry

log = logging.getLogger(__name__)
_QUEUE = 1024
"""How many entries one read returns, about: what is read and not processed yet."""


class FeedReader:
    """A position in each feed, and the reads that return what follows it."""

    def __init__(self, source: FeedSource, cursor: FeedCursor | None = None) -> None:
        cursor = cursor or FeedCursor()
        self._source = source
        self._link = source.open()
        self.base = cursor.base
        self.positions: dict[str, Position] = dict(cursor.positions)
        self.reading: AbstractSet[str] = frozenset()
        """The feeds of the read under way, or of the last one."""
        self._slow: set[str] = set()

    def position(self, feed: str) -> Position:
        return self.positions.get(feed, (self.base, 0))

    async def read(
        self, feeds: Sequence[str], wait_s: float
    ) -> tuple[dict[str, Sequence[StoredEntry]], dict[str, FeedState]]:
        """New entries by feed, and the feeds that have lost entries they should contain.

        Positions do not move: the caller advances them as it processes the entries.
        """
        self.reading = frozenset(feeds)
        share = max(1, _QUEUE // max(1, len(feeds)))
        found = dict(await self._link.read(self._at(feeds), share, wait_s))
        behind = [feed for feed, entries in found.items() if len(entries) >= share]
        if not behind:
            return found, {}
        if len(behind) < len(feeds):
            found |= await self._link.read(self._at(behind), _QUEUE // len(behind), 0)
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
        """A failover lost what this position had seen: continue at the end of the feed."""
        if self.positions.get(feed, BEGINNING)[0] <= self.base:
            return
        log.warning(
            "The event feed %s ends before the cursor; continuing at its end.",
            feed,
            extra={"action": "feed_behind_cursor", "feed": feed},
        )
        self.positions[feed] = BEGINNING if state is None else state.last

    async def interrupt(self) -> None:
        """End the wait of a read early, so that the next one covers other feeds."""
        await self._link.interrupt()

    def close(self) -> None:
        """Drop the connection for good; a read fails."""
        self._link.close()


def _in_oldest_tenth(at: Position, state: FeedState) -> bool:
    return (at[0] - state.oldest[0]) * 10 < state.last[0] - state.oldest[0]
