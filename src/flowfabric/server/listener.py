"""The HTTP listener: uvicorn, with bounds for clients that send slowly or too much."""

import asyncio
import errno
import logging
import resource
import socket
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from flowfabric.core.errors import ConfigError
from flowfabric.core.ids import new_uuid
from flowfabric.core.text import host_port
from flowfabric.server.app import ServerApp
from flowfabric.server.exchange import BODY_TIMEOUT_S
from flowfabric.server.problems import Problem
from flowfabric.server.wire import JSON, encode

HEAD_TIMEOUT_S = 15.0
"""How long a client may take from connecting, or from its first byte, to the end of the headers."""
MAX_HEAD_BYTES = 65_536
MAX_CONNECTIONS = 4096
"""How many connections may be open, unless the limit of open files is lower."""
_OTHER_FILES = 512
_PART_BYTES = 4096
"""How much to parse at once; a parsed pipelined request takes a hundred times its bytes."""
KEEP_ALIVE_S = 75
"""How long a connection may be idle between two requests."""
_BACKLOG = 2048
# Drop a peer that has vanished or does not read after a minute (on Linux; elsewhere the system's
# defaults apply). Accepted connections inherit these options.
_PEER_CHECKS = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}
_FULL = Problem(
    "unavailable",
    "connections",
    error="this server has no free connection; retry with backoff",
    retryable=True,
)
_MALFORMED = Problem("invalid_input", "request: is not HTTP/1.1")
_HEAD_TOO_LONG = Problem(
    "invalid_input",
    f"request: the request line and headers, and the trailers, may have at most {MAX_HEAD_BYTES} "
    "bytes",
    status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
)


class Connections:
    """The open connections of a listener, and the idle ones among them, oldest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0
        self.idle: dict[BoundedProtocol, None] = {}

    def enter(self, connection: "BoundedProtocol") -> bool:
        """Add a connection, closing the one that is idle longest if full; False without room."""
        if self.open >= self.most:
            if not self.idle:
                return False
            next(iter(self.idle)).drop()
        self.open += 1
        self.idle[connection] = None
        return True

    def leave(self, connection: "BoundedProtocol") -> None:
        """Remove a connection that was added."""
        self.open -= 1
        self.idle.pop(connection, None)


def connections_allowed() -> int:
    """The limit of open connections in this process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, files - _OTHER_FILES))


