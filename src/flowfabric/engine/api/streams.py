"""Attempt output: frames and their limits, appending, reading, following, summaries."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypedDict, Unpack, cast, get_args
from unicodedata import category

import msgspec

from flowfabric.core.backoff import Backoff, jittered
from flowfabric.core.contracts import streams as contracts
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import MAX_TAIL_BLOCK_MS, START, StreamCursor
from flowfabric.core.errors import LimitError, TransportError, ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId
from flowfabric.core.merge_patch import PATCH_KIND
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

log = logging.getLogger(__name__)
MAX_FRAME_BYTES = 65_536
MAX_BATCH_FRAMES = 256
MAX_BATCH_BYTES = 1_048_576
SUMMARY_MAX_BYTES = 262_144
U32 = 2**32 - 1
U64 = 2**64 - 1
_FRAME_TYPE_BYTES = 128
# Control characters, and surrogates, which UTF-8 cannot represent.
_REFUSED = frozenset({"Cc", "Cs"})
_LONGEST = {"correlation_id": 1024, "encoding": 128, "source": 128}
_MODES = get_args(contracts.FrameMode)
_PAGE = 500
_PAUSES_S = (0.05, 2.0)
_BACKLOG_FRAMES = 4 * MAX_BATCH_FRAMES
_FINAL = frozenset({"stream_closed", "stale_owner_cannot_append"})
Appending = Awaitable[contracts.AppendOutcome]
Repeat = Callable[[Callable[[], Appending]], Appending]
Awaited = asyncio.Future[contracts.AppendOutcome] | None
"""Receives the outcome of a frame, if a caller awaits it."""


class AppendOptions(TypedDict, total=False):
    """How frames are appended."""

    mode: contracts.FrameMode
    best_effort: contracts.BestEffort | None
    retention_maxlen: int | None
    """Keep exactly this many newest frames. 0 keeps about 10 000; None follows the policy."""
    max_payload_bytes: int
    patch_kind: str
    summary_max_bytes: int
    seq: int | None
    """Number of the last frame. An append whose number is not above all earlier ones counts as a
    repeat and is not written, so send the next one only after the reply."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Checked `AppendOptions` with their defaults."""

    mode: contracts.FrameMode = "durable"
    best_effort: contracts.BestEffort | None = None
    retention_maxlen: int | None = None
    max_payload_bytes: int = MAX_FRAME_BYTES
    patch_kind: str = PATCH_KIND
    summary_max_bytes: int = SUMMARY_MAX_BYTES
    seq: int | None = None

    def __post_init__(self) -> None:
        check.one_of(self.mode, "mode", _MODES)
        check.whole(self.max_payload_bytes, "max_payload_bytes", 0, U32)
        check.whole(self.summary_max_bytes, "summary_max_bytes", 0, U32)
        check.text(self.patch_kind, "patch_kind")
        if self.best_effort is not None:
            check.instance(self.best_effort, contracts.BestEffort, "best_effort")
        if self.retention_maxlen is not None:
            check.whole(self.retention_maxlen, "retention_maxlen", 0, U32)
        if self.seq is not None:
            check.whole(self.seq, "seq", 0, U64)

    def live(self) -> dict[str, Any]:
        """The settings of best-effort frames, defaults filled in."""
        given = self.best_effort or contracts.BestEffort()
        for name in ("ttl_ms", "maxlen_floor", "maxlen_ceiling"):
            if check.whole(getattr(given, name), name) > U32:
                raise invalid_input(name, f"must be at most {U32}")
        if not isinstance(given.ema_alpha, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid_input("ema_alpha", "must be a number")
        floor = given.maxlen_floor if given.maxlen_floor > 0 else 64
        ceiling = given.maxlen_ceiling if given.maxlen_ceiling > 0 else 16_384
        return {
            "ttl_ms": max(0, given.ttl_ms),
            "floor": floor,
            "ceiling": max(floor, ceiling),
            "alpha": given.ema_alpha if 0 < given.ema_alpha <= 1 else 0.2,
        }

    def check(self, frames: Sequence[contracts.Frame]) -> None:
        """Refuse frames that are too large or badly named."""
        if not 1 <= len(frames) <= MAX_BATCH_FRAMES:
            raise invalid_input("frames", f"must be 1 to {MAX_BATCH_FRAMES}")
        total = 0
        for frame in frames:
            check.binary(check.instance(frame, contracts.Frame, "frames").payload, "payload")
            _check_text("metadata_json", frame.metadata_json, U32)
            size = size_of(frame)
            total += size
            if size > self.max_payload_bytes:
                raise _too_large("a frame", size, self.max_payload_bytes)
            _check_names(frame)
        if total > MAX_BATCH_BYTES:
            raise _too_large("the batch", total, MAX_BATCH_BYTES)


def _too_large(what: str, size: int, limit: int) -> ValidationError:
    problem = f"{what} is {size} bytes long; the limit is {limit}"
    return ValidationError("retention_limit_exceeded", problem)


def size_of(frame: contracts.Frame) -> int:
    """The bytes that count against the limits."""
    return len(frame.payload) + len(frame.metadata_json.encode())


def _check_names(frame: contracts.Frame) -> None:
    check.text(frame.kind, "kind")
    check.instance(frame.frame_type, str, "frame_type")
    name = frame.name
    # Check the common case first, which is quick.
    if len(name.encode(errors="replace")) > _FRAME_TYPE_BYTES or (
        not name.isprintable() and any(category(letter) in _REFUSED for letter in name)
    ):
        raise ValidationError(
            "invalid_frame_type",
            f"must be 1 to {_FRAME_TYPE_BYTES} bytes of UTF-8 without control characters",
        )
    for field, longest in _LONGEST.items():
        _check_text(field, getattr(frame, field), longest)
    if frame.ts is not None:
        check.whole(frame.ts, "ts", 0, U64)


def _check_text(field: str, value: str, longest: int) -> None:
    size = len(check.text(value, field))
    if not value.isascii():
        size = len(value.encode())
    if size > longest:
        raise invalid_input(field, f"is {size} bytes long; the limit is {longest}")


class StreamFollower:
    """Iterates over the frames of one attempt until the stream ends, also over lost connections.

    Then `closed_reason` and `closed_at` are set. `position` is where a later follower can
    continue; `truncated` tells whether frames may have been trimmed before they were read.
    """

    def __init__(self, tail: Callable[..., Awaitable[contracts.StreamFrames]], after: str) -> None:
        self._tail_stream = tail
        self._next = StreamCursor.parse(after).after()
        self._ready: deque[contracts.StreamedFrame] = deque()
        self.position = self._next
        self.closed_at: int | None = None
        self.closed_reason: str | None = None
        self.truncated = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> contracts.StreamedFrame:
        while not self._ready:
            if self.closed_at is not None:
                raise StopAsyncIteration
            await self._fetch()
        frame = self._ready.popleft()
        self.position = frame.id
        return frame

    async def _fetch(self) -> None:
        page = await self._tail()
        self.truncated = self.truncated or page.truncated
        self._ready.extend(page.frames)
        # Closed, and the page was empty: nothing can follow.
        if page.closed_at is not None and page.next_cursor == self._next:
            self.closed_at, self.closed_reason = page.closed_at, page.closed_reason
            self.position = self._next
        self._next = page.next_cursor

    async def _tail(self) -> contracts.StreamFrames:
        backoff = Backoff(*_PAUSES_S)
        while True:
            try:
                return await self._tail_stream(after=self._next)
            except (TransportError, LimitError) as error:
                if not error.retryable:
                    raise
                log.debug("follower continues after %s despite: %s", self._next, error)
                advised = error.retry_after_ms if isinstance(error, LimitError) else None
            await asyncio.sleep(jittered(advised / 1000) if advised else backoff.jittered_s())


class StreamViewers(Protocol):
    """Tails with their own permits and connections."""

    async def tail_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        block_ms: int = 0,
        count_limit: int = 50,
    ) -> contracts.StreamFrames: ...

    async def aclose(self) -> None: ...


