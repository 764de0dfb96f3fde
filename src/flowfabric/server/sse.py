"""Server-sent events: how they are written, and when they end (10 §11.3)."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.events import Event
from flowfabric.server.calls import Call
from flowfabric.server.changes import Changes
from flowfabric.server.exchange import EventStream
from flowfabric.server.problems import problem_of
from flowfabric.server.wire import encode

log = logging.getLogger(__name__)
HEARTBEAT_S = 15.0
TICK_S = 1.0
"""How often to read what the feed does not carry: progress, and changes inside `runnable`."""
_HEARTBEAT = b": heartbeat\n\n"
DRAIN_S = 0.3
"""How long to wait for what the feed already holds."""


def sent(name: str, data: Any, position: str) -> bytes:
    """One event in wire format."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), position.encode(), encode(data))


def given_position(call: Call[Any, Any], cursor: str) -> str:
    """Where the client wants to continue; empty for a new client."""
    return call.request.header(b"last-event-id") or cursor


class Viewer:
    """One client of an event stream: its end, and the heartbeats between events."""

    def __init__(self, call: Call[Any, Any]) -> None:
        self.call = call
        self._gone: asyncio.Future[Any] = asyncio.ensure_future(call.request.disconnected())
        self._stopping: asyncio.Future[Any] = asyncio.ensure_future(call.services.stopping.wait())
        now = time.monotonic()
        self._beat_at, self._look_at = now + HEARTBEAT_S, now + TICK_S
        self._revoked = False

    @property
    def ends(self) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
        """What ends the stream early."""
        return self._gone, self._stopping

    @property
    def is_over(self) -> bool:
        """Whether the client left, its token was revoked or changed, or the process stops.

        The stream has no `end` then: the client resumes it, elsewhere or with its new rights.
        """
        return self._gone.done() or self._stopping.done() or self._is_revoked()

    def _is_revoked(self) -> bool:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + TICK_S
            call = self.call
            authorization = call.request.headers.get(b"authorization")
            self._revoked = not call.services.tokens.is_current(call.caller, authorization)
        return self._revoked

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


def stream(
    call: Call[Any, Any],
    events: Callable[[Viewer], AsyncGenerator[bytes]],
    release: Callable[[], Awaitable[None]],
) -> EventStream:
    """An event stream; `release` frees what the caller opened for it."""

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

    return EventStream(run(), release)


async def drained(changes: Changes) -> AsyncIterator[Event]:
    """Events after the client's position, for something that has already ended."""
    while (event := await changes.next(DRAIN_S)) is not None and isinstance(event, Event):
        yield event
