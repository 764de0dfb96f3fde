"""Attempt output: reading, following, summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from flowfabric.core import keys
from flowfabric.core.contracts.streams import StreamFrames, Visibility
from flowfabric.core.cursors import MAX_TAIL_BLOCK_MS, START, StreamCursor, behind, check_count
from flowfabric.core.errors import TimeoutError_, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.appends import Appends
from flowfabric.engine.arguments import one_of, seconds, whole
from flowfabric.engine.calls import decoding, refused
from flowfabric.engine.frames import U32, Page, page_of
from flowfabric.engine.stream_follow import StreamFollower
from flowfabric.engine.stream_pool import StreamPool
from flowfabric.valkey.library import ensure_library
from flowfabric.valkey.transport import Connection

__all__ = ["Streams"]

_TAIL_GRACE_S = 0.5
# How soon a close is noticed that rings no bell: of an execution that does not exist yet.
_UNNOTICED_S = 0.1
_VISIBILITIES = ("all", "exclude_best_effort")

T = TypeVar("T")


class Streams(Appends):
    """The output of attempts."""

    stream_pool: StreamPool

    async def read_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        from_: str = "start",
        to: str = "end",
        count_limit: int = 100,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames of a closed range, both ends included, and whether the stream is closed."""
        first, last = StreamCursor.parse(from_), StreamCursor.parse(to)
        check_count(count_limit)
        reader = self._reader(execution_id, attempt_index, visibility)

        async def read(conn: Connection) -> StreamFrames:
            found = await reader.collect(conn, first.first(), last.last(), count_limit)
            return found.shown(first.text, first.first())

        with self.stream_pool.permit(waits=False):
            return await self._connected(reader, read)

    async def tail_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames behind `after`; waits for some, or for the close, up to `block_ms`."""
        cursor = StreamCursor.parse(after)
        whole(block_ms, "block_ms", 0, MAX_TAIL_BLOCK_MS)
        check_count(count_limit)
        position = asked = cursor.after()
        reader = self._reader(execution_id, attempt_index, visibility)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + block_ms / 1000

        async def wait(conn: Connection) -> StreamFrames:
            nonlocal position
            while True:
                found = await reader.collect(
                    conn, behind(position), "+", count_limit, follow=block_ms > 0
                )
                position = found.examined or position
                left = deadline - loop.time()
                ended = found.page.closed_at is not None or self.stream_pool.draining
                if found.frames or ended or left <= 0:
                    return found.shown(position, asked)
                pause = left if found.page.followed else min(left, _UNNOTICED_S)
                news = reader.await_news(conn, position, pause)
                await self.stream_pool.await_news(conn, news)
                if self.stream_pool.draining:
                    return found.shown(position, asked)

        with self.stream_pool.permit(waits=block_ms > 0):
            return await self._connected(reader, wait)

    def follow_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        visibility: Visibility = "all",
    ) -> StreamFollower:
        """Every frame from `after` on, live, until the stream is closed.

        >>> async for frame in backend.follow_stream(execution_id, 0):  # doctest: +SKIP
        ...     print(frame.payload)
        """
        return StreamFollower(self, execution_id, attempt_index, after, visibility)

    async def shutdown_prepare(self, grace_s: float) -> None:
        """Refuse new stream calls, end waiting tails, and let reads finish within the grace."""
        grace_s = seconds(grace_s, "grace_s")
        loop = asyncio.get_running_loop()
        started = loop.time()
        if not await self.stream_pool.drain(grace_s):
            elapsed = round((loop.time() - started) * 1000)
            raise TimeoutError_(
                "timeout", "shutdown_prepare", f"elapsed_ms={elapsed}", op="shutdown_prepare"
            )

    def _reader(self, execution_id: ExecutionId, index: int, visibility: Visibility) -> _Reader:
        whole(index, "attempt_index", 0, U32)
        one_of(visibility, "visibility", _VISIBILITIES)
        return _Reader(self, self.checked(execution_id), index, visibility)

    async def _connected(self, reader: _Reader, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Read on a pooled connection, once more after an outage; a read is never ambiguous."""
        for again in (True, False):
            try:
                async with self.stream_pool.connection(reader.tag) as conn:
                    return await work(conn)
            except TransportError as error:
                error.ambiguous = False
                waitable = error.passing and error.kind != "timeout"
                if not (again and waitable) or self.stream_pool.closed:
                    raise
            # The client's own connection rides the outage out, and learns where the key has moved.
            await self.transport.call("EXISTS", reader.stream, key=reader.tag)
        raise AssertionError("unreachable")

    async def load_library(self) -> None:
        """Load the function library where it is missing."""
        await ensure_library(self.transport)


class _Found:
    """What one or more pages of a range held."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames = page.frames
        self.examined = page.examined

    def add(self, page: Page) -> None:
        self.frames += page.frames
        self.examined = page.examined or self.examined
        self.page = page

    def shown(self, position: str, asked: str) -> StreamFrames:
        return StreamFrames(
            frames=tuple(self.frames),
            next_cursor=self.examined or position,
            closed_at=self.page.closed_at,
            closed_reason=self.page.closed_reason,
            truncated=self.page.truncated_after(asked),
        )


class _Reader:
    """Reads one stream, on a connection that is used for nothing else meanwhile."""

    def __init__(
        self, calls: Streams, execution_id: ExecutionId, index: int, visibility: Visibility
    ) -> None:
        self._calls = calls
        self.tag = execution_id.tag
        self._target = (execution_id, index)
        self._visibility = "" if visibility == "all" else visibility
        self.closed = keys.stream_closed(execution_id.tag, execution_id, index)
        self.stream = keys.stream(execution_id.tag, execution_id, index)

    async def collect(
        self, conn: Connection, first: str, last: str, count: int, *, follow: bool = False
    ) -> _Found:
        """Goes on past filtered frames until enough visible ones, or the end, are reached."""
        found = _Found(await self._page(conn, first, last, count, follow=follow))
        while found.page.more and len(found.frames) < count:
            found.add(
                await self._page(
                    conn,
                    behind(found.examined or first),
                    last,
                    count - len(found.frames),
                    follow=follow,
                )
            )
        return found

    async def _page(
        self, conn: Connection, first: str, last: str, count: int, *, follow: bool
    ) -> Page:
        call = (
            *("FCALL", "ff_stream_read", 1, self.tag, *self._target),
            *(first, last, count, self._visibility, "1" if follow else "0"),
        )
        try:
            reply: Any = await conn.call(*call)
        except TransportError as error:
            error.op = "read_stream"
            if error.kind != "script_not_loaded":
                raise
            await self._calls.load_library()
            reply = await conn.call(*call)
        with decoding(reply, "ff_stream_read", "read_stream", self._target[0]):
            if reply[:2] == [1, b"OK"]:
                return page_of(reply, self._target[0])
        raise refused(reply, "read_stream", function="ff_stream_read", execution_id=self._target[0])

    async def await_news(self, conn: Connection, position: str, seconds: float) -> None:
        """Blocks until a frame is appended, the stream closes, or the time is over."""
        await conn.call(
            *("XREAD", "COUNT", 1, "BLOCK", max(1, int(seconds * 1000)), "STREAMS"),
            *(self.stream, self.closed, position, "0-0"),
            timeout=seconds + _TAIL_GRACE_S,
        )
