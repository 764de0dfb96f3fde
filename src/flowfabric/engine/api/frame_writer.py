"""The writing end of an attempt's stream: numbers frames and sends them in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Unpack, cast

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import AppendOutcome, Frame
from flowfabric.core.errors import EngineError
from flowfabric.engine.api.frames import (
    MAX_BATCH_BYTES,
    MAX_BATCH_FRAMES,
    Append,
    AppendOptions,
    size_of,
)
from flowfabric.engine.api.streams import Streams

# A later lease has a higher epoch, so its numbers are higher than those of the last one.
_NUMBERS_OF_ONE_LEASE = 2**32
_BACKLOG_FRAMES = 4 * MAX_BATCH_FRAMES
_FINAL = frozenset({"stream_closed", "stale_owner_cannot_append"})
Repeat = Callable[[Callable[[], Awaitable[AppendOutcome]]], Awaitable[AppendOutcome]]


class _Item(msgspec.Struct):
    frame: Frame
    options: Append
    size: int
    outcome: asyncio.Future[AppendOutcome] | None


class FrameWriter:
    """Writes the stream of one lease in order, each frame once.

    Frames are numbered, so a repeat after a lost reply writes nothing twice. One call is under
    way at a time and frames that arrive meanwhile share the next one: bursts are batched and a
    single frame does not wait. Call `flush` before anything that ends the lease.

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
        self._number = handle.lease_epoch * _NUMBERS_OF_ONE_LEASE
        self._waiting: deque[_Item] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._failure: Exception | None = None

    async def append(self, frame: Frame, **options: Unpack[AppendOptions]) -> AppendOutcome:
        """Append one frame and return when it is stored."""
        outcome = asyncio.get_running_loop().create_future()
        self._queue(frame, Append(**options), outcome)
        return await outcome

    async def write(self, frame: Frame, **options: Unpack[AppendOptions]) -> None:
        """Queue one frame; the next call raises what went wrong. Waits while the queue is full."""
        self._raise_failure()
        self._queue(frame, Append(**options), None)
        while len(self._waiting) > _BACKLOG_FRAMES:
            self._room.clear()
            await self._room.wait()

    async def flush(self) -> None:
        """Return when every frame is stored; raises what went wrong with those of `write`."""
        while self._sender is not None:
            await asyncio.wait([self._sender])
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            if not (isinstance(failure, EngineError) and failure.code in _FINAL):
                self._failure = None
            raise failure

    def _queue(
        self, frame: Frame, options: Append, outcome: asyncio.Future[AppendOutcome] | None
    ) -> None:
        # Checked before queueing: a bad frame must not fail its batch.
        options.check((frame,))
        self._waiting.append(_Item(frame, options, size_of(frame), outcome))
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
        try:
            outcome = await self._repeat(
                lambda: self._streams.append_frames(self._handle, frames, **options)
            )
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


def _share(outcome: AppendOutcome, place: int, count: int) -> AppendOutcome:
    """One frame's part of its batch's outcome."""
    later = count - 1 - place
    version = outcome.summary_version
    return AppendOutcome(
        stream_ids=outcome.stream_ids[place : place + 1],
        frame_count=outcome.frame_count - later,
        summary_version=None if version is None else version - later,
        duplicate=outcome.duplicate,
    )
