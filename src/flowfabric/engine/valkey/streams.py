"""Attempt output: frames as the functions take and return them, appending, reading, following."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, Self, TypeVar, Unpack, get_args

import msgspec

from flowfabric.core.contracts import streams as contracts
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import START, StreamCursor, behind, check_count
from flowfabric.core.errors import EngineError, TransportError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.merge_patch import EMPTY, PATCH_KIND, merge, parse_patch
from flowfabric.core.stored import Stored
from flowfabric.core.text import lossless
from flowfabric.engine.api import check
from flowfabric.engine.api.streams import U32, Append, AppendOptions, Streams
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import (
    FunctionCalls,
    decoding,
    is_accepted,
    proof,
    refused,
    text,
)
from flowfabric.engine.valkey.library import ensure_library
from flowfabric.engine.valkey.stream_pool import StreamPool
from flowfabric.valkey.transport import Connection

_TAIL_GRACE_S = 0.5
# The length of a reply with a newer document; every other reply is longer.
_MOVED_PARTS = 5
T = TypeVar("T")
# How often to check a stream whose execution does not exist yet, because nothing notifies us.
_UNNOTICED_S = 0.1
_pack = msgspec.msgpack.Encoder().encode
_MERGE_TRIES = 8
_SUMMARIES = 64  # How many summaries a process remembers.
_VISIBILITIES = get_args(contracts.Visibility)
_MODES = {mode[:1].encode(): mode for mode in get_args(contracts.FrameMode)}
"""A mode is stored as its first letter."""
_PAGE_PARTS = (
    *("examined", "more", "closed_at", "closed_reason", "trimmed", "oldest", "last_sequence"),
    "followed",
)


class Page(msgspec.Struct):
    """One reply of the range read."""

    frames: list[contracts.StreamedFrame]
    examined: str | None
    more: bool
    closed_at: int | None
    closed_reason: str | None
    trimmed: bool
    oldest: str | None
    newest: str | None
    followed: bool

    def after(self, earlier: Self) -> Self:
        """This page with the frames of the one before it."""
        self.frames[:0] = earlier.frames
        self.examined = self.examined or earlier.examined
        return self

    def result(self, position: str, asked: str) -> contracts.StreamFrames:
        """The result of a read from `asked`; `position` is the cursor if no frame was read."""
        # If nothing is retained, all frames up to the last one written were trimmed.
        oldest = self.oldest or self.newest
        return contracts.StreamFrames(
            frames=tuple(self.frames),
            next_cursor=self.examined or position,
            closed_at=self.closed_at,
            closed_reason=self.closed_reason,
            truncated=self.trimmed and oldest is not None and _order(oldest) > _order(asked),
        )


def _order(entry: str) -> tuple[int, int]:
    if entry in {"-", "+"}:
        return (-1, 0) if entry == "-" else (2**64, 0)
    ms, _, seq = entry.partition("-")
    return int(ms), int(seq)


def append_args(handle: Handle, frames: Sequence[contracts.Frame], append: Append) -> list[Any]:
    """The arguments of one append; the document of a patch is added later."""
    proof(check.handle(handle))
    args: list[Any] = [
        handle.execution_id,
        handle.lease,
        handle.attempt,
        append.mode[:1],
        "" if append.retention_maxlen is None else append.retention_maxlen,
        _pack(append.live()) if append.mode == "best_effort" else b"",
        "" if append.seq is None else append.seq,
    ]
    for frame in frames:
        args += (frame.name, frame.payload, _extra(frame))
    return args


def _extra(frame: contracts.Frame) -> bytes:
    """The options that differ from their defaults; others are not stored."""
    extra: list[Any] = []
    if frame.encoding != "utf8":
        extra += ("e", frame.encoding)
    if frame.source != "worker":
        extra += ("s", frame.source)
    if frame.correlation_id:
        extra += ("c", frame.correlation_id)
    if frame.metadata_json:
        extra += ("md", frame.metadata_json)
    if frame.ts is not None:
        extra += ("ts", str(frame.ts))
    return _pack(extra) if extra else b""


def append_outcome(reply: Sequence[Any]) -> contracts.AppendOutcome:
    """The outcome of an append. Entries of one call have consecutive ids."""
    count, last, version = int(reply[2]), text(reply[3]), text(reply[5])
    ids: tuple[str, ...] = (last,) if count == 1 else ()
    if count > 1:
        ms, _, seq = last.partition("-")
        newest = int(seq)
        ids = tuple(f"{ms}-{number}" for number in range(newest - count + 1, newest + 1))
    return contracts.AppendOutcome(
        stream_ids=ids,
        frame_count=int(reply[4]),
        summary_version=int(version) if version else None,
        duplicate=reply[6] == 1,
    )


def page_of(reply: Sequence[Any], execution_id: str) -> Page:
    entries, *rest = reply[2:]
    page = Stored.from_row(f"stream of {execution_id}", _PAGE_PARTS, rest)
    return Page(
        frames=[_frame(lossless(entry), flat) for entry, flat in entries],
        examined=page.maybe_text("examined"),
        more=rest[1] == 1,
        closed_at=page.maybe_number("closed_at"),
        closed_reason=page.maybe_text("closed_reason"),
        trimmed=rest[4] == 1,
        oldest=page.maybe_text("oldest"),
        newest=page.maybe_text("last_sequence"),
        followed=rest[7] == 1,
    )


def _frame(entry: str, flat: list[bytes]) -> contracts.StreamedFrame:
    """A frame from a stream entry; absent fields have their defaults.

    Decoding is direct: 1.4 µs per frame, and 3.9 µs through `Stored`.
    """
    fields = {flat[i]: flat[i + 1] for i in range(0, len(flat), 2)}
    version, ttl, ts = fields.get(b"v"), fields.get(b"ttl"), fields.get(b"ts")
    try:
        return contracts.StreamedFrame(
            id=entry,
            frame_type=fields[b"t"].decode(),
            payload=fields[b"p"],
            encoding=fields.get(b"e", b"utf8").decode(),
            source=fields.get(b"s", b"worker").decode(),
            mode=_MODES[fields.get(b"m", b"d")],
            ts=int(ts or entry.partition("-")[0]),
            correlation_id=fields.get(b"c", b"").decode(),
            metadata_json=fields.get(b"md", b"").decode(),
            summary_version=int(version) if version else None,
            ttl_ms=int(ttl) if ttl else None,
        )
    except (KeyError, ValueError):
        raise _damage(Stored.from_hash(f"frame {entry}", flat)) from None


def _damage(stored: Stored) -> EngineError:
    stored.text("t")
    for name in ("e", "s", "c", "md"):
        stored.text(name, "")
    for name in ("ts", "v", "ttl"):
        stored.number(name, 0)
    if "p" not in stored.fields:
        return stored.corrupt("p", "is missing")
    return stored.corrupt("m", "is not a mode")


def summary_of(context: str, raw: Any) -> contracts.SummaryDocument | None:
    """A summary from a hash reply, which is a map or a flat list by protocol version."""
    if not raw:
        return None
    stored = Stored.from_hash(context, raw)
    if not stored.is_set("document"):
        raise stored.corrupt("document", "is missing")
    return contracts.SummaryDocument(
        document_json=stored.fields["document"],
        version=stored.number("version"),
        patch_kind=stored.text("patch_kind"),
        last_updated_ms=stored.number("last_updated_ms"),
        first_applied_ms=stored.number("first_applied_ms"),
    )


class _Summary:
    """The summary of one attempt as this process last wrote it; the stored one is authoritative."""

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self.version = 0
        self.document = EMPTY
        self.lock = asyncio.Lock()


def _patch_outcome(reply: list[Any]) -> contracts.AppendOutcome | tuple[int, bytes]:
    """What was appended, or the newer version and document to merge the patches on."""
    if len(reply) > _MOVED_PARTS:
        return append_outcome(reply)
    return int(reply[3]), bytes(reply[4])


def _patched(document: bytes, frames: Sequence[contracts.Frame], append: Append) -> bytes:
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
    """Reads one stream on its own connection."""

    def __init__(
        self, calls: FunctionCalls, execution_id: ExecutionId, index: int, visibility: str
    ) -> None:
        check.whole(index, "attempt_index", 0, U32)
        check.one_of(visibility, "visibility", _VISIBILITIES)
        execution_id = calls.checked(execution_id)
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
            if reply[0] == 1 and is_accepted(reply[1]):
                return page_of(reply, self._target[0])
        raise refused(reply, "ff_stream_read", "read_stream", self._target[0])

    async def await_news(self, conn: Connection, position: str, seconds: float) -> None:
        """Block until a frame is appended, the stream ends, or the time is up."""
        await conn.call(
            *("XREAD", "COUNT", 1, "BLOCK", max(1, int(seconds * 1000)), "STREAMS"),
            *(self.stream, self.closed, position, "0-0"),
            timeout=seconds + _TAIL_GRACE_S,
        )


class ValkeyStreams(Streams):
    def __init__(self, calls: FunctionCalls, pool: StreamPool) -> None:
        self._calls = calls
        self._pool = pool
        self._summaries = lru_cache(_SUMMARIES)(_Summary)

    def viewers(self, ceiling: int) -> "ValkeyStreams":
        return ValkeyStreams(self._calls, StreamPool(self._calls.transport, ceiling))

    async def aclose(self) -> None:
        """End the tails of `viewers`, and close their connections."""
        await self._pool.aclose()

    async def append_frames(
        self, handle: Handle, frames: Sequence[contracts.Frame], **options: Unpack[AppendOptions]
    ) -> contracts.AppendOutcome:
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
        self, handle: Handle, frames: Sequence[contracts.Frame], args: list[Any], append: Append
    ) -> contracts.AppendOutcome:
        """Merge in Python, where integers stay exact, and store against the merged version."""
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
                if isinstance(outcome, contracts.AppendOutcome):
                    if not outcome.duplicate and outcome.summary_version is not None:
                        known.version, known.document = outcome.summary_version, merged
                    return outcome
                known.version, known.document = outcome
        raise ValidationError("invalid_input", "too many writers change this summary at once")

    async def _refuse(
        self, handle: Handle, known: _Summary, args: Sequence[Any], error: EngineError
    ) -> None:
        """Raise the merge error, unless the document was not the latest."""
        # This first raises an error if the caller may not write.
        await self._append(handle, [*args[:5], "", ""], append_outcome)
        stored = await self.read_summary(handle.execution_id, handle.attempt_index)
        if stored is None or stored.version == known.version:
            raise error
        known.version, known.document = stored.version, stored.document_json

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> contracts.SummaryDocument | None:
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
        visibility: contracts.Visibility = "all",
    ) -> contracts.StreamFrames:
        first, last = StreamCursor.parse(from_), StreamCursor.parse(to)
        check_count(count_limit)
        reader = _StreamReader(self._calls, execution_id, attempt_index, visibility)

        async def read(conn: Connection) -> contracts.StreamFrames:
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
        visibility: contracts.Visibility = "all",
    ) -> contracts.StreamFrames:
        position = asked = StreamCursor.parse(after).after()
        check.whole(block_ms, "block_ms", 0, contracts.MAX_TAIL_BLOCK_MS)
        check_count(count_limit)
        reader = _StreamReader(self._calls, execution_id, attempt_index, visibility)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + block_ms / 1000

        async def wait(conn: Connection) -> contracts.StreamFrames:
            nonlocal position
            while True:
                first = behind(position)
                found = await reader.collect(conn, first, "+", count_limit, follow=block_ms > 0)
                position = found.examined or position
                left = deadline - loop.time()
                ended = found.closed_at is not None or self._pool.draining
                if found.frames or ended or left <= 0:
                    return found.result(position, asked)
                pause = left if found.followed else min(left, _UNNOTICED_S)
                await self._pool.await_news(conn, reader.await_news(conn, position, pause))
                if self._pool.draining:
                    return found.result(position, asked)

        with self._pool.permit(waits=block_ms > 0):
            return await self._connected(reader, wait)

    async def _connected(
        self, reader: _StreamReader, work: Callable[[Connection], Awaitable[T]]
    ) -> T:
        """Read on a pooled connection, again after an outage."""
        try:
            return await self._pooled(reader.tag, work)
        except TransportError as error:
            if not error.passing or error.kind == "timeout" or self._pool.closed:
                raise
        # The client's main connection waits for the end of the outage and follows a moved slot.
        await self._calls.transport.call("EXISTS", reader.stream, key=reader.tag)
        return await self._pooled(reader.tag, work)

    async def _pooled(self, tag: str, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Read on a pooled connection; a read is never ambiguous."""
        try:
            async with self._pool.connection(tag) as conn:
                return await work(conn)
        except TransportError as error:
            error.ambiguous = False
            raise
