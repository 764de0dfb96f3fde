"""Following the event feeds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Self

from flowfabric.core.closing import AsyncClosing
from flowfabric.core.contracts.events import Event, decode_entry
from flowfabric.core.contracts.lease_events import EventFilter, LeaseEvent, lease_event
from flowfabric.core.errors import CorruptionError, TransportError, engine_error
from flowfabric.core.feed_cursor import cursor_text
from flowfabric.core.ids import ExecutionId
from flowfabric.core.tags import validate_tag_filter
from flowfabric.engine.api.arguments import checked_text, each_text, instance
from flowfabric.engine.api.events import Events
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.feed_reader import Entry, FeedReader, Start
from flowfabric.engine.valkey.places import ValkeyPlaces

_NOTHING = EventFilter()


class ValkeyEvents(Events):
    """`Events` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places
        self._open: set[LeaseHistory] = set()

    async def subscribe_lease_history(
        self,
        cursor: Start = "now",
        where: EventFilter | None = None,
        *,
        partitions: Sequence[int] | None = None,
    ) -> LeaseHistory:
        if where is not None:
            _check_filter(where)
        reader = FeedReader(self._calls, self._places, partitions)
        await reader.begin(cursor)
        history = LeaseHistory(self._calls, reader, where or _NOTHING, self._open.discard)
        self._open.add(history)
        return history

    async def aclose(self) -> None:
        """End every subscription."""
        async with AsyncExitStack() as closing:
            for history in list(self._open):
                closing.push_async_callback(history.aclose)


class LeaseHistory(AsyncClosing):
    """Iterates over lease events as they are committed; keep `cursor` to go on later.

    Events of one execution come in the order of their commits. A stored entry that cannot be read
    is given as its `CorruptionError`, and the iteration goes on. A lost connection ends it with
    `stream_disconnected`, whose detail is the cursor to subscribe with again.
    """

    def __init__(
        self,
        calls: FunctionCalls,
        reader: FeedReader,
        where: EventFilter,
        on_close: Callable[[LeaseHistory], None],
    ) -> None:
        self._on_close = on_close
        self._calls = calls
        self._reader = reader
        self._where = where
        self._ready: deque[tuple[Entry, Event | CorruptionError | None]] = deque()
        self._ended = False

    @property
    def cursor(self) -> bytes:
        """Where to go on: behind everything that was given out."""
        return self._reader.cursor

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LeaseEvent | CorruptionError:
        """The next event; waits for it."""
        while not self._ended:
            while self._ready:
                entry, found = self._ready.popleft()
                self._reader.advance(entry.partition, entry.position)
                if isinstance(found, CorruptionError):
                    return found
                given = None if found is None else lease_event(found, self.cursor)
                if given is not None:
                    return given
            await self._fill()
        raise StopAsyncIteration

    async def _fill(self) -> None:
        try:
            entries = await self._reader.fetch()
            decoded = [_decoded(entry) for entry in entries]
            self._ready.extend(zip(entries, await self._accepted(decoded), strict=True))
        except TransportError as error:
            await self.aclose()
            details = [cursor_text(self.cursor), error.detail]
            raise engine_error("stream_disconnected", details, "subscribe") from error

    async def _accepted(
        self, decoded: Sequence[Event | CorruptionError]
    ) -> list[Event | CorruptionError | None]:
        """None stands where the filter says no; its entry still moves the position."""
        where = self._where
        if where == _NOTHING:
            return list(decoded)
        kept = [
            found if isinstance(found, CorruptionError) or where.accepts(found) else None
            for found in decoded
        ]
        if not where.tags:
            return kept
        untold = {e.execution_id for e in kept if isinstance(e, Event) and e.tags is None}
        stored = dict(
            zip(untold, await asyncio.gather(*(self._tagged(each) for each in untold)), strict=True)
        )

        def matches(event: Event) -> bool:
            if event.tags is None:
                return stored[event.execution_id]
            return where.tags.items() <= event.tags.items()

        return [
            None if isinstance(found, Event) and not matches(found) else found for found in kept
        ]

    async def _tagged(self, execution_id: str | None) -> bool:
        if execution_id is None:
            return False
        key = keys.tags(ExecutionId.trusted(execution_id).tag, execution_id)
        wanted: Mapping[str, str] = self._where.tags
        try:
            stored = await self._calls.read(f"{execution_id}: tags", "HMGET", key, *wanted)
        except CorruptionError:
            return False
        return list(stored) == [value.encode() for value in wanted.values()]

    async def aclose(self) -> None:
        """Stop reading; the iteration ends."""
        self._ended = True
        self._on_close(self)
        self._reader.close()


def _check_filter(where: EventFilter) -> None:
    instance(where, EventFilter, "where")
    for name in ("namespace", "lane", "kind", "flow_id", "execution_id", "outcome"):
        if getattr(where, name) is not None:
            checked_text(getattr(where, name), name)
    if where.types is not None:
        each_text(where.types, "types")
    validate_tag_filter(where.tags)


def _decoded(entry: Entry) -> Event | CorruptionError:
    try:
        return decode_entry(entry.partition, entry.entry_id, entry.flat)
    except CorruptionError as error:
        return error
