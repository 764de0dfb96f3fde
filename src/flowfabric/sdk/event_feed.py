"""Subscriptions that continue after outages, for async code and for ordinary code."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Self, TypeVar, cast

from flowfabric.core.closing import AsyncClosing, Closing
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.events import Start, Subscription
from flowfabric.sdk.blocking import Caller, SyncTwin, blocking, iterate
from flowfabric.sdk.loop_thread import PortalClosed

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0
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
        """Take the starting position now, not with the first event."""
        self._subscription = await self._subscribe(start)
        self.cursor = self._subscription.cursor
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T | CorruptionError:
        """The next event; waits for it, also through outages of the server."""
        pause = _FIRST_PAUSE_S
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
                log.debug("subscribing again after: %s", error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LAST_PAUSE_S)
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


class SyncEventFeed(SyncTwin[EventFeed[T]], Closing, Generic[T]):
    """`EventFeed` without `await`: iterate over it, keep its `cursor`, leave the block to close it.

    Any thread may close it; an iteration that waits then ends.
    """

    def __init__(self, feed: Subscription[T], caller: Caller) -> None:
        super().__init__(cast("EventFeed[T]", feed), caller)
        self._closed = False

    @property
    def cursor(self) -> bytes:
        """The position after every event returned so far."""
        return self._target.cursor

    def __iter__(self) -> Self:
        return self

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
