"""Following events and output as they arrive, even through outages of the server."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Generic, Literal, Self, TypeVar, cast

from flowfabric.core.backoff import Backoff
from flowfabric.core.closing import AsyncClosing, Closing
from flowfabric.core.contracts.streams import StreamedFrame, Visibility
from flowfabric.core.errors import CorruptionError, EngineError, TransportError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import Start, Subscription
from flowfabric.engine.api.streams import StreamFollower
from flowfabric.sdk.blocking import Caller, SyncTwin, blocking, iterate
from flowfabric.sdk.loop_thread import PortalClosed

log = logging.getLogger(__name__)

_PAUSES_S = (0.05, 2.0)
_TAIL_PAUSE_S = 0.2
T = TypeVar("T")


class EventFeed(AsyncClosing, Generic[T]):
    """Iterates over events; after an outage it continues where it was.

    Keep `cursor` and pass it to a later subscription to continue there. An event can arrive twice
    after an outage; its `event_id` is then the same.
    """

    def __init__(self, subscribe: Callable[[Start], Awaitable[Subscription[T]]]) -> None:
        self._subscribe = subscribe
        self._subscription: Subscription[T] | None = None
        self._closed = False
        self.cursor = b""
        """The position after every event returned so far."""

    async def begin(self, start: Start) -> Self:
        """Fix the starting position now, not with the first event."""
        self._subscription = await self._subscribe(start)
        self.cursor = self._subscription.cursor
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T | CorruptionError:
        """The next event; waits for it, also through outages of the server."""
        backoff = Backoff(*_PAUSES_S)
        while not self._closed:
            try:
                if self._subscription is None:
                    await self.begin(self.cursor)
                if (subscription := self._subscription) is not None:
                    event = await anext(subscription)
                    self.cursor = subscription.cursor
                    return event
            except EngineError as error:
                if error.retryable:
                    self._subscription = None
                if not error.retryable or self._closed:
                    raise
                log.debug("lost the subscription, subscribing again: %s", error)
            await asyncio.sleep(backoff.jittered_s())
        raise StopAsyncIteration

    async def ack(self, event_id: str) -> None:
        """Record for the group that this event, and those before it in its feed, are processed.

        If the member stops before that, another member gets them again.
        """
        if self._subscription is not None:
            await self._subscription.ack(event_id)

    async def aclose(self) -> None:
        """Stop reading; the iteration ends."""
        self._closed = True
        if self._subscription is not None:
            await self._subscription.aclose()


class SyncEventFeed(SyncTwin[EventFeed[T]], Closing, Iterator[T | CorruptionError], Generic[T]):
    """`EventFeed` without `await`: iterate over it; leaving the `with` block closes it.

    Any thread may close it, which also ends a waiting iteration.
    """

    def __init__(self, feed: Subscription[T], caller: Caller) -> None:
        super().__init__(cast("EventFeed[T]", feed), caller)
        self._closed = False

    @property
    def cursor(self) -> bytes:
        """The position after every event returned so far."""
        return self._target.cursor

    def __next__(self) -> T | CorruptionError:
        """The next event; waits for it, also through outages of the server."""
        try:
            return next(iterate(self._target, self._caller))
        except EngineError:
            if self._closed:
                raise StopIteration from None
            raise

    ack = blocking(EventFeed[Any].ack)

    def close(self) -> None:
        """Stop reading. A second call, or one after the client was closed, does nothing."""
        self._closed = True
        with contextlib.suppress(PortalClosed):
            self._call(EventFeed[T].aclose)


class Tail(AsyncIterator[StreamedFrame]):
    """Iterates over the frames of an execution as they arrive, across retries and reclaims.

    Ends when the execution has ended and its last output was read. Pass `attempt` and `position`
    to a later tail to continue there. `closed_reason` says how the last attempt's output ended.

    >>> async for frame in client.tail(execution_id):  # doctest: +SKIP
    ...     print(frame.payload)
    """

    def __init__(
        self,
        open: Callable[[], Awaitable[tuple[Backend, ExecutionId]]],  # noqa: A002
        attempt: int | Literal["latest"] = "latest",
        *,
        follow_attempts: bool = True,
        after: str = "0-0",
        visibility: Visibility = "all",
    ) -> None:
        if attempt != "latest" and (type(attempt) is not int or attempt < 1):
            raise invalid_input("attempt", "must be 'latest' or a number from 1")
        self._open = open
        self._source: Backend
        self._execution_id: ExecutionId
        self._follow_attempts = follow_attempts
        self._after = after
        self._visibility: Visibility = visibility
        self._follower: StreamFollower | None = None
        self.attempt: int | None = None if attempt == "latest" else attempt
        """The attempt whose output is read now, from 1; None before the first frame."""
        self._exists = False
        self._over = False

    @property
    def position(self) -> str:
        """The position in the output of the attempt."""
        return self._after if self._follower is None else self._follower.position

    @property
    def closed_reason(self) -> str | None:
        """How the output of the attempt ended; None while it is open."""
        return None if self._follower is None else self._follower.closed_reason

    async def __anext__(self) -> StreamedFrame:
        while not self._over:
            follower = self._follower or await self._begin()
            try:
                return await (anext(follower) if self._exists else self._first(follower))
            except StopAsyncIteration:
                self._over = self._over or not (
                    self._follow_attempts and await self._may_start(ahead=1)
                )
                if not self._over:
                    self._follow("0-0", ahead=1)
        raise StopAsyncIteration

    async def _begin(self) -> StreamFollower:
        self._source, self._execution_id = await self._open()
        await self._may_start()
        return self._follow(self._after)

    async def _may_start(self, ahead: int = 0) -> bool:
        """Whether this attempt (or the one `ahead` by that many) exists or may still start."""
        info = await self._source.reads.read_execution_info(self._execution_id)
        if self.attempt is None:
            self.attempt = max(1, info.total_attempt_count)
        self._exists = self.attempt + ahead <= info.total_attempt_count
        return self._exists or info.completed_at is None

    def _follow(self, after: str, ahead: int = 0) -> StreamFollower:
        self.attempt = (self.attempt or 1) + ahead
        self._follower = self._source.streams.follow_stream(
            self._execution_id, self.attempt - 1, after=after, visibility=self._visibility
        )
        return self._follower

    async def _first(self, follower: StreamFollower) -> StreamedFrame:
        """The first frame of an attempt that may never start, because the execution ends."""
        while not self._exists:
            frame = asyncio.ensure_future(anext(follower))
            ended = asyncio.ensure_future(self._ended())
            try:
                await asyncio.wait([frame, ended], return_when=asyncio.FIRST_COMPLETED)
                if frame.done():
                    self._exists = True
                    return frame.result()
                ended.result()
            finally:
                frame.cancel()
                ended.cancel()
                await asyncio.gather(frame, ended, return_exceptions=True)
            if not await self._may_start():
                self._over = True
                raise StopAsyncIteration
        return await anext(follower)

    async def _ended(self) -> None:
        """Wait until the execution has ended, or may have."""
        while True:
            try:
                return await self._source.events.wait_ended(self._execution_id)
            except TransportError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(_TAIL_PAUSE_S)
