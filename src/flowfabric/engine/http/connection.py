"""One HTTP/1.1 connection: one request at a time, answered in full or with a stream of events."""

import asyncio
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, cast

import httptools

from flowfabric.engine.http import faults
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.faults import Answer

MAX_ANSWER_BYTES: Final = 64 << 20
"""The limit for an answer, far above any that a server sends."""
Sink = Callable[[bytes | None], None]
"""Receives the data of a streamed answer; None when it has ended."""


class HttpConnection(asyncio.Protocol):
    """Sends one request at a time. A caller that gives up must close the connection."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.used_at = 0.0
        """When the last answer was complete, on the loop's clock."""
        self.on_lost: Callable[[HttpConnection], object] = lambda _: None
        self.broke = False
        """Whether the connection was lost in the middle of an answer."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._sink: Sink | None = None
        self._streams = False
        self._reusable = True
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_idle(self) -> bool:
        """Whether it can take a request."""
        return self._reusable and self._answer is None and not self._gone.done()

    def request(self, data: bytes, sink: Sink | None = None) -> asyncio.Future[Answer]:
        """Send a request; the future is done when the answer is complete.

        With a sink, a successful answer is done with its head, and its body goes to the sink.
        """
        assert self._transport is not None
        assert self.is_idle
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._transport.write(data)
        return answer

    def pause(self, *, reading: bool) -> None:
        """Stop or resume reading from the server."""
        if self._transport is not None and not self._gone.done():
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    def close(self) -> None:
        """Close without waiting for an answer."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Close, and return when the socket is closed. A cancelled caller only stops waiting."""
        self.close()
        await asyncio.wait([self._gone])

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None and not self._streams:
            # No request is pending: a server may announce that it closes an idle connection.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is not HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self._reusable = False
        self.broke = self._streams or self._answer is not None
        self.on_lost(self)
        reason = f"the connection was lost ({exc})" if exc else "the server closed the connection"
        self._end(faults.lost(self.peer, reason, sent=True))
        if not self._gone.done():
            self._gone.set_result(None)

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        self._headers, self._parts, self._size = {}, [], 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._sink is not None and status == HTTPStatus.OK:
            self._streams = True
            self._settle(Answer(status, self._headers))

    def on_body(self, body: bytes) -> None:
        if self._streams and self._sink is not None:
            self._sink(body)
            return
        self._size += len(body)
        if self._size > MAX_ANSWER_BYTES:
            self._fail(f"the response is longer than {MAX_ANSWER_BYTES} bytes")
            return
        self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < HTTPStatus.OK:
            # `100 Continue` and the like announce the answer.
            return
        self._reusable = self._reusable and self._parser.should_keep_alive()
        self.used_at = asyncio.get_running_loop().time()
        if self._streams:
            self._end(None)
        else:
            self._settle(Answer(status, self._headers, b"".join(self._parts)))

    def _settle(self, answer: Answer) -> None:
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, reason: str) -> None:
        fault = faults.ServerFault("protocol", f"{self.peer}: {reason}", ambiguous=True)
        self._end(fault)
        self.close()

    def _end(self, error: faults.ServerFault | None) -> None:
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done() and error is not None:
            waiting.set_exception(error)
        if self._streams and self._sink is not None:
            self._streams = False
            self._sink(None)


async def dial(
    address: ServerAddress, context: ssl.SSLContext | None, timeout_s: float
) -> HttpConnection:
    """A new connection, or the error that says why there is none."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: HttpConnection(address.peer), address.host, address.port, ssl=context
            )
    except OSError as error:
        raise faults.from_connect(error, address) from None
    return connection
