"""Which feeds a subscription covers, and where it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flowfabric.core.errors import engine_error, invalid_input
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Start
from flowfabric.engine.events.cursor import LAST_SEQ, FeedCursor, Position
from flowfabric.engine.events.source import FeedSource

CLOCK_SLACK_MS = 5000
"""How far a server's clock may step back without a subscriber missing what follows."""


class FeedSelection:
    """The feeds that a subscription covers."""

    def __init__(
        self, source: FeedSource, counts: PartitionCounts, feeds: Sequence[str] | None = None
    ) -> None:
        self._source = source
        self._counts = counts
        self._fixed = feeds
        self.only = feeds[0] if feeds is not None and len(feeds) == 1 else None
        """The one feed, if there is only one: its cursor names an entry, not a time."""

    async def list(self) -> Sequence[str]:
        """Their names; a feed is listed before its first entry, so that none is missed."""
        return self._fixed or await self._source.partition_feeds()

    async def cursor(self, start: Start) -> FeedCursor:
        """The starting position; a cursor of another selection is `invalid_cursor`."""
        if isinstance(start, bool) or not isinstance(start, (bytes, str, int)):
            raise invalid_input("cursor", "must be now, start, a time in ms, or a cursor")
        if isinstance(start, int):
            check.whole(start, "cursor", 1)
            # Every feed from its first entry of that millisecond.
            at = dict.fromkeys(await self.list(), (start - 1, LAST_SEQ))
            return FeedCursor(start, at, self.only)
        if start in ("", b"", "now"):
            base = 0 if self.only else max(0, await self._source.clock_ms() - CLOCK_SLACK_MS)
            return FeedCursor(base, await self._ends(base, "last"), self.only)
        if start == "start":
            return FeedCursor(0, await self._ends(0, "oldest"), self.only)
        cursor = FeedCursor.decode(start, self.only)
        partitions = (f[3:] for f in cursor.positions if f != self.only and f.startswith("fp:"))
        if any(int(number) >= self._counts.flow for number in partitions):
            raise engine_error("invalid_cursor", ["names a partition that does not exist"])
        return cursor

    async def _ends(self, base: int, end: Literal["oldest", "last"]) -> dict[str, Position]:
        """The oldest or the newest position of each feed that reaches beyond the base time."""
        feeds = await self.list()
        states = zip(feeds, await self._source.states(feeds), strict=True)
        ends = {feed: getattr(state, end) for feed, state in states if state is not None}
        return {feed: at for feed, at in ends.items() if at > (base, 0)}
