"""Server-sent events: what follows the feeds and streams, and how it is written (10 §11.3)."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.events import Event, Start, Subscription
from flowfabric.engine.events.cursor import cursor_text
from flowfabric.server.calls import Call
from flowfabric.server.exchange import EventStream
from flowfabric.server.problems import Problem, problem_of
from flowfabric.server.wire import encode

log = logging.getLogger(__name__)
HEARTBEAT_S = 15.0
TICK_S = 1.0
"""How often what the feed does not carry is read: progress, and moves inside `runnable`."""
_HEARTBEAT = b": heartbeat\n\n"
_QUEUE = 1024
_AGAIN_S = 0.25
_LOOK_S = 0.5
_DRAIN_S = 0.3
Opens = Callable[[Start], Awaitable[Subscription[Event]]]


def sent(name: str, data: Any, position: str) -> bytes:
    """One event as it is sent."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), position.encode(), encode(data))


def given_position(call: Call[Any, Any], cursor: str) -> str:
    """Where the client wants to continue; empty: it is new."""
    return call.request.header(b"last-event-id") or cursor


class Changes:
    """Reads a subscription ahead, and subscribes again after a lost connection."""

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
            raise Problem("invalid_cursor", "is not a cursor of this subscription")
        self._subscription = await self._opens(cursor or "now")
        self.position = cursor_text(self._subscription.cursor)
        self._pumping = asyncio.create_task(self._pump(self._subscription), name="ff-sse")
        if cursor:
            # Reading shows within one round trip whether entries after the cursor are gone.
            first = await self.next(_LOOK_S)
            if isinstance(first, EngineError):
                await self.aclose()
                raise first
            self._first = first

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


class Viewer:
    """One client of an event stream: its end, and the heartbeats between events."""

    def __init__(self, call: Call[Any, Any]) -> None:
        self.call = call
        self._gone: asyncio.Future[Any] = asyncio.ensure_future(call.request.disconnected())
        self._stopping: asyncio.Future[Any] = asyncio.ensure_future(call.services.stopping.wait())
        self._beat_at = time.monotonic() + HEARTBEAT_S

    @property
    def ends(self) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
        """What ends the stream early."""
        return self._gone, self._stopping

    @property
    def is_over(self) -> bool:
        """Whether the client left, or the process stops; the stream is resumed elsewhere."""
        return self._gone.done() or self._stopping.done()

    def heartbeat(self) -> bytes:
        """A comment line if it is time for one, otherwise nothing."""
        now = time.monotonic()
        if now < self._beat_at:
            return b""
        self._beat_at = now + HEARTBEAT_S
        return _HEARTBEAT

    async def aclose(self) -> None:
        """Stop watching the client."""
        for each in self.ends:
            each.cancel()
        await asyncio.gather(*self.ends, return_exceptions=True)


def stream(call: Call[Any, Any], events: Callable[[Viewer], AsyncGenerator[bytes]]) -> EventStream:
    """An answer of events that frees its permit when it ends. The caller has taken one."""

    async def run() -> AsyncGenerator[bytes]:
        viewer = Viewer(call)
        try:
            async with aclosing(events(viewer)) as found:
                async for event in found:
                    if viewer.is_over:
                        return
                    if event:
                        yield event
        except EngineError as error:
            # The headers are sent: the client sees a stream without an end, and resumes.
            extra = {"action": "event_stream_ended"}
            log.warning("an event stream ended: %s", problem_of(error).error, extra=extra)
        finally:
            await viewer.aclose()

    return EventStream(run(), call.services.event_streams.__exit__)


async def drained(changes: Changes) -> AsyncIterator[Event]:
    """What the feed holds after the client's position, for something that has ended."""
    while (event := await changes.next(_DRAIN_S)) is not None and isinstance(event, Event):
        yield event