class HeldReading(FlowControl):
    """Uvicorn's flow control, which reads nothing while it is held.

    Uvicorn alone would resume reading whenever a request awaits its body or a disconnect.
    """

    _is_held = False

    def hold(self, is_held: bool) -> None:  # noqa: FBT001
        """Stop reading, or let uvicorn decide again."""
        was_held, self._is_held = self._is_held, is_held
        if is_held:
            self.pause_reading()
        elif was_held:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Closes it if the head of a request is too slow or too long."""

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self._entered = False
        self._head_bytes = 0
        """Bytes of a head or of trailers received since the last part of a body."""
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._under_way: RequestResponseCycle | None = None
        """The request being served; `cycle` is the last one received."""
        self._unread = b""
        """Data after pipelined requests; it is parsed once these have been served."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._socket = transport
        self.flow = self._reading = HeldReading(transport)
        self._entered = self._all.enter(self)
        if not self._entered:
            self._refuse(_FULL)
            return
        self._set_deadline(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        if self._entered:
            self._entered = False
            self._all.leave(self)
        super().connection_lost(exc)
        self.pipeline.clear()
        self._unread = b""
        if self._under_way is not None and not self._under_way.response_complete:
            # Uvicorn itself only notifies the last request received.
            self._under_way.disconnected = True
            self._under_way.message_event.set()

    def drop(self) -> None:
        """Make room for another connection."""
        self._entered = False
        self._all.leave(self)
        self.abort()

    def abort(self) -> None:
        """Close at once, even if there is more to send."""
        self._socket.abort()

    def data_received(self, data: bytes) -> None:
        if not self._entered:
            return
        if self._in_head and self._deadline is None and not self.pipeline:
            self._set_deadline(HEAD_TIMEOUT_S)
        # Check before counting this part, whose end may already belong to the body.
        if self._head_bytes > MAX_HEAD_BYTES:
            self._end_deadline()
            self._refuse(_HEAD_TOO_LONG)
            return
        self._unset_keepalive_if_required()
        self._parse(self._unread + data if self._unread else data)

    def _parse(self, data: bytes) -> None:
        """Parse what was received, but leave data after pipelined requests for later."""
        rest = memoryview(data)
        while rest and not self.pipeline and not self._socket.is_closing():
            part, rest = rest[:_PART_BYTES], rest[_PART_BYTES:]
            self._head_bytes += len(part)
            try:
                self._feed(part)
            except httptools.HttpParserError:
                self._refuse_malformed()
                return
        if not self._socket.is_closing():
            self._unread = bytes(rest)
            self._reading.hold(bool(rest))

    @property
    def _parser(self) -> httptools.HttpRequestParser:
        assert self.parser is not None, "the connection is lost"
        return self.parser

    def _feed(self, data: memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as asked:
                if self._parser.get_method() == b"CONNECT":
                    self._refuse_malformed()
                    return
                # Ignore the upgrade: the parser drops the body of such a request, and Java's client
                # asks for HTTP/2 with each one.
                self._parser.feed_data(self._head_without_upgrade())
                data = data[asked.args[0] :]
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        # One part may be larger than the limit; usually most of it is the body.
        if self._head_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
            self._entered = False
            self._all.leave(self)
            self._end_deadline()
            self._refuse(_HEAD_TOO_LONG)
            raise ValueError("the request line and headers are too long")
        self._in_head = False
        self._head_bytes = 0
        self._end_deadline()
        self._unset_keepalive_if_required()
        self._all.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0
        self._end_deadline()
        if self.cycle.response_complete:
            # The body was refused. Its data ended uvicorn's wait for the next request.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._under_way = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread and not self.pipeline:
            self._parse(self._unread)
        # Of pipelined requests, the next one has begun.
        if self._entered and self.cycle.response_complete:
            self._all.idle[self] = None
            if not self._in_head:
                # Read and drop the rest of a refused body, so that the client can read the answer.
                self._set_deadline(BODY_TIMEOUT_S)

    def _head_size(self) -> int:
        lines = sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        return len(self.url) + lines

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self._socket.is_closing():
            self._socket.close()

    def _refuse_malformed(self) -> None:
        if not self._socket.is_closing():
            self._refuse(_MALFORMED)

    def _refuse(self, problem: Problem) -> None:
        """Answer a malformed request and close the connection."""
        # In the middle of an answer, the client would read this as the rest of it. After the answer
        # to a request whose body is still arriving, it expects no other one.
        begun = self.cycle and self.cycle.response_started
        if not begun or (self._in_head and self.cycle.response_complete):
            self._socket.write(_closing_answer(problem))
        self._socket.close()


def _closing_answer(problem: Problem) -> bytes:
    request_id = new_uuid()
    body = encode(problem.body(request_id))
    headers = {
        "content-type": JSON,
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
        **problem.headers,
    }
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Listener(uvicorn.Server):
    """Serves an application on one socket until `stop`."""

    def __init__(self, app: ServerApp, bound: socket.socket) -> None:
        self.connections = Connections(connections_allowed())
        config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType] - its messages are plain mappings
            http=partial(BoundedProtocol, self.connections),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._socket = bound
        self._serving: asyncio.Task[None] | None = None
        # Uvicorn's lines about starting and stopping would repeat ours.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    async def start(self) -> None:
        """Start serving requests."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[self._socket])
        self._serving = asyncio.create_task(self._serve_until_stopped(), name="ff-http")

    async def _serve_until_stopped(self) -> None:
        await self.main_loop()
        await self.shutdown(sockets=[self._socket])

    async def stop(self, timeout_s: float) -> bool:
        """Stop accepting connections and let current requests finish; cancels those that do not.

        Returns whether all of them finished in time.
        """
        if self._serving is None:
            return True
        self.should_exit = True
        _, late = await asyncio.wait([self._serving], timeout=timeout_s)
        if late:
            self.force_exit = True
            # Close connections first, so that a cancelled request sends no answer.
            for connection in [*cast("set[BoundedProtocol]", self.server_state.connections)]:
                connection.abort()
            requests = list(self.server_state.tasks)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, self._serving, return_exceptions=True)
        return not late


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a `ConfigError` that says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it, some answers take 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PEER_CHECKS.items():
            if (option := getattr(socket, name, None)) is not None:
                bound.setsockopt(socket.IPPROTO_TCP, option, value)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "another process uses this port; choose another one with --listen"
        problem = f"cannot listen on {host_port(host, port)}: {reason}"
        raise ConfigError("server", problem) from error
    bound.setblocking(False)  # noqa: FBT003
    return bound
