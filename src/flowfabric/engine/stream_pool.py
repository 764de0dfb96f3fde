"""Permits and connections of stream reads and tails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from flowfabric.core.errors import LimitError, UnavailableError
from flowfabric.engine.calls import Calls
from flowfabric.valkey.transport import Connection

__all__ = ["StreamPool"]


class StreamPool:
    """The permits of stream reads and tails, and the connections blocking tails take turns on."""

    def __init__(self, calls: Calls, ceiling: int = 64) -> None:
        self._calls = calls
        self.ceiling = ceiling
        self.held = 0
        self._idle: list[Connection] = []
        self._closed = False
        self._released = asyncio.Event()

    @asynccontextmanager
    async def permit(self) -> AsyncGenerator[None]:
        """One permit for the whole call; never waits for one."""
        if self._closed:
            raise UnavailableError("unavailable", "stream_ops", op="stream_ops", shutting_down=True)
        if self.held >= self.ceiling:
            retry_after = max(25, 25 * self.ceiling)
            raise LimitError(
                "resource_exhausted",
                "stream_ops",
                f"max {self.ceiling}",
                f"retry_after_ms {retry_after}",
                op="stream_ops",
            )
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
            self._released.set()

    @asynccontextmanager
    async def connection(self, tag: str) -> AsyncGenerator[Connection]:
        """A connection of its own while a tail waits; kept for the next one afterwards."""
        conn = None
        while self._idle and (conn is None or not conn.is_open):
            conn = self._idle.pop()
        if conn is None or not conn.is_open:
            conn = await self._calls.transport.blocking(tag)
        clean = False
        try:
            yield conn
            clean = True
        finally:
            # A cancelled tail leaves its reply on the way: such a connection is not used again.
            if clean and conn.is_open and not self._closed and not self._calls.transport.is_cluster:
                self._idle.append(conn)
            else:
                await conn.aclose()

    async def aclose(self, grace_s: float = 0.0) -> bool:
        """Refuse new calls, wait for holders up to the grace; True when none is left."""
        self._closed = True
        try:
            async with asyncio.timeout(grace_s):
                while self.held:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            pass
        idle, self._idle = self._idle, []
        for conn in idle:
            await conn.aclose()
        return self.held == 0
