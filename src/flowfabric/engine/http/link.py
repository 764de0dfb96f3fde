"""Requests to a FlowFabric server: a pool of connections, typed answers, patience in outages.

A request that cannot be sent is repeated for `PATIENCE_S`, long enough for a server to restart.
After a lost answer, only reads and other `repeatable` requests are repeated; for any other request
the error is ambiguous.
"""

import asyncio
import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, TypedDict, Unpack

import msgspec

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.errors import EngineError, LimitError, ReplyError, TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.core.version import __version__
from flowfabric.engine.http import codec, faults
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.connection import HttpConnection, Sink, dial
from flowfabric.engine.http.faults import Answer
from flowfabric.engine.http.sse import ServerEvents

PATIENCE_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 30.0
"""Longer than the server itself waits for its Valkey."""
CONNECT_TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 64
_IDLE_S: Final = 30.0
"""How long to keep idle connections, which proxies and servers also close."""
_FIRST_PAUSE_S: Final = 0.020
_LAST_PAUSE_S: Final = 0.5
_READS: Final = frozenset({"GET", "HEAD"})


class RequestOptions(TypedDict, total=False):
    """How a request is sent."""

    op: str
    """The operation that errors name."""
    headers: Mapping[str, str] | None
    timeout_s: float
    wait_s: float
    """How long the server may delay the answer."""
    reads: bool
    """Whether it changes nothing, whatever its method."""
    repeatable: bool
    """Whether the server recognises a repeat, so that it is safe after a lost answer."""


