"""Iterating over events: families, filters, cursors, gaps."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Self

from flowfabric.core.closing import AsyncClosing
from flowfabric.core.errors import CorruptionError, TransportError, engine_error, invalid_input
from flowfabric.engine.api.events import Event, EventFilter, F, typed
from flowfabric.engine.events.cursor import FeedCursor, Position, cursor_text, position_of
from flowfabric.engine.events.groups import GroupMember
from flowfabric.engine.events.reader import FeedReader
from flowfabric.engine.events.selection import CLOCK_SLACK_MS, FeedSelection
from flowfabric.engine.events.source import FeedSource, FeedState

_WAIT_S = 1.0
_BASE_EVERY_S = 1.0
_UNSURE_AFTER_S = 30.0

_FAMILIES: dict[str, tuple[str, ...]] = {
    "completion": ("completion",),
    "acquired": ("lease",),
    "renewed": ("lease",),
    "released": ("lease",),
    "expired": ("lease",),
    "reclaimed": ("lease",),
    "revoked": ("lease", "operator"),
    "replayed": ("lease", "operator"),
    "signal": ("signal",),
    "flow_cancel_requested": ("flow", "operator"),
    "flow_finished": ("flow",),
    **dict.fromkeys(("resumed", "escalated", "priority_changed"), ("operator",)),
    **dict.fromkeys(("operator_blocked", "operator_unblocked"), ("operator",)),
    **dict.fromkeys(("worker_registered", "worker_dead", "worker_expired"), ("worker",)),
}


def families_of(event: Event) -> tuple[str, ...]:
    """The families an entry belongs to. An unknown type that names a lease is lease history."""
    known = _FAMILIES.get(event.type)
    if known is None:
        if event.type.startswith(("budget_", "quota_")):
            return ("operator",)
        return ("lease",) if event.get("lease_id") is not None else ()
    if event.type == "completion":
        if event.get("lease_id") is not None:
            known += ("lease",)
        if event.get("source") == "operator_override":
            known += ("operator",)
    return known


class FeedSubscription(AsyncClosing, Generic[F]):
    """`Subscription` on any source of feeds."""

    def __init__(
        self,
        source: FeedSource,
        selection: FeedSelection,
        cursor: FeedCursor,
        *,
        families: Collection[str],
        form: type[F],
        where: EventFilter,
        member: GroupMember | None = None,
        fresh: bool = False,
        on_close: Callable[[FeedSubscription[F]], None],
    ) -> None:
        self._source = source
        self._selection = selection
        self._reader = FeedReader(source, cursor)
        self._families = frozenset(families)
        self._form = form
        self._where = where
        self._member = member
        self._on_close = on_close
        self._ready: deque[tuple[str, Position, Event | CorruptionError | None]] = deque()
        self._ended = False
        # Times on the monotonic clock; None before the first.
        self._checked_at = time.monotonic() if fresh else None
        self._based_at: float | None = None
        if member is not None:
            member.attach(self._reader)

    @property
    def cursor(self) -> bytes:
        """The position after the last event returned."""
        reader = self._reader
        return FeedCursor(reader.base, reader.positions, self._selection.only).encode()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> F | CorruptionError:
        """The next event; waits for it."""
        while not self._ended:
            while self._ready:
                feed, position, found = self._ready.popleft()
                if not self._reaches(feed, position):
                    continue
                self._reader.positions[feed] = position
                if found is None:
                    continue
                if self._member is not None:
                    self._member.returned(feed, position)
                if isinstance(found, CorruptionError):
                    return found
                return typed(found, self._form, self.cursor)
            try:
                await self._fill()
            except TransportError as error:
                await self.aclose()
                details = [cursor_text(self.cursor), error.detail]
                raise engine_error("stream_disconnected", details, "subscribe") from error
        raise StopAsyncIteration

    def _reaches(self, feed: str, position: Position) -> bool:
        """Whether the entry is new: a group may have lost its feed, and read it again since."""
        if self._member is not None and feed not in self._reader.positions:
            return False
        return position > self._reader.position(feed)

    async def ack(self, event_id: str) -> None:
        """Store for the group that this event and those before it in its feed were processed."""
        if self._member is None:
            raise invalid_input("group", "is not set: only members of a group acknowledge events")
        feed, _, entry = event_id.rpartition("/")
        await self._member.ack(feed, position_of(entry))

    async def aclose(self) -> None:
        """Stop reading; the iteration ends."""
        self._ended = True
        self._on_close(self)
        self._reader.close()
        if self._member is not None:
            await self._member.leave()

    # --- reading ----------------------------------------------------------------------------

    async def _fill(self) -> None:
        now = await self._moment()
        member = self._member
        feeds = await self._selection.list() if member is None else member.feeds
        if not feeds:
            await asyncio.sleep(_WAIT_S)
            return
        if self._checked_at is None or time.monotonic() - self._checked_at > _UNSURE_AFTER_S:
            await self._refuse(await self._reader.gaps(feeds))
        found, gaps = await self._reader.read(feeds, _WAIT_S)
        await self._refuse(gaps)
        self._checked_at = time.monotonic()
        self._settle(now, feeds, found)
        await self._queue(found)

    async def _moment(self) -> int | None:
        """The time to move idle feeds up to, now and then; a cursor need not list those."""
        if self._selection.only or self._member is not None:
            return None
        if self._based_at is not None and time.monotonic() - self._based_at < _BASE_EVERY_S:
            return None
        self._based_at = time.monotonic()
        return await self._source.clock_ms()

    def _settle(self, now: int | None, feeds: Sequence[str], found: Collection[str]) -> None:
        reader = self._reader
        if now is None:
            return
        for feed in found:
            reader.positions[feed] = reader.position(feed)
        base = max(reader.base, now - CLOCK_SLACK_MS)
        for feed in feeds:
            if feed not in found and reader.position(feed) < (base, 0):
                reader.positions.pop(feed, None)
        reader.base = base

    async def _refuse(self, gaps: Mapping[str, FeedState]) -> None:
        if not gaps:
            return
        if self._member is not None:
            await self._member.skip(gaps)
        positions = dict(self._reader.positions)
        positions |= {feed: state.oldest for feed, state in gaps.items()}
        left = FeedCursor(self._reader.base, positions, self._selection.only)
        raise engine_error("cursor_expired", [cursor_text(left.encode())], "subscribe")

    async def _queue(self, found: Mapping[str, Sequence[object]]) -> None:
        entries = [(feed, entry) for feed, page in found.items() for entry in page]
        events = [self._decoded(feed, entry) for feed, entry in entries]
        accepted = await self._accepted([e for e in events if isinstance(e, Event)])
        for (feed, entry), event in zip(entries, events, strict=True):
            kept = (
                event if isinstance(event, CorruptionError) or event.event_id in accepted else None
            )
            self._ready.append((feed, self._source.position(entry), kept))

    def _decoded(self, feed: str, entry: object) -> Event | CorruptionError:
        try:
            return self._source.decode(feed, entry)
        except CorruptionError as error:
            return error

    async def _accepted(self, events: Sequence[Event]) -> set[str]:
        """The ids of the events that this subscription returns."""
        where = self._where
        matching = [
            event
            for event in events
            if not self._families.isdisjoint(families_of(event)) and where.accepts(event)
        ]
        if not where.tags:
            return {event.event_id for event in matching}
        untold = {e.execution_id for e in matching if e.tags is None and e.execution_id}
        tagged = await self._source.tagged(untold, where.tags) if untold else set[str]()
        return {
            event.event_id
            for event in matching
            if (
                event.execution_id in tagged
                if event.tags is None
                else where.tags.items() <= event.tags.items()
            )
        }