class Streams(Concern, Protocol):
    """Attempt output: appending, reading, following, summaries."""

    def viewers(self, ceiling: int) -> StreamViewers:
        """A separate pool for at most `ceiling` tails. Close it after use."""
        ...

    async def append_frame(
        self, handle: Handle, frame: contracts.Frame, **options: Unpack[AppendOptions]
    ) -> contracts.AppendOutcome:
        return await self.append_frames(handle, (frame,), **options)

    async def append_frames(
        self, handle: Handle, frames: Sequence[contracts.Frame], **options: Unpack[AppendOptions]
    ) -> contracts.AppendOutcome:
        """Append frames, all or nothing, in one step that also proves the lease."""
        ...

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> contracts.SummaryDocument | None:
        """The rolling summary document, or None when no patch was ever appended."""
        ...

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
        """Frames of a range, both ends included, and whether the stream has ended."""
        ...

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
        """Frames after `after`; waits up to `block_ms` for one, or for the end of the stream."""
        ...

    def follow_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        visibility: contracts.Visibility = "all",
    ) -> StreamFollower:
        """Every frame after `after`, live, until the stream ends.

        >>> async for frame in backend.streams.follow_stream(execution_id, 0):  # doctest: +SKIP
        ...     print(frame.payload)
        """
        tail = partial(self.tail_stream, block_ms=MAX_TAIL_BLOCK_MS, count_limit=_PAGE)
        of_attempt = partial(tail, execution_id, attempt_index, visibility=visibility)
        return StreamFollower(of_attempt, after)


