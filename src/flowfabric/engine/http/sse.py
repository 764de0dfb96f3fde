"""Reads server-sent events (10 §11.3)."""

import asyncio
from collections import deque
from typing import Final

import msgspec

from flowfabric.core.closing import AsyncClosing
from flowfabric.engine.http import faults
from flowfabric.engine.http.connection import HttpConnection

SILENCE_S: Final = 45.0
"""After this long without data the stream is lost; the server sends a heartbeat every 15 s."""
_FULL: Final = 1000


class ServerEvent(msgspec.Struct, frozen=True):
    """One event: its name, its position, its JSON."""

    name: str
    id: str
    data: bytes


class ServerEvents(AsyncClosing):
    """The events of one connection; iterating ends when the server ends the stream.

    A connection that breaks raises `TransportError`; `last_id` is where to continue.
    """

    def __init__(self, connection: HttpConnection, last_id: str = "") -> None:
        self.last_id = last_id
        self._connection = connection
        self._rest = b""
        self._ready: deque[ServerEvent] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._paused = False

    def feed(self, part: bytes | None) -> None:
        """Take what arrived; None is the end of the connection."""
        self._arrived.set()
        if part is None:
            self._ended = True
            return
        *blocks, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        self._ready.extend(event for block in blocks if (event := _parsed(block)) is not None)
        if len(self._ready) > _FULL and not self._paused:
            self._paused = True
            self._connection.pause(reading=False)

    def __aiter__(self) -> "ServerEvents":
        return self

    async def __anext__(self) -> ServerEvent:
        while not self._ready:
            if self._ended:
                if self._connection.broke:
                    raise faults.lost(
                        self._connection.peer, "the event stream was lost", sent=False
                    )
                raise StopAsyncIteration
            if self._paused:
                self._paused = False
                self._connection.pause(reading=True)
            self._arrived.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._arrived.wait()
            except TimeoutError:
                self._connection.close()
                raise faults.timed_out(self._connection.peer, sent=False) from None
        event = self._ready.popleft()
        if event.id:
            self.last_id = event.id
        return event

    async def aclose(self) -> None:
        """Stop reading."""
        await self._connection.aclose()


def _parsed(block: bytes) -> ServerEvent | None:
    name, position, data = "message", "", list[bytes]()
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode()
        elif field == b"id":
            position = value.decode()
        elif field == b"data":
            data.append(value)
    # Without data it is a comment, such as a heartbeat.
    return ServerEvent(name, position, b"\n".join(data)) if data else None
