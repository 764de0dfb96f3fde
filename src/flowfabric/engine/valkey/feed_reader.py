"""Reading many event feeds in order, from a position that can be kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.core.errors import TransportError, engine_error, invalid_input
from flowfabric.core.feed_cursor import (
    BEGINNING,
    FeedCursor,
    Position,
    cursor_text,
    decode_cursor,
    decode_single,
    encode_single,
    entry_id,
    position_of,
)
from flowfabric.core.ids import PartitionKey
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.arguments import listed, partition_number
from flowfabric.engine.api.events import Start
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.library import read_primaries
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.valkey.transport import Connection

log = logging.getLogger(__name__)


_PAGE = 500
_BLOCK_S = 1.0
_GRACE_S = 0.5
_POLL_S = 0.05
_BASE_EVERY_S = 1.0
_UNSURE_AFTER_S = 30.0
_ALL_AT_ONCE = 1024
_CLOCK_SLACK_MS = 5000
"""How far a server's clock may be set back without a subscriber missing what follows."""
_LAST_SEQ = 2**64 - 1
_MAX_MS = 2**53 - 1


class Entry(msgspec.Struct, frozen=True):
    """One entry as stored, and where it stands."""

    partition: int
    position: Position
    entry_id: bytes
    flat: Sequence[bytes]


class _Feed(msgspec.Struct, frozen=True):
    """What a feed says of itself."""

    first: Position | None
    last: Position
    length: int
    added: int
    deleted: Position

    def lost(self, at: Position, maxlen: int) -> bool:
        """Whether entries behind a position were trimmed before they were read.

        Trimming by age leaves the newest entry it took on record; trimming by length does not,
        but only a full feed is trimmed so. Where neither tells, the answer is yes.
        """
        if self.added == self.length or self.last <= at:
            return False
        if self.first is not None and _before(self.first) <= at:
            return False
        if self.deleted > BEGINNING and self.length < maxlen:
            return self.deleted > at
        return True