class _Item(msgspec.Struct):
    frame: contracts.Frame
    options: Append
    size: int
    outcome: Awaited


class FrameWriter:
    """Writes the stream of one lease in order, each frame once.

    Frames are numbered, so a repeat after a lost reply writes nothing twice. Only one call is in
    flight at a time, and frames that arrive meanwhile share the next one: bursts are batched, and
    a single frame does not wait. Call `flush` before ending the lease.

    >>> writer = FrameWriter(backend.streams, claim.handle)  # doctest: +SKIP
    >>> await writer.write(Frame(payload=b"token"))  # doctest: +SKIP
    >>> await writer.flush()  # doctest: +SKIP
    """

    def __init__(
        self, streams: Streams, handle: Handle, repeat: Repeat = lambda call: call()
    ) -> None:
        self._streams = streams
        self._handle = handle
        self._repeat = repeat
        """Makes a call and repeats it after transient faults."""
        self._number = handle.seq_base
        self._waiting: deque[_Item] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._failure: Exception | None = None
        # Most frames have the options of the previous one, which need no second check.
        self._given = AppendOptions()
        self._options = Append()

    async def append(
        self, frame: contracts.Frame, **options: Unpack[AppendOptions]
    ) -> contracts.AppendOutcome:
        """Append one frame and return when it is stored."""
        outcome = asyncio.get_running_loop().create_future()
        self._queue(frame, options, outcome)
        return await outcome

    async def write(self, frame: contracts.Frame, **options: Unpack[AppendOptions]) -> None:
        """Queue one frame; the next call raises what went wrong. Waits while the queue is full."""
        self._raise_failure()
        self._queue(frame, options, None)
        while len(self._waiting) > _BACKLOG_FRAMES:
            self._room.clear()
            await self._room.wait()

    async def flush(self) -> None:
        """Return when every frame is stored; raises what went wrong with those of `write`."""
        while self._sender is not None:
            await asyncio.wait([self._sender])
        self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self._failure) is not None:
            if getattr(failure, "code", None) not in _FINAL:
                self._failure = None
            raise failure

    def _queue(self, frame: contracts.Frame, given: AppendOptions, outcome: Awaited) -> None:
        if given != self._given:
            self._options, self._given = Append(**given), given
        # Check before queueing, so that an invalid frame does not fail its batch.
        self._options.check((frame,))
        self._waiting.append(_Item(frame, self._options, size_of(frame), outcome))
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send(self._next_batch())
                self._room.set()
        finally:
            self._sender = None

    def _next_batch(self) -> list[_Item]:
        options, size = self._waiting[0].options, 0
        batch: list[_Item] = []
        # A patch that cannot be merged must not fail others.
        most = 1 if options.mode == "summary" else MAX_BATCH_FRAMES
        while self._waiting and len(batch) < most:
            item = self._waiting[0]
            size += item.size
            if item.options != options or size > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: list[_Item]) -> None:
        self._number += len(batch)
        frames = [item.frame for item in batch]
        options = cast("AppendOptions", msgspec.structs.asdict(batch[0].options))
        options["seq"] = self._number

        def call() -> Appending:
            return self._streams.append_frames(self._handle, frames, **options)

        try:
            outcome = await self._repeat(call)
        except Exception as error:  # noqa: BLE001 - raised where the frame is awaited
            for item in batch:
                if item.outcome is None:
                    self._failure = error
                elif not item.outcome.done():
                    item.outcome.set_exception(error)
            return
        for place, item in enumerate(batch):
            if item.outcome is not None and not item.outcome.done():
                item.outcome.set_result(_share(outcome, place, len(batch)))


def _share(outcome: contracts.AppendOutcome, place: int, count: int) -> contracts.AppendOutcome:
    later = count - 1 - place
    version = outcome.summary_version
    return contracts.AppendOutcome(
        stream_ids=outcome.stream_ids[place : place + 1],
        frame_count=outcome.frame_count - later,
        summary_version=None if version is None else version - later,
        duplicate=outcome.duplicate,
    )
