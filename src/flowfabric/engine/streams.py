"""Attempt output: appending, reading, following, summaries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    BestEffort,
    Frame,
    FrameMode,
    StreamedFrame,
    StreamFrames,
    SummaryDocument,
    Visibility,
)
from flowfabric.core.cursors import MAX_TAIL_BLOCK_MS, START, StreamCursor, check_count
from flowfabric.core.errors import (
    EngineError,
    TransportError,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.core.merge_patch import merge, parse_patch
from flowfabric.engine.calls import Calls, text
from flowfabric.engine.frames import (
    MAX_FRAME_BYTES,
    Page,
    append_args,
    append_outcome,
    check_frames,
    decode_frame,
    knobs,
)
from flowfabric.engine.stream_pool import StreamPool

__all__ = ["Streams"]

log = logging.getLogger(__name__)

SUMMARY_MAX_BYTES = 262_144
_TAIL_GRACE_S = 0.5
_MERGE_TRIES = 8
_READ_CHUNK = 1000
_pack = msgspec.msgpack.Encoder().encode


class Streams(Calls):
    """The output of attempts."""

    stream_pool: StreamPool

    # --- writing --------------------------------------------------------------------

    async def append_frame(
        self,
        handle: Handle,
        frame: Frame,
        *,
        mode: FrameMode = "durable",
        best_effort: BestEffort | None = None,
        retention_maxlen: int | None = None,
        max_payload_bytes: int = MAX_FRAME_BYTES,
        seq: int | None = None,
    ) -> AppendOutcome:
        """Add one frame to the stream of the attempt the caller owns."""
        return await self.append_frames(
            handle,
            [frame],
            mode=mode,
            best_effort=best_effort,
            retention_maxlen=retention_maxlen,
            max_payload_bytes=max_payload_bytes,
            seq=seq,
        )

    async def append_frames(
        self,
        handle: Handle,
        frames: Sequence[Frame],
        *,
        mode: FrameMode = "durable",
        best_effort: BestEffort | None = None,
        retention_maxlen: int | None = None,
        max_payload_bytes: int = MAX_FRAME_BYTES,
        seq: int | None = None,
    ) -> AppendOutcome:
        """Add frames, all or nothing. `seq` numbers the last one: a repeat is not written again."""
        check_frames(frames, mode, max_payload_bytes)
        if mode == "summary":
            return await self._append_summary(handle, frames, retention_maxlen, seq)
        settings = b"" if mode == "durable" else _pack(knobs(best_effort or BestEffort()))
        args = append_args(handle, frames, mode, retention_maxlen, settings, seq)
        reply = await self._append(handle, args, repeat=seq is not None)
        return append_outcome(reply)

    async def _append(self, handle: Handle, args: Sequence[Any], *, repeat: bool) -> list[Any]:
        return await self.fcall(
            "ff_append", handle.execution_id.tag, args, op="append_frame", replay_safe=repeat
        )

    async def _append_summary(
        self,
        handle: Handle,
        frames: Sequence[Frame],
        retention_maxlen: int | None,
        seq: int | None,
    ) -> AppendOutcome:
        """Merges here, where integers stay exact, and commits against the version it merged on."""
        if len(frames) != 1:
            raise invalid_input("frames", "summary patches are appended one at a time")
        try:
            patch = parse_patch(frames[0].payload)
        except ValidationError:
            # Whoever may not write at all is told that first.
            check = append_args(handle, [], "summary", None, b"", None)
            await self._append(handle, check, repeat=True)
            raise
        stored = await self.read_summary(handle.execution_id, handle.attempt_index)
        version, document = (0, b"{}") if stored is None else (stored.version, stored.document_json)
        for _ in range(_MERGE_TRIES):
            merged = merge(document, patch)
            if len(merged) > SUMMARY_MAX_BYTES:
                raise ValidationError(
                    "retention_limit_exceeded",
                    f"the summary is limited to {SUMMARY_MAX_BYTES} bytes",
                )
            settings = _pack({"version": version + 1, "document": merged.decode()})
            args = append_args(handle, frames, "summary", retention_maxlen, settings, seq)
            try:
                return append_outcome(await self._append(handle, args, repeat=seq is not None))
            except EngineError as error:
                if error.details[:1] != ("summary_conflict",):
                    raise
                version, document = int(error.details[-2]), error.details[-1].encode()
        raise ValidationError("invalid_input", "the summary is written by too many at once")

    # --- reading --------------------------------------------------------------------

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
        execution_id = self.checked(execution_id)
        async with self.stream_pool.permit():
            return await self._range(
                execution_id, attempt_index, first, last.last(), count_limit, visibility
            )

    async def _range(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        first: StreamCursor,
        last: str,
        count: int,
        visibility: Visibility,
    ) -> StreamFrames:
        """Goes on past filtered frames until enough visible ones, or the end, are reached."""
        found: list[StreamedFrame] = []
        position, cursor = first.first(), str(first)
        asked = position
        while True:
            want = count - len(found) if visibility == "all" else max(count, _READ_CHUNK)
            page = await self._page(execution_id, attempt_index, position, last, want)
            for frame in page.frames:
                if len(found) == count:
                    break
                cursor = frame.id
                if visibility == "all" or frame.mode != "best_effort":
                    found.append(frame)
            done = len(page.frames) < want or len(found) == count
            if done:
                return StreamFrames(
                    frames=tuple(found),
                    next_cursor=cursor,
                    closed_at=page.closed_at,
                    closed_reason=page.closed_reason,
                    truncated=page.truncated_after(asked),
                )
            position = f"({page.frames[-1].id}"

    async def _page(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        first: str,
        last: str,
        count: int,
        *,
        follow: bool = False,
    ) -> Page:
        args = (execution_id, attempt_index, first, last, count, "1" if follow else "0")
        reply = await self.fcall("ff_stream_read", execution_id.tag, args, op="read_stream")
        return Page(
            [decode_frame(text(entry), flat) for entry, flat in reply[2]],
            reply[3],
            None if reply[4] is None else text(reply[4]),
            int(reply[5]),
            int(reply[6]),
            None if reply[7] is None else text(reply[7]),
        )

    async def tail_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames behind `after`; waits for some, or for the close, up to `block_ms`."""
        cursor = StreamCursor.parse(after)
        if isinstance(block_ms, bool) or not 0 <= block_ms <= MAX_TAIL_BLOCK_MS:
            raise invalid_input("block_ms", f"must be between 0 and {MAX_TAIL_BLOCK_MS}")
        check_count(count_limit)
        position = cursor.after()
        execution_id = self.checked(execution_id)
        async with self.stream_pool.permit():
            return await self._tail(
                execution_id, attempt_index, position, block_ms, count_limit, visibility
            )

    async def _tail(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        position: str,
        block_ms: int,
        count: int,
        visibility: Visibility,
    ) -> StreamFrames:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + block_ms / 1000
        asked = position
        while True:
            page = await self._page(
                execution_id, attempt_index, f"({position}", "+", count, follow=block_ms > 0
            )
            visible = [f for f in page.frames if visibility == "all" or f.mode != "best_effort"]
            if page.frames:
                position = page.frames[-1].id
            waited = loop.time() >= deadline
            if visible or (page.closed_at is not None and not page.frames) or waited:
                return StreamFrames(
                    frames=tuple(visible),
                    next_cursor=position,
                    closed_at=page.closed_at,
                    closed_reason=page.closed_reason,
                    truncated=page.truncated_after(f"({asked}"),
                )
            if not page.frames:
                await self._await_news(execution_id, attempt_index, position, deadline)

    async def _await_news(
        self, execution_id: ExecutionId, attempt_index: int, position: str, deadline: float
    ) -> None:
        """Blocks until a frame is appended, the stream closes, or the time is over."""
        loop = asyncio.get_running_loop()
        remaining = max(0.001, deadline - loop.time())
        stream = f"ff:stream:{execution_id.tag}:{execution_id}:{attempt_index}"
        async with self.stream_pool.connection(execution_id.tag) as conn:
            await conn.submit(
                (
                    *("XREAD", "COUNT", 1, "BLOCK", max(1, int(remaining * 1000)), "STREAMS"),
                    *(stream, f"{stream}:closed", position, "0-0"),
                ),
                remaining + _TAIL_GRACE_S,
            )

    async def follow_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        visibility: Visibility = "all",
    ) -> AsyncIterator[StreamedFrame]:
        """Every frame from `after` on, live, until the stream is closed."""
        position = after
        while True:
            try:
                page = await self.tail_stream(
                    execution_id,
                    attempt_index,
                    after=position,
                    block_ms=MAX_TAIL_BLOCK_MS,
                    count_limit=_READ_CHUNK,
                    visibility=visibility,
                )
            except TransportError as error:
                if not error.retryable:
                    raise
                log.debug("tail lost, resuming behind %s: %s", position, error)
                await asyncio.sleep(0.1)
                continue
            for frame in page.frames:
                yield frame
            if page.is_closed and not page.frames:
                return
            position = page.next_cursor

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> SummaryDocument | None:
        """The rolling summary document, or None when no patch was ever appended."""
        execution_id = self.checked(execution_id)
        key = f"ff:attempt:{execution_id.tag}:{execution_id}:{attempt_index}:summary"
        raw: Any = await self.transport.call("HGETALL", key, key=key)
        if not raw:
            return None
        fields = cast("dict[bytes, bytes]", raw)
        return SummaryDocument(
            document_json=fields[b"document"],
            version=int(fields[b"version"]),
            patch_kind=fields[b"patch_kind"].decode(),
            last_updated_ms=int(fields[b"last_updated_ms"]),
            first_applied_ms=int(fields[b"first_applied_ms"]),
        )
