"""Sharing a subscription: the members of a group divide its feeds among them (12 §11.3)."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from flowfabric.core.errors import EngineError
from flowfabric.engine.events.cursor import FeedCursor, Position, cursor_text
from flowfabric.engine.events.reader import FeedSelection
from flowfabric.engine.events.source import FeedSource, FeedState

log = logging.getLogger(__name__)
_LEASE_MS = 30_000
_RENEW_S = 10.0
_LOOK_S = 1.0
"""How often a member looks for others that came or left."""


class GroupMember:
    """One member: the feeds it holds by lease, and what it has processed of them.

    Each feed belongs to the live member with the highest hash of both names, so members agree
    without talking to each other, and few feeds move when one comes or leaves.
    """

    def __init__(
        self, source: FeedSource, selection: FeedSelection, group: str, name: str, start: FeedCursor
    ) -> None:
        self._source = source
        self._selection = selection
        self._group = group
        self._name = name
        self._start = start
        self.held: dict[str, Position] = {}
        """The feeds this member reads, and how far it has read them."""
        self.unacked: dict[str, Position] = {}
        """The last event returned of each feed, until it is acknowledged."""
        self._members: list[str] = []
        self._renewed_at = 0.0
        self._keeping: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Enter the group and take the feeds that are free."""
        await self._look()
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def ack(self, feed: str, position: Position) -> None:
        """Store that this event and those before it were processed."""
        if self.unacked.get(feed, position) <= position:
            self.unacked.pop(feed, None)
        await self._lease(feed, _LEASE_MS if feed in self.held else 0, position)

    async def skip(self, gaps: Mapping[str, FeedState]) -> None:
        """Continue after a gap, which the subscriber is told of once."""
        for feed, state in gaps.items():
            if feed in self.held:
                self.held[feed] = state.oldest
                await self._lease(feed, _LEASE_MS, state.oldest)

    async def leave(self) -> None:
        """Return every feed, so that another member need not wait for the leases to expire."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        with contextlib.suppress(EngineError):
            await self._lease_all(self.held, 0)
            await self._source.join_group(self._group, self._name, 0, "")
        self.held.clear()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except EngineError as error:
                log.debug("leases of group %s not renewed: %s", self._group, error)

    async def _look(self) -> None:
        start = cursor_text(self._start.encode())
        start, members = await self._source.join_group(self._group, self._name, _LEASE_MS, start)
        self._start = FeedCursor.decode(start, self._start.only)
        feeds = await self._selection.list()
        mine = [feed for feed in feeds if _owner(feed, members) == self._name]
        if members != self._members:
            await self._lease_all(self.held.keys() - set(mine), 0)
            self._members = members
        if time.monotonic() - self._renewed_at >= _RENEW_S:
            self._renewed_at = time.monotonic()
            await self._lease_all(mine, _LEASE_MS)
        else:
            await self._lease_all([feed for feed in mine if feed not in self.held], _LEASE_MS)

    async def _lease_all(self, feeds: Iterable[str], lease_ms: int) -> None:
        # Everything returned so far is processed where nothing waits to be acknowledged.
        done = {feed: at for feed, at in self.held.items() if feed not in self.unacked}
        await asyncio.gather(*(self._lease(each, lease_ms, done.get(each)) for each in feeds))

    async def _lease(self, feed: str, lease_ms: int, done: Position | None) -> None:
        held, stored = await self._source.lease_feed(feed, self._group, self._name, lease_ms, done)
        if not held:
            self.held.pop(feed, None)
            self.unacked.pop(feed, None)
        elif feed not in self.held:
            self.held[feed] = stored or self._start.position(feed)


def _owner(feed: str, members: Sequence[str]) -> str:
    return max(members, key=lambda member: hashlib.blake2b(f"{member} {feed}".encode()).digest())
