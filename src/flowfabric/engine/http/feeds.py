"""The event feeds over HTTP: their reader runs in the client, and the server serves pages."""

import asyncio
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from flowfabric.core.errors import (
    CorruptionError,
    TransportError,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId, validate_lane, validate_namespace
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.text import shown
from flowfabric.engine.api import check
from flowfabric.engine.api.events import Event
from flowfabric.engine.events.cursor import LAST_SEQ, FeedCursor, Position
from flowfabric.engine.events.source import FeedLink, FeedSource, FeedState, Pages, Stop
from flowfabric.engine.http.codec import WireError

_WORKERS = "worker:"
_MAX_COUNT = 100_000
_MAX_WAIT_S = 60.0
_MOST_IDLE = 32
"""How many idle connections to keep for later readers."""
_MAX_LEASE_MS = 600_000
_is_partition_feed = re.compile(r"(fp|b|q):(0|[1-9][0-9]{0,4})").fullmatch


class FeedEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a feed. It has no event if the caller may not see its namespace."""

    position: Position
    stop: Stop | None = None
    event: Event | None = None
    error: WireError | None = None
    """Why the entry cannot be read."""


class FeedOperations(Protocol):
    """The operations on feeds that a server offers."""

    async def partition_feeds(self, *, of_operators: bool = False) -> Sequence[str]: ...
    async def worker_feeds(self) -> Sequence[str]: ...
    async def tagged(
        self, ids: Collection[ExecutionId], tags: Mapping[str, str]
    ) -> set[ExecutionId]: ...
    async def clock_ms(self) -> int: ...
    async def states(self, feeds: Sequence[str]) -> list[FeedState | None]: ...
    async def last_position(self, feed: str) -> Position: ...
    async def join_group(
        self, group: str, member: str, lease_ms: int, start: str
    ) -> tuple[str, list[str]]: ...
    async def lease_feed(
        self, feed: str, group: str, member: str, lease_ms: int, done: Position | None
    ) -> tuple[bool, Position | None]: ...

    async def read(
        self, positions: Mapping[str, Position], count: int, wait_s: float
    ) -> dict[str, list[FeedEntry]]:
        """At most `count` entries per feed; waits for the first."""
        ...


class ServedFeeds:
    """`FeedOperations` of a server; checks what clients send and reuses waiting connections."""

    def __init__(self, source: FeedSource, counts: PartitionCounts) -> None:
        self._source = source
        self._numbers = {"fp": counts.flow, "b": counts.budget, "q": counts.quota}
        self._counts = counts
        self._idle: list[FeedLink] = []
        self._closed = False

    async def partition_feeds(self, *, of_operators: bool = False) -> Sequence[str]:
        return await self._source.partition_feeds(of_operators=of_operators)

    async def worker_feeds(self) -> Sequence[str]:
        return await self._source.worker_feeds()

    async def clock_ms(self) -> int:
        return await self._source.clock_ms()

    async def tagged(
        self, ids: Collection[ExecutionId], tags: Mapping[str, str]
    ) -> set[ExecutionId]:
        known = {each.check_partition(self._counts) for each in ids}
        found = await self._source.tagged(known, tags) if tags else known
        return {each for each in known if each in found}

    async def states(self, feeds: Sequence[str]) -> list[FeedState | None]:
        return await self._source.states([self._feed(each) for each in feeds])

    async def last_position(self, feed: str) -> Position:
        return await self._source.last_position(self._feed(feed))

    async def join_group(
        self, group: str, member: str, lease_ms: int, start: str
    ) -> tuple[str, list[str]]:
        if check.whole(lease_ms, "lease_ms", 0, _MAX_LEASE_MS):
            _check_start(start)
        return await self._source.join_group(
            validate_lane(group, "group"), check.text(member, "member"), lease_ms, start
        )

    async def lease_feed(
        self, feed: str, group: str, member: str, lease_ms: int, done: Position | None
    ) -> tuple[bool, Position | None]:
        check.whole(lease_ms, "lease_ms", 0, _MAX_LEASE_MS)
        names = self._feed(feed), validate_lane(group, "group"), check.text(member, "member")
        at = None if done is None else _checked(done, "done")
        return await self._source.lease_feed(*names, lease_ms, at)

    def _feed(self, name: str) -> str:
        """The name, if it is a feed; other names could address any key in the store."""
        if name.startswith(_WORKERS):
            validate_namespace(name.removeprefix(_WORKERS))
        elif (found := _is_partition_feed(name)) is None or (
            int(found[2]) >= self._numbers[found[1]]
        ):
            raise invalid_input("feed", f"{shown(name)} is not a feed of this deployment")
        return name

    async def read(
        self, positions: Mapping[str, Position], count: int, wait_s: float
    ) -> dict[str, list[FeedEntry]]:
        positions = {self._feed(feed): _checked(at, feed) for feed, at in positions.items()}
        check.whole(count, "count", 1, _MAX_COUNT)
        wait_s = min(check.seconds(wait_s, "wait_s"), _MAX_WAIT_S)
        if not positions:
            return {}
        until = time.monotonic() + wait_s
        link = self._idle.pop() if self._idle else self._source.open()
        try:
            pages = await link.read(positions, count, wait_s)
            # If one read cannot cover all feeds, it returns before the wait is over.
            while not pages and time.monotonic() < until:
                pages = await link.read(positions, count, until - time.monotonic())
        except BaseException:
            link.close()
            raise
        if self._closed or len(self._idle) >= _MOST_IDLE:
            link.close()
        else:
            self._idle.append(link)
        return {feed: [self._entry(feed, each) for each in page] for feed, page in pages.items()}

    def _entry(self, feed: str, entry: Any) -> FeedEntry:
        position, stop = self._source.position(entry), self._source.stop(entry)
        try:
            return FeedEntry(position, stop, self._source.decode(feed, entry))
        except CorruptionError as error:
            return FeedEntry(position, stop, error=WireError.of(error))

    def close(self) -> None:
        """Drop the connections that wait for entries."""
        self._closed = True
        for link in self._idle:
            link.close()


def _check_start(cursor: str) -> None:
    try:
        FeedCursor.decode(cursor)
    except ValidationError:
        # That of a single feed looks different.
        FeedCursor.decode(cursor, only="fp:0")


def _checked(position: Position, field: str) -> Position:
    for number in position:
        check.whole(number, field, 0, LAST_SEQ)
    return position


class HttpFeeds:
    """A `FeedSource` whose pages come from a server."""

    waits_across_feeds = True
    answers_in_order = False

    def __init__(self, remote: FeedOperations) -> None:
        self._remote = remote

    def open(self) -> FeedLink:
        return _HttpFeedLink(self._remote)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote, name)

    def position(self, entry: FeedEntry) -> Position:
        return entry.position

    def stop(self, entry: FeedEntry) -> Stop | None:
        return entry.stop

    def decode(self, feed: str, entry: FeedEntry) -> Event:  # noqa: ARG002 - the event names it
        if entry.error is not None:
            raise entry.error.error()
        return entry.event or _HIDDEN


_HIDDEN = Event("", "", 0)
"""Replaces an entry that the token may not see; it belongs to no family."""


class _HttpFeedLink:
    """One request at a time that waits for entries."""

    def __init__(self, remote: FeedOperations) -> None:
        self._remote = remote
        self._reading: asyncio.Task[Any] | None = None
        self._closed = False

    async def read(self, positions: Mapping[str, Position], count: int, wait_s: float) -> Pages:
        if self._closed:
            raise TransportError("transport", "the subscription was closed")
        reading = asyncio.ensure_future(self._remote.read(positions, count, wait_s))
        self._reading = cast("asyncio.Task[Any]", reading)
        try:
            await asyncio.wait([reading])
        finally:
            self._reading = None
            if not reading.done():
                reading.cancel()
        if not reading.cancelled():
            return reading.result()
        if self._closed:
            raise TransportError("transport", "the subscription was closed")
        return {}

    async def interrupt(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def close(self) -> None:
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()
