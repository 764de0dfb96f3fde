"""Shared subscriptions that follow the event feeds for viewers (10 §11.3)."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.events import Event, Start, Subscription
from flowfabric.engine.events.cursor import cursor_text
from flowfabric.server.problems import Problem

log = logging.getLogger(__name__)
_QUEUE = 1024
_AGAIN_S = 0.25
_LOOK_S = 0.5
_IDLE_S = 3600.0
Opens = Callable[[Start], Awaitable[Subscription[Event]]]
Found = asyncio.Queue[Event | EngineError]


class Changes:
    """Reads ahead in a subscription, and resubscribes after a lost connection."""

    def __init__(self, opens: Opens) -> None:
        self._opens = opens
        self._found: asyncio.Queue[Event | EngineError] = asyncio.Queue(_QUEUE)
        self._subscription: Subscription[Event] | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._getting: asyncio.Task[Event | EngineError] | None = None
        self._first: Event | None = None
        self.position = ""

    async def start(self, cursor: str) -> None:
        """Subscribe. A malformed or expired cursor is refused before anything is sent."""
        if cursor in ("now", "start") or cursor.isdigit():
            raise Problem("invalid_cursor", "cursor: must be that of an event of this subscription")
        self._subscription = await self._opens(cursor or "now")
        self.position = cursor_text(self._subscription.cursor)
        self._pumping = asyncio.create_task(self._pump(self._subscription), name="ff-sse")
        if cursor:
            given = self.position
            # The first read shows within one round trip whether entries after the cursor are gone.
            first = await self.next(_LOOK_S)
            if isinstance(first, EngineError):
                raise first
            # What is sent before this event must not carry its position.
            self._first, self.position = first, given

    async def _pump(self, subscription: Subscription[Event]) -> None:
        while True:
            try:
                async for event in subscription:
                    if isinstance(event, CorruptionError):
                        extra = {"action": "event_unreadable"}
                        log.warning("cannot read an entry of the feed: %s", event, extra=extra)
                    else:
                        await self._found.put(event)
            except EngineError as error:
                if error.code != "stream_disconnected":
                    await self._found.put(error)
                    return
                await asyncio.sleep(_AGAIN_S)
                subscription = await self._again(error.details[0])

    async def _again(self, cursor: str) -> Subscription[Event]:
        while True:
            try:
                self._subscription = await self._opens(cursor)
            except EngineError as error:
                log.debug("the feed is still unavailable, trying again: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                return self._subscription

    async def next(
        self, timeout_s: float, *others: asyncio.Future[Any]
    ) -> Event | EngineError | None:
        """The next event; None after the timeout, or when one of the others is done."""
        if (held := self._first) is not None:
            self._first = None
            self.position = cursor_text(held.cursor)
            return held
        if self._getting is None:
            self._getting = asyncio.create_task(self._found.get())
        await asyncio.wait(
            {self._getting, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not self._getting.done():
            return None
        found, self._getting = self._getting.result(), None
        if isinstance(found, Event):
            self.position = cursor_text(found.cursor)
        return found

    async def aclose(self) -> None:
        """Stop reading."""
        tasks: list[asyncio.Task[Any]] = []
        tasks += [task for task in (self._pumping, self._getting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.aclose()


class _SharedChanges:
    def __init__(self, opens: Opens) -> None:
        self._changes = Changes(opens)
        self.viewers: set[Found] = set()
        self.started = asyncio.ensure_future(self._changes.start(""))
        self.passing = asyncio.create_task(self._pass_on(), name="ff-sse-shared")

    async def _pass_on(self) -> None:
        await asyncio.shield(self.started)
        while True:
            found = await self._changes.next(_IDLE_S)
            if found is not None:
                for each in self.viewers:
                    each.put_nowait(found)
            if isinstance(found, EngineError):
                return

    async def aclose(self) -> None:
        self.started.cancel()
        self.passing.cancel()
        await asyncio.gather(self.started, self.passing, return_exceptions=True)
        await self._changes.aclose()


class ChangeHub:
    """Viewers of one thing share one subscription to its changes, from the time they join."""

    def __init__(self) -> None:
        self._shared: dict[str, _SharedChanges] = {}

    @asynccontextmanager
    async def follow(self, key: str, opens: Opens) -> AsyncGenerator[Found]:
        """The changes under a key from now on; an error is the last of them."""
        shared = self._shared.get(key)
        if shared is None or shared.passing.done():
            shared = self._shared[key] = _SharedChanges(opens)
        found: Found = asyncio.Queue()
        shared.viewers.add(found)
        try:
            await asyncio.shield(shared.started)
            yield found
        finally:
            shared.viewers.discard(found)
            if not shared.viewers:
                if self._shared.get(key) is shared:
                    del self._shared[key]
                await shared.aclose()
