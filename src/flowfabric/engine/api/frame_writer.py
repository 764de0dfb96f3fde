"""The writing end of an attempt's stream: numbers frames and sends them in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import AppendOutcome, BestEffort, Frame, FrameMode
from flowfabric.core.errors import EngineError
from flowfabric.engine.api.frames import (
    MAX_BATCH_BYTES,
    MAX_BATCH_FRAMES,
    MAX_FRAME_BYTES,
    check_frames,
    size_of,
)

# A later lease has a higher epoch, so its numbers go on where those of the last one ended.
_NUMBERS_OF_ONE_LEASE = 2**32
_BACKLOG_FRAMES = 4 * MAX_BATCH_FRAMES
_FINAL = frozenset({"stream_closed", "stale_owner_cannot_append"})


class _Appends(Protocol):
    async def append_frames(
        self,
        handle: Handle,
        frames: Sequence[Frame],
        *,
        mode: FrameMode,
        best_effort: BestEffort | None,
        retention_maxlen: int | None,
        seq: int | None,
    ) -> AppendOutcome: ...


Repeat = Callable[[Callable[[], Awaitable[AppendOutcome]]], Awaitable[AppendOutcome]]


class _Way(msgspec.Struct, frozen=True):
    """How a frame is appended; only frames of one way share a call."""

    mode: FrameMode
    best_effort: BestEffort | None
    retention_maxlen: int | None


class _Item(msgspec.Struct):
    frame: Frame
    way: _Way
    size: int
    outcome: asyncio.Future[AppendOutcome] | None


class FrameWriter:
    """Writes the stream of one lease, in order and each frame once.

    Frames carry numbers, so a repeat after a lost reply writes nothing twice. One call is under
    way at a time; what comes meanwhile leaves with the next one, so bursts are batched and a
    single frame does not wait. `flush` before anything that ends the lease.

    >>> writer = FrameWriter(backend, claim.handle)  # doctest: +SKIP
    >>> await writer.write(Frame(payload=b"token"))  # doctest: +SKIP
    >>> await writer.flush()  # doctest: +SKIP
    """

    def __init__(
        self, appends: _Appends, handle: Handle, repeat: Repeat = lambda call: call()
    ) -> None:
        self._appends = appends
        self._handle = handle
        self._repeat = repeat
        """Makes a call, and repeats it after faults for as long as that makes sense."""
        self._number = handle.lease_epoch * _NUMBERS_OF_ONE_LEASE
        self._waiting: deque[_Item] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._failure: Exception | None = None

    async def append(
        self,
        frame: Frame,
        *,
        mode: FrameMode = "durable",
        best_effort: BestEffort | None = None,
        retention_maxlen: int | None = None,
    ) -> AppendOutcome:
        """Add one frame and return when it is stored."""
        outcome = asyncio.get_running_loop().create_future()
        self._queue(frame, _Way(mode, best_effort, retention_maxlen), outcome)
        return await outcome

    async def write(
        self,
        frame: Frame,
        *,
        mode: FrameMode = "durable",
        best_effort: BestEffort | None = None,
        retention_maxlen: int | None = None,
    ) -> None:
        """Add one frame without waiting for it; a failure is raised by the next call.

        Waits only while very much is under way already.
        """
        self._raise_failure()
        self._queue(frame, _Way(mode, best_effort, retention_maxlen), None)
        while len(self._waiting) > _BACKLOG_FRAMES:
            self._room.clear()
            await self._room.wait()

    async def flush(self) -> None:
        """Return when every frame is stored; raise what went wrong with those of `write`."""
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
        self, frame: Frame, way: _Way, outcome: asyncio.Future[AppendOutcome] | None
    ) -> None:
        # Here, so that a bad frame fails alone and not with its batch.
        check_frames((frame,), way.mode, MAX_FRAME_BYTES)
        self._waiting.append(_Item(frame, way, size_of(frame), outcome))
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
        way, size = self._waiting[0].way, 0
        batch: list[_Item] = []
        # A patch that cannot be merged must not take others with it.
        most = 1 if way.mode == "summary" else MAX_BATCH_FRAMES
        while self._waiting and len(batch) < most:
            item = self._waiting[0]
            size += item.size
            if item.way != way or size > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: list[_Item]) -> None:
        way = batch[0].way
        self._number += len(batch)
        try:
            outcome = await self._repeat(
                lambda: self._appends.append_frames(
                    self._handle,
                    [item.frame for item in batch],
                    mode=way.mode,
                    best_effort=way.best_effort,
                    retention_maxlen=way.retention_maxlen,
                    seq=self._number,
                )
            )
        except Exception as error:  # noqa: BLE001 - whoever waits for a frame is told, whatever it is
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
    """One frame's part of what its batch was answered."""
    behind = count - 1 - place
    version = outcome.summary_version
    return AppendOutcome(
        stream_ids=outcome.stream_ids[place : place + 1],
        frame_count=outcome.frame_count - behind,
        summary_version=None if version is None else version - behind,
        duplicate=outcome.duplicate,
    )
