"""Subscribing to events, alone or as a group: families, filters, cursors, gaps (12 §11.3)."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Self

from flowfabric.core import errors
from flowfabric.core.closing import AsyncClosing
from flowfabric.core.ids import ExecutionId, new_uuid, validate_namespace
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import PublicState
from flowfabric.engine.api import check
from flowfabric.engine.api import events as api
from flowfabric.engine.events.completions import CompletionWatch
from flowfabric.engine.events.cursor import FeedCursor, Position, cursor_text, position_of
from flowfabric.engine.events.reader import CLOCK_SLACK_MS, FeedReader, FeedSelection
from flowfabric.engine.events.source import FeedSource, FeedState

log = logging.getLogger(__name__)
_LEASE_MS = 30_000
_RENEW_S = 10.0
_CHECK_S = 1.0
"""How often a member checks whether others joined or left."""
_WAIT_S = 1.0
_BASE_EVERY_S = 1.0
_UNSURE_AFTER_S = 30.0

_FAMILIES: dict[str, tuple[str, ...]] = {
    "completion": ("completion",),
    "signal": ("signal",),
    "flow_finished": ("flow",),
    "flow_cancel_requested": ("flow", "operator"),
    **dict.fromkeys(("acquired", "renewed", "released", "expired", "reclaimed"), ("lease",)),
    **dict.fromkeys(("revoked", "replayed"), ("lease", "operator")),
    **dict.fromkeys(("resumed", "escalated", "priority_changed"), ("operator",)),
    **dict.fromkeys(("operator_blocked", "operator_unblocked"), ("operator",)),
    **dict.fromkeys(("worker_registered", "worker_dead", "worker_expired"), ("worker",)),
}


def families_of(event: api.Event) -> tuple[str, ...]:
    """The families of an entry. An unknown type that names a lease is lease history."""
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


class GroupMember:
    """One member: the feeds it has leased, and what it has processed of them.

    Each feed belongs to the live member with the highest hash of both names: members agree
    without communicating, and few feeds move when one joins or leaves.
    """

    def __init__(self, selection: FeedSelection, group: str, name: str, start: FeedCursor) -> None:
        self._source = selection.source
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
        await self._check_members()
        self._keeping = asyncio.get_running_loop().create_task(self._keep_leases())

    async def ack(self, feed: str, position: Position) -> None:
        """Store that this event and those before it were processed."""
        if self.unacked.get(feed, position) <= position:
            self.unacked.pop(feed, None)
        await self._lease(feed, _LEASE_MS if feed in self.held else 0, position)

    async def skip(self, gaps: Mapping[str, FeedState]) -> None:
        """Continue after a gap, which is reported to the subscriber once."""
        for feed, state in gaps.items():
            if feed in self.held:
                self.held[feed] = state.oldest
                await self._lease(feed, _LEASE_MS, state.oldest)

    async def leave(self) -> None:
        """Release every feed, so that other members need not wait for the leases to expire."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        with contextlib.suppress(errors.EngineError):
            await self._lease_all(self.held, 0)
            await self._source.join_group(self._group, self._name, 0, "")
        self.held.clear()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._check_members()
            except errors.EngineError as error:
                log.debug("leases of group %s not renewed: %s", self._group, error)

    async def _check_members(self) -> None:
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
        # If nothing is unacknowledged, everything returned so far is processed.
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