class FeedReader:
    """Positions in the feeds of some partitions, or of all, and the reads that move them."""

    def __init__(
        self,
        calls: FunctionCalls,
        places: ValkeyPlaces,
        partitions: Sequence[int] | None = None,
    ) -> None:
        self._calls = calls
        self._places = places
        self._fixed = _checked(partitions, calls.counts)
        # The cursor of one feed names an entry of it, not a time.
        self._only = self._fixed[0] if self._fixed is not None and len(self._fixed) == 1 else None
        self._base = 0
        self._at: dict[int, Position] = {}
        self._conn: Connection | None = None
        # Times on the monotonic clock; None before the first.
        self._sure_at: float | None = None
        self._based_at: float | None = None
        self._used: list[int] = []
        self._closed = False

    # --- where it stands --------------------------------------------------------------------

    @property
    def cursor(self) -> bytes:
        """Where to go on later: behind everything `advance` was told of."""
        return self._cursor(self._at)

    def _cursor(self, at: Mapping[int, Position]) -> bytes:
        if self._only is not None:
            return encode_single(at.get(self._only, BEGINNING))
        return FeedCursor(self._base, at).encode()

    def advance(self, partition: int, position: Position) -> None:
        """Everything up to here was dealt with."""
        self._at[partition] = position

    def _position(self, partition: int) -> Position:
        return self._at.get(partition, (self._base, 0))

    async def begin(self, start: Start) -> None:
        """Take the starting position; a cursor of something else is `invalid_cursor`."""
        if isinstance(start, bool) or not isinstance(start, (bytes, str, int)):
            raise invalid_input("cursor", "must be now, start, a time in ms, or a cursor")
        if start in ("", b"", "now"):
            await self._begin_now()
        elif start == "start":
            self._sure_at = time.monotonic()
        elif isinstance(start, int):
            if not 0 < start <= _MAX_MS:
                raise invalid_input("cursor", f"a time is from 1 to {_MAX_MS}")
            self._base = start
            # Every feed from its first entry of that very millisecond.
            self._at = dict.fromkeys(await self._feeds(), (start - 1, _LAST_SEQ))
        else:
            self._resume(decode_cursor(start))

    async def _begin_now(self) -> None:
        self._sure_at = time.monotonic()
        if self._only is not None:
            feed = await self._feed(self._only)
            self._at[self._only] = BEGINNING if feed is None else feed.last
            return
        self._base = max(0, await self._server_ms() - _CLOCK_SLACK_MS)
        feeds = await self._feeds()
        names = [keys.events(_tag(partition)) for partition in feeds]
        ends: list[Any] = await asyncio.gather(
            *(
                self._calls.transport.call("XREVRANGE", name, "+", "-", "COUNT", 1, key=name)
                for name in names
            )
        )
        for partition, end in zip(feeds, ends, strict=True):
            if end and (last := position_of(end[0][0].decode())) > (self._base, 0):
                self._at[partition] = last

    def _resume(self, raw: bytes) -> None:
        if self._only is not None:
            self._at = {self._only: decode_single(raw)}
            return
        kept = FeedCursor.decode(raw)
        if any(partition >= self._calls.counts.flow for partition in kept.positions):
            raise engine_error("invalid_cursor", ["names a partition that does not exist"])
        self._base, self._at = kept.base, dict(kept.positions)

    # --- reading ----------------------------------------------------------------------------

    async def fetch(self) -> list[Entry]:
        """The next entries, in order inside each feed; waits a while and may come back empty.

        Call it again only when `advance` was told of all of them.
        """
        now = await self._moment()
        feeds = await self._feeds()
        if self._sure_at is None or time.monotonic() - self._sure_at > _UNSURE_AFTER_S:
            await self._check(feeds)
        try:
            found = await self._read(feeds)
        except BaseException:
            # Whatever is under way there must not answer the next question.
            self._hang_up("the read was given up")
            raise
        full = [partition for partition, entries in found.items() if len(entries) >= _PAGE]
        if full:
            await self._check(full)
        self._sure_at = time.monotonic()
        self._settle(now, feeds, found)
        return [
            Entry(partition, position_of(name.decode()), name, flat)
            for partition, entries in found.items()
            for name, flat in entries
        ]

    async def _moment(self) -> int | None:
        """The server's time, now and then: idle feeds need no place in a cursor behind it."""
        if self._based_at is not None and time.monotonic() - self._based_at < _BASE_EVERY_S:
            return None
        self._based_at = time.monotonic()
        self._used = []
        return await self._server_ms()

    async def _server_ms(self) -> int:
        clocks: dict[str, Any] = await self._calls.transport.call_all_primaries("TIME")
        return min(int(s) * 1000 + int(us) // 1000 for s, us in clocks.values())

    async def _feeds(self) -> list[int]:
        """The partitions to read; registered before their first event, so none is missed."""
        if self._fixed is not None:
            return list(self._fixed)
        count = self._calls.counts.flow
        if count <= _ALL_AT_ONCE and not self._calls.transport.is_cluster:
            return list(range(count))
        if not self._used:
            tags = await self._places.used_partitions()
            self._used = [int(tag[4:-1]) for tag in tags]
        return self._used

    async def _read(self, feeds: Sequence[int]) -> dict[int, Any]:
        if self._calls.transport.is_cluster or not feeds:
            return await self._poll(feeds)
        if self._conn is None or not self._conn.is_open:
            self._conn = await self._calls.transport.blocking(_tag(feeds[0]))
        if self._closed:
            raise TransportError("transport", "the subscription was closed")
        reply: Any = await self._conn.submit(
            (
                *("XREAD", "COUNT", _PAGE, "BLOCK", int(_BLOCK_S * 1000), "STREAMS"),
                *(keys.events(_tag(partition)) for partition in feeds),
                *(entry_id(self._position(partition)) for partition in feeds),
            ),
            _BLOCK_S + _GRACE_S,
        )
        return {} if not reply else {_partition(name): found for name, found in reply.items()}

    async def _poll(self, feeds: Sequence[int]) -> dict[int, Any]:
        """A blocking read cannot span the slots of a cluster."""
        names = [keys.events(_tag(partition)) for partition in feeds]
        replies: list[Any] = await asyncio.gather(
            *(
                self._calls.transport.call(
                    *("XREAD", "COUNT", _PAGE, "STREAMS", name),
                    entry_id(self._position(partition)),
                    key=name,
                )
                for name, partition in zip(names, feeds, strict=True)
            )
        )
        found = {
            _partition(name): entries
            for reply in replies
            if reply
            for name, entries in reply.items()
        }
        if not found:
            await asyncio.sleep(_POLL_S)
        return found

    def _settle(self, now: int | None, feeds: Sequence[int], found: Mapping[int, Any]) -> None:
        """Feeds that were read to their end move up with the base time."""
        for partition in found:
            self._at[partition] = self._position(partition)
        if now is None or self._only is not None:
            return
        base = max(self._base, now - _CLOCK_SLACK_MS)
        for partition in feeds:
            if partition not in found and self._position(partition) < (base, 0):
                self._at.pop(partition, None)
        self._base = base

    # --- gaps -------------------------------------------------------------------------------

    async def _check(self, feeds: Sequence[int]) -> None:
        """Refuse to go on where entries were trimmed unread: `cursor_expired`."""
        states = await asyncio.gather(*(self._feed(partition) for partition in feeds))
        maxlen = await self._maxlen()
        oldest: dict[int, Position] = {}
        for partition, state in zip(feeds, states, strict=True):
            at = self._position(partition)
            if state is None or (partition in self._at and at > state.last):
                self._fall_back(partition, state)
            elif state.lost(at, maxlen):
                first = state.first
                oldest[partition] = state.last if first is None else _before(first)
        if oldest:
            resume = cursor_text(self._cursor({**self._at, **oldest}))
            raise engine_error("cursor_expired", [resume], "subscribe")

    async def _maxlen(self) -> int:
        """How many entries a feed may keep before it is cut: what the loaded library says."""
        found = (await read_primaries(self._calls.transport)).values()
        return min((info.events_maxlen for info in found if info is not None), default=0)

    def _fall_back(self, partition: int, state: _Feed | None) -> None:
        """A failover lost what this position had seen: go on at the feed's own end."""
        if self._at.get(partition, BEGINNING)[0] <= self._base:
            return
        log.warning(
            "the event feed of partition %d ends before the cursor: going on at its end",
            partition,
            extra={"action": "feed_behind_cursor", "partition": partition},
        )
        self._at[partition] = BEGINNING if state is None else state.last

    async def _feed(self, partition: int) -> _Feed | None:
        name = keys.events(_tag(partition))
        try:
            raw: Any = await self._calls.transport.call("XINFO", "STREAM", name, key=name)
        except TransportError as error:
            if "no such key" in error.message:
                return None
            raise
        first = raw[b"first-entry"]
        return _Feed(
            first=None if not first else position_of(first[0].decode()),
            last=position_of(raw[b"last-generated-id"].decode()),
            length=int(raw[b"length"]),
            added=int(raw[b"entries-added"]),
            deleted=position_of(raw[b"max-deleted-entry-id"].decode()),
        )

    def _hang_up(self, why: str) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.abort(why)

    def close(self) -> None:
        """Give the connection up for good; a read under way fails."""
        self._closed = True
        self._hang_up("the subscription was closed")


def _tag(partition: int) -> str:
    return f"{{fp:{partition}}}"


def _partition(feed: bytes) -> int:
    return PartitionKey.trusted(keys.events_tag(feed.decode())).index_number


def _before(position: Position) -> Position:
    ms, seq = position
    return (ms, seq - 1) if seq else (ms - 1, _LAST_SEQ)


def _checked(partitions: Sequence[int] | None, counts: PartitionCounts) -> list[int] | None:
    if partitions is None:
        return None
    given = listed(partitions, "partitions")
    if not given:
        raise invalid_input("partitions", "must not be empty: leave it out to read all")
    return sorted({partition_number(each, counts, "partitions") for each in given})
