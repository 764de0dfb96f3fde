"""Permits and connections of stream reads and tails."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import asynccontextmanager, contextmanager

from flowfabric.core.environment import whole_number
from flowfabric.core.errors import LimitError, TransportError, UnavailableError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.valkey.transport import Connection, Transport

POOL = "stream_ops"
_DEFAULT_CEILING = 64
_SHORTEST_PAUSE_MS = 25
_IDLE_S = 30.0


def ceiling_from_env() -> int:
    new, old = "FF_MAX_CONCURRENT_STREAM_OPS", "FF_MAX_CONCURRENT_TAIL"
    return whole_number(os.environ, new if os.environ.get(new) else old, _DEFAULT_CEILING, 1)


class StreamPool:
    """Limits concurrent stream reads and tails, and shares connections between them.

    Waiting calls share `ceiling` permits. Other calls have a quarter more, so that idle followers
    cannot block readers. Connections that are idle for `idle_s` are closed.
    """

    def __init__(
        self, transport: Transport, ceiling: int | None = None, idle_s: float = _IDLE_S
    ) -> None:
        self._transport = transport
        self.ceiling = ceiling_from_env() if ceiling is None else ceiling
        self.held = 0
        # The idle connections of each node with their start times, longest idle first.
        self._idle: dict[str, dict[Connection, float]] = {}
        self._idle_s = idle_s
        self._looking: asyncio.TimerHandle | None = None
        self._busy: set[Connection] = set()
        # In a cluster, the node of each hash tag.
        self._node_of: dict[str, str] = {}
        self.closed = False
        self.draining = False
        # Busy connections that wait for a new frame.
        self._waiting: set[Connection] = set()
        self._empty = asyncio.Event()
        forget_on_fork(self)

    def forget(self) -> None:
        """Start empty in a forked child, where the connections are closed."""
        leave_behind(self._busy, self._empty, self._looking)
        self._idle, self._busy, self._node_of = {}, set(), {}
        self._looking = None
        self._empty = asyncio.Event()
        self.held = 0

    @contextmanager
    def permit(self, *, waits: bool) -> Generator[None]:
        """Hold one permit for a call; raises an error if none is free."""
        if self.closed:
            raise UnavailableError("unavailable", POOL, op=POOL, shutting_down=True)
        if self.held >= self.ceiling + (0 if waits else self.ceiling // 4):
            free = max(0, self.ceiling - self.held)
            pause = max(_SHORTEST_PAUSE_MS, _SHORTEST_PAUSE_MS * self.ceiling // (free + 1))
            details = (POOL, f"max={self.ceiling}", f"retry_after_ms={pause}")
            raise LimitError("resource_exhausted", *details, op=POOL)
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
            if not self.held:
                self._empty.set()

    @asynccontextmanager
    async def connection(self, tag: str) -> AsyncGenerator[Connection]:
        """A connection for one call, kept for the next one afterwards."""
        conn = self._take(tag) or await self._transport.blocking(tag)
        self._busy.add(conn)
        clean = False
        try:
            yield conn
            clean = True
        finally:
            self._busy.discard(conn)
            # Drop the connection after an interrupted call, whose reply is still to come, and after
            # a redirect, because it leads to the wrong node.
            if clean and conn.is_open and not self.closed:
                self._give_back(tag, conn)
            else:
                self._node_of.pop(tag, None)
                conn.abort("the stream call ended")

    def _take(self, tag: str) -> Connection | None:
        node = self._node_of.get(tag, "") if self._transport.is_cluster else ""
        idle = self._idle.get(node)
        while idle:
            conn, _ = idle.popitem()
            if conn.is_open:
                return conn
        return None

    def _give_back(self, tag: str, conn: Connection) -> None:
        node = conn.peer if self._transport.is_cluster else ""
        if node:
            self._node_of[tag] = node
        self._idle.setdefault(node, {})[conn] = conn.loop.time()
        if self._looking is None:
            self._looking = conn.loop.call_later(self._idle_s, self._shrink, conn.loop)

    def _shrink(self, loop: asyncio.AbstractEventLoop) -> None:
        edge = loop.time() - self._idle_s
        for conns in self._idle.values():
            for conn in [conn for conn, since in conns.items() if since <= edge]:
                del conns[conn]
                conn.close()
        again = any(self._idle.values()) and not self.closed
        self._looking = loop.call_later(self._idle_s, self._shrink, loop) if again else None

    async def await_news(self, conn: Connection, news: Awaitable[None]) -> None:
        """Wait for a new frame on a connection, or until the pool drains."""
        self._waiting.add(conn)
        try:
            await news
        except TransportError:
            if not self.draining:
                raise
        finally:
            self._waiting.discard(conn)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new calls, end waiting ones, and let the others finish; False if some do not."""
        self.closed = self.draining = True
        self._empty.clear()
        for conn in list(self._waiting):
            conn.abort("the process stops")
        if self.held and grace_s > 0:
            try:
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
            except TimeoutError:
                return False
        return not self.held

    async def aclose(self) -> None:
        """Refuse new calls and close every connection; calls under way fail."""
        self.closed = True
        if self._looking is not None:
            self._looking.cancel()
        for conn in self._busy:
            conn.abort("the client is closed")
        idle, self._idle = self._idle, {}
        for conn in (conn for conns in idle.values() for conn in conns):
            await conn.aclose()
