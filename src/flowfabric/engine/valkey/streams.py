"""Attempt output: appending, reading, following, summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, Unpack

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    Frame,
    StreamFrames,
    SummaryDocument,
    Visibility,
)
from flowfabric.core.cursors import MAX_TAIL_BLOCK_MS, START, StreamCursor, behind, check_count
from flowfabric.core.errors import EngineError, TransportError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.merge_patch import EMPTY, PATCH_KIND, merge, parse_patch
from flowfabric.engine.api import check
from flowfabric.engine.api.frames import U32, Append, AppendOptions
from flowfabric.engine.api.streams import Streams
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, decoding, refused
from flowfabric.engine.valkey.frames import Page, append_args, append_outcome, page_of, summary_of
from flowfabric.engine.valkey.library import ensure_library
from flowfabric.engine.valkey.stream_pool import StreamPool
from flowfabric.valkey.transport import Connection

_TAIL_GRACE_S = 0.5
# Parts of a reply that carries a newer document; every other reply is longer.
_MOVED_PARTS = 5
T = TypeVar("T")
_VISIBILITIES = ("all", "exclude_best_effort")
# How often to look for the end of a stream whose execution does not exist yet: no bell rings.
_UNNOTICED_S = 0.1
_pack = msgspec.msgpack.Encoder().encode
_MERGE_TRIES = 8
_SUMMARIES = 64  # How many summaries a process remembers.


class ValkeyStreams(Streams):
    """`Streams` on Valkey."""

    def __init__(self, calls: FunctionCalls, pool: StreamPool) -> None:
        self._calls = calls
        self._pool = pool
        self._summaries = lru_cache(_SUMMARIES)(_Summary)

    async def append_frames(
        self, handle: Handle, frames: Sequence[Frame], **options: Unpack[AppendOptions]
    ) -> AppendOutcome:
        append = Append(**options)
        frames = check.listed(frames, "frames")
        append.check(frames)
        args = append_args(handle, frames, append)
        if append.mode == "summary":
            return await self._append_patches(handle, frames, args, append)
        return await self._append(handle, args, append_outcome)

    async def _append(
        self, handle: Handle, args: Sequence[Any], decode: Callable[[list[Any]], T]
    ) -> T:
        return await self._calls.ask(
            *("ff_append", handle.execution_id.tag, args, decode),
            op="append_frame",
            replay_safe=args[6] != "",
        )

    async def _append_patches(
        self, handle: Handle, frames: Sequence[Frame], args: list[Any], append: Append
    ) -> AppendOutcome:
        """Merge here, where integers stay exact, and commit against the version merged on."""
        known = self._summaries(handle.attempt)
        async with known.lock:
            for _ in range(_MERGE_TRIES):
                try:
                    merged = _patched(known.document, frames, append)
                except EngineError as error:
                    await self._refuse(handle, known, args, error)
                    continue
                args[5] = _pack({"version": known.version, "document": merged.decode()})
                outcome = await self._append(handle, args, _patch_outcome)
                if isinstance(outcome, AppendOutcome):
                    if not outcome.duplicate and outcome.summary_version is not None:
                        known.version, known.document = outcome.summary_version, merged
                    return outcome
                known.version, known.document = outcome
        raise ValidationError("invalid_input", "too many writers change this summary at once")

    async def _refuse(
        self, handle: Handle, known: _Summary, args: Sequence[Any], error: EngineError
    ) -> None:
        """Raise why the patches cannot be merged, unless the document was not the latest."""
        # Without the right to write, this raises that first.
        await self._append(handle, [*args[:5], "", ""], append_outcome)
        stored = await self.read_summary(handle.execution_id, handle.attempt_index)
        if stored is None or stored.version == known.version:
            raise error
        known.version, known.document = stored.version, stored.document_json

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> SummaryDocument | None:
        execution_id = self._calls.checked(execution_id)
        check.whole(attempt_index, "attempt_index", 0, U32)
        key = keys.summary(execution_id.tag, execution_id, attempt_index)
        context = f"summary of {execution_id}"
        return summary_of(context, await self._calls.read(f"{context}: record", "HGETALL", key))

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
        first, last = StreamCursor.parse(from_), StreamCursor.parse(to)
        check_count(count_limit)
        reader = self._reader(execution_id, attempt_index, visibility)

        async def read(conn: Connection) -> StreamFrames:
            found = await reader.collect(conn, first.first(), last.last(), count_limit)
            return found.result(first.text, first.first())

        with self._pool.permit(waits=False):
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
        cursor = StreamCursor.parse(after)
        check.whole(block_ms, "block_ms", 0, MAX_TAIL_BLOCK_MS)
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
                ended = found.closed_at is not None or self._pool.draining
                if found.frames or ended or left <= 0:
                    return found.result(position, asked)
                pause = left if found.followed else min(left, _UNNOTICED_S)
                news = reader.await_news(conn, position, pause)
                await self._pool.await_news(conn, news)
                if self._pool.draining:
                    return found.result(position, asked)

        with self._pool.permit(waits=block_ms > 0):
            return await self._connected(reader, wait)

    def _reader(
        self, execution_id: ExecutionId, index: int, visibility: Visibility
    ) -> _StreamReader:
        check.whole(index, "attempt_index", 0, U32)
        check.one_of(visibility, "visibility", _VISIBILITIES)
        return _StreamReader(self._calls, self._calls.checked(execution_id), index, visibility)

    async def _connected(
        self, reader: _StreamReader, work: Callable[[Connection], Awaitable[T]]
    ) -> T:
        """Read on a pooled connection, again after an outage; a read is never ambiguous."""
        for again in (True, False):
            try:
                async with self._pool.connection(reader.tag) as conn:
                    return await work(conn)
            except TransportError as error:
                error.ambiguous = False
                waitable = error.passing and error.kind != "timeout"
                if not (again and waitable) or self._pool.closed:
                    raise
            # The client's own connection waits the outage out and learns where the key has moved.
            await self._calls.transport.call("EXISTS", reader.stream, key=reader.tag)
        raise AssertionError("unreachable")


class _Summary:
    """The summary of one attempt as this process last wrote it; the store has the last word."""

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self.version = 0
        self.document = EMPTY
        self.lock = asyncio.Lock()


def _patch_outcome(reply: list[Any]) -> AppendOutcome | tuple[int, bytes]:
    """What was appended, or the newer version and document to merge the patches on."""
    if len(reply) > _MOVED_PARTS:
        return append_outcome(reply)
    return int(reply[3]), bytes(reply[4])


def _patched(document: bytes, frames: Sequence[Frame], append: Append) -> bytes:
    if append.patch_kind != PATCH_KIND:
        raise invalid_input("patch_kind", f"unsupported patch_kind {append.patch_kind!r}")
    merged = merge(document, *(parse_patch(frame.payload) for frame in frames))
    if len(merged) > append.summary_max_bytes:
        raise ValidationError(
            "retention_limit_exceeded",
            f"the summary is {len(merged)} bytes long; the limit is {append.summary_max_bytes}",
        )
    return merged


class _StreamReader:
    """Reads one stream on a connection of its own."""

    def __init__(
        self, calls: FunctionCalls, execution_id: ExecutionId, index: int, visibility: Visibility
    ) -> None:
        self._calls = calls
        self.tag = execution_id.tag
        self._target = (execution_id, index)
        self._visibility = "" if visibility == "all" else visibility
        self.closed = keys.stream_closed(execution_id.tag, execution_id, index)
        self.stream = keys.stream(execution_id.tag, execution_id, index)

    async def collect(
        self, conn: Connection, first: str, last: str, count: int, *, follow: bool = False
    ) -> Page:
        """Read past filtered frames until there are enough visible ones, or no more frames."""
        page = await self._page(conn, first, last, count, follow=follow)
        while page.more and len(page.frames) < count:
            start, missing = behind(page.examined or first), count - len(page.frames)
            page = (await self._page(conn, start, last, missing, follow=follow)).after(page)
        return page

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
            await ensure_library(self._calls.transport)
            reply = await conn.call(*call)
        with decoding(reply, "ff_stream_read", "read_stream", self._target[0]):
            if reply[:2] == [1, b"OK"]:
                return page_of(reply, self._target[0])
        raise refused(reply, "read_stream", function="ff_stream_read", execution_id=self._target[0])

    async def await_news(self, conn: Connection, position: str, seconds: float) -> None:
        """Block until a frame is appended, the stream ends, or the time is over."""
        await conn.call(
            *("XREAD", "COUNT", 1, "BLOCK", max(1, int(seconds * 1000)), "STREAMS"),
            *(self.stream, self.closed, position, "0-0"),
            timeout=seconds + _TAIL_GRACE_S,
        )