class HttpLink(ClosedOnce):
    """The connections to one server, used from one event loop.

    >>> link = HttpLink(server_at("http://127.0.0.1:9090"))  # doctest: +SKIP
    >>> await link.call("GET", "/v1/lanes", answer=dict)  # doctest: +SKIP
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        patient: bool = True,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.address = address
        self.fails_fast = not patient
        """Whether requests fail at once while the server cannot be reached."""
        self._connect_timeout_s = connect_timeout_s
        self._context = address.context()
        self._idle: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()
        self._gate = asyncio.Semaphore(MAX_CONNECTIONS)
        self._host = f"Host: {address.peer}\r\nUser-Agent: flowfabric/{__version__}\r\n"
        if address.token:
            self._host += f"Authorization: Bearer {address.token}\r\n"
        forget_on_fork(self)

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        answer: Any = Any,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Send a request and decode its answer as this type; None for an answer without a body.

        A body that is not bytes is sent as JSON.
        """
        found = await self.send(method, path, body, **options)
        if found.status == HTTPStatus.NO_CONTENT or answer is None:
            return None
        try:
            return codec.decoder(answer).decode(found.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Without the cause, which may quote the answer.
            changes = method not in _READS and not options.get("reads")
            problem = (
                f"cannot decode {len(found.body)} bytes as {getattr(answer, '__name__', answer)}"
            )
            op = options.get("op", "")
            raise ReplyError(path, problem, op=op, ambiguous=changes) from None

    async def send(
        self, method: str, path: str, body: object = None, **options: Unpack[RequestOptions]
    ) -> Answer:
        """The successful answer to a request; raises the typed error of any other one."""
        loop = asyncio.get_running_loop()
        data = self._request(method, path, body, options.get("headers"))
        op, wait_s = options.get("op", ""), options.get("wait_s", 0.0)
        timeout_s = options.get("timeout_s", REQUEST_TIMEOUT_S) + wait_s
        reads = method in _READS or options.get("reads", False)
        safe = reads or options.get("repeatable", False)
        give_up, pause = loop.time() + PATIENCE_S, _FIRST_PAUSE_S
        uncertain = False
        while True:
            try:
                found = await self._once(data, timeout_s, pooled=not wait_s)
                if found.status // 100 == 2:
                    return found
                failed = faults.refused(found, self.address, op)
            except TransportError as error:
                failed = error
            failed.op = failed.op or op
            if isinstance(failed, TransportError):
                # A later clean failure does not undo that an earlier send may have been served.
                uncertain = uncertain or failed.ambiguous
                failed.ambiguous = uncertain and not reads
            if isinstance(failed, LimitError) and failed.retry_after_ms is not None:
                # Nothing was done, and the server says when to retry.
                repeats, pause = True, failed.retry_after_ms / 1000 + _FIRST_PAUSE_S
            else:
                repeats = not self.fails_fast and _may_repeat(failed, safe=safe)
            if not repeats or self.closed or loop.time() + pause >= give_up:
                raise failed
            # Spread the retries of many clients.
            await asyncio.sleep(pause * random.uniform(1.0, 1.5))  # noqa: S311 - not a secret
            pause = min(pause * 2, _LAST_PAUSE_S)

    async def events(self, path: str, *, after: str = "", op: str = "") -> ServerEvents:
        """Open a stream of server-sent events, after the event with this id.

        The caller closes it, and opens another one after `last_id` when it breaks.
        """
        headers = {"Accept": "text/event-stream"}
        if after:
            headers["Last-Event-ID"] = after
        data = self._request("GET", path, None, headers)
        connection = await self._dial()
        found = ServerEvents(connection, after)
        try:
            answer = await self._answer(connection, data, REQUEST_TIMEOUT_S, found.feed)
        except BaseException:
            self._drop(connection)
            raise
        if answer.status == HTTPStatus.OK:
            return found
        self._drop(connection)
        raise faults.refused(answer, self.address, op)

    def forget(self) -> None:
        """In a forked child: leave the parent's sockets and loop alone and start afresh."""
        leave_behind(list(self._open), list(self._idle))
        self._idle, self._open = [], set()
        self._gate = asyncio.Semaphore(MAX_CONNECTIONS)

    async def _close(self) -> None:
        self._idle.clear()
        await asyncio.gather(*(each.aclose() for each in list(self._open)))
        self._open.clear()

    def _request(
        self, method: str, path: str, body: object, headers: Mapping[str, str] | None
    ) -> bytes:
        lines = f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._host}"
        if headers:
            lines += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        if body is None:
            # Send a length even for a POST without a body, because some proxies require it.
            length = "" if method in _READS else "Content-Length: 0\r\n"
            return f"{lines}{length}\r\n".encode("latin-1")
        content = body if isinstance(body, bytes) else codec.encode(body)
        lines += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        return lines.encode("latin-1") + content

    async def _once(self, data: bytes, timeout_s: float, *, pooled: bool) -> Answer:
        """Send a request once. One that waits does not count against the connections of others."""
        if not pooled:
            return await self._exchange(data, timeout_s)
        async with self._gate:
            return await self._exchange(data, timeout_s)

    async def _exchange(self, data: bytes, timeout_s: float) -> Answer:
        connection = self._take() or await self._dial()
        try:
            found = await self._answer(connection, data, timeout_s)
        except BaseException:
            # Also for a cancelled caller, whose answer the next request must not receive.
            self._drop(connection)
            raise
        if connection.is_idle and not self.closed:
            self._idle.append(connection)
        else:
            self._drop(connection)
        return found

    async def _answer(
        self, connection: HttpConnection, data: bytes, timeout_s: float, sink: Sink | None = None
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await connection.request(data, sink)
        except TimeoutError:
            raise faults.timed_out(self.address.peer, sent=True) from None

    def _take(self) -> HttpConnection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            # Use the most recently used one, so that the others become idle and are closed.
            connection = self._idle.pop()
            if connection.is_idle and now - connection.used_at < _IDLE_S:
                return connection
            self._drop(connection)
        return None

    async def _dial(self) -> HttpConnection:
        if self.closed:
            raise faults.lost(self.address.peer, "the client is closed", sent=False)
        connection = await dial(self.address, self._context, self._connect_timeout_s)
        self._open.add(connection)
        connection.on_lost = self._open.discard
        return connection

    def _drop(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        connection.close()


def _may_repeat(error: EngineError, *, safe: bool) -> bool:
    if isinstance(error, TransportError):
        return error.passing and (safe or not error.ambiguous)
    # A server that shuts down says so; another replica can serve the request.
    # The first request with this key is still running; retry to get its answer.
    return error.code == "idempotency_in_progress" or (
        error.code == "unavailable" and error.retryable
    )