class FeedSubscription(AsyncClosing, Generic[api.F]):
    def __init__(
        self,
        selection: FeedSelection,
        cursor: FeedCursor,
        request: api.FeedRequest[api.F],
        member: GroupMember | None,
        *,
        fresh: bool,
        on_close: Callable[[Self], None],
    ) -> None:
        self._source = selection.source
        self._selection = selection
        self._reader = FeedReader(selection.source, cursor)
        self._families = frozenset(request.families)
        self._form = request.form
        self._where = (request.options.get("where") or api.EventFilter()).canonical()
        self._member = member
        self._on_close = on_close
        self._ready: deque[tuple[str, Position, api.Event | errors.CorruptionError | None]] = (
            deque()
        )
        self._ended = False
        # Times on the monotonic clock; None before the first.
        self._checked_at = time.monotonic() if fresh else None
        self._based_at: float | None = None
        if member is not None:
            # The member advances the positions of the feeds that it holds.
            self._reader.positions = member.held

    @property
    def cursor(self) -> bytes:
        reader = self._reader
        return FeedCursor(reader.base, reader.positions, self._selection.only).encode()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> api.F | errors.CorruptionError:
        while not self._ended:
            while self._ready:
                feed, position, found = self._ready.popleft()
                if not self._reaches(feed, position):
                    continue
                self._reader.positions[feed] = position
                if found is None:
                    continue
                if self._member is not None:
                    self._member.unacked[feed] = position
                if isinstance(found, errors.CorruptionError):
                    return found
                return api.typed(found, self._form, self.cursor)
            try:
                await self._fill()
            except errors.TransportError as error:
                await self.aclose()
                details = [cursor_text(self.cursor), error.detail]
                raise errors.engine_error("stream_disconnected", details, "subscribe") from error
        raise StopAsyncIteration

    def _reaches(self, feed: str, position: Position) -> bool:
        """Whether the entry is new; a member may have lost its feed and read it again since."""
        if self._member is not None and feed not in self._reader.positions:
            return False
        return position > self._reader.position(feed)

    async def ack(self, event_id: str) -> None:
        if self._member is None:
            raise errors.invalid_input(
                "group", "is not set: only members of a group acknowledge events"
            )
        feed, _, entry = event_id.rpartition("/")
        await self._member.ack(feed, position_of(entry))

    async def aclose(self) -> None:
        self._ended = True
        self._on_close(self)
        self._reader.link.close()
        if self._member is not None:
            await self._member.leave()

    async def _fill(self) -> None:
        now = await self._idle_time()
        member = self._member
        feeds = await self._selection.list() if member is None else list(member.held)
        if not feeds:
            await asyncio.sleep(_WAIT_S)
            return
        if self._checked_at is None or time.monotonic() - self._checked_at > _UNSURE_AFTER_S:
            await self._refuse(await self._reader.gaps(feeds))
        found, gaps = await self._reader.read(feeds, _WAIT_S)
        await self._refuse(gaps)
        self._checked_at = time.monotonic()
        if now is not None:
            self._advance_idle(now, feeds, found)
        await self._queue(found)

    async def _idle_time(self) -> int | None:
        """Now and then, the time to which to advance idle feeds, so that the cursor stays short."""
        if self._selection.only or self._member is not None:
            return None
        if self._based_at is not None and time.monotonic() - self._based_at < _BASE_EVERY_S:
            return None
        self._based_at = time.monotonic()
        return await self._source.clock_ms()

    def _advance_idle(self, now: int, feeds: Sequence[str], found: Collection[str]) -> None:
        reader = self._reader
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
        oldest = {feed: state.oldest for feed, state in gaps.items()}
        positions = {**self._reader.positions, **oldest}
        left = FeedCursor(self._reader.base, positions, self._selection.only)
        raise errors.engine_error("cursor_expired", [cursor_text(left.encode())], "subscribe")

    async def _queue(self, found: Mapping[str, Sequence[object]]) -> None:
        entries = [
            (feed, self._source.position(entry), self._decoded(feed, entry))
            for feed, page in found.items()
            for entry in page
        ]
        accepted = await self._accepted([e for *_, e in entries if isinstance(e, api.Event)])
        for feed, position, event in entries:
            kept = isinstance(event, errors.CorruptionError) or event.event_id in accepted
            self._ready.append((feed, position, event if kept else None))

    def _decoded(self, feed: str, entry: object) -> api.Event | errors.CorruptionError:
        try:
            return self._source.decode(feed, entry)
        except errors.CorruptionError as error:
            return error

    async def _accepted(self, events: Sequence[api.Event]) -> set[str]:
        """The ids of the events that this subscription returns."""
        where, families = self._where, self._families
        matching = [
            event
            for event in events
            if not families.isdisjoint(families_of(event)) and where.accepts(event)
        ]
        if not where.tags:
            return {event.event_id for event in matching}
        untold = {e.execution_id for e in matching if e.tags is None and e.execution_id}
        tagged = await self._source.tagged(untold, where.tags) if untold else set[str]()

        def has_tags(event: api.Event) -> bool:
            if event.tags is None:
                return event.execution_id in tagged
            return where.tags.items() <= event.tags.items()

        return {event.event_id for event in matching if has_tags(event)}


class FeedEvents(api.Events):
    """`Events` on any source of feeds: the subscriptions and waits of one deployment."""

    def __init__(
        self,
        source: FeedSource,
        counts: PartitionCounts,
        read_state: Callable[[ExecutionId], Awaitable[PublicState]],
    ) -> None:
        self.source = source
        self._counts = counts
        self._watch = CompletionWatch(source, read_state)
        self._open: set[FeedSubscription[Any]] = set()

    async def _follow(
        self, request: api.FeedRequest[api.F], cursor: api.Start
    ) -> FeedSubscription[api.F]:
        options, namespace = api.checked_options(request.options), request.namespace
        feeds = None if namespace is None else [f"worker:{validate_namespace(namespace)}"]
        if (partitions := options.get("partitions")) is not None:
            feeds = self._feeds(partitions)
        of_operators = "operator" in request.families
        of_workers = "worker" in request.families and feeds is None
        selection = FeedSelection(
            *(self.source, self._counts, feeds), of_operators=of_operators, of_workers=of_workers
        )
        start = await selection.cursor(cursor)
        member = None
        if (group := options.get("group")) is not None:
            name = options.get("member") or new_uuid()
            member = GroupMember(selection, group, name, start)
            await member.join()
        # These positions were just read from the feeds.
        fresh = member is None and cursor in ("", b"", "now", "start")
        subscription = FeedSubscription(
            selection, start, request, member, fresh=fresh, on_close=self._open.discard
        )
        self._open.add(subscription)
        return subscription

    def _feeds(self, partitions: Sequence[int]) -> list[str]:
        numbers = {
            check.partition(each, self._counts, "partitions")
            for each in check.listed(partitions, "partitions")
        }
        if not numbers:
            raise errors.invalid_input(
                "partitions", "must not be empty; omit it to read all of them"
            )
        return [f"fp:{number}" for number in sorted(numbers)]

    async def wait_ended(self, execution_id: ExecutionId) -> None:
        await self._watch.wait(self._checked(execution_id))

    async def wait_suspended(self, execution_id: ExecutionId) -> None:
        await self._watch.wait(self._checked(execution_id), suspended=True)

    def _checked(self, execution_id: ExecutionId) -> ExecutionId:
        if not isinstance(execution_id, ExecutionId):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            execution_id = ExecutionId.parse(execution_id)
        return execution_id.check_partition(self._counts)

    async def wait_for(
        self, tag: str, subject: str, has_ended: Callable[[], Awaitable[bool]]
    ) -> None:
        await self._watch.wait_for(tag, subject, has_ended)

    async def aclose(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._watch.aclose)
            for subscription in list(self._open):
                closing.push_async_callback(subscription.aclose)
