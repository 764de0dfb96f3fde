"""Attempt output: appending, reading, following, summaries."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol, Self, Unpack

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    Frame,
    StreamedFrame,
    StreamFrames,
    SummaryDocument,
    Visibility,
)
from flowfabric.core.cursors import MAX_TAIL_BLOCK_MS, START, StreamCursor
from flowfabric.core.errors import LimitError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.concern import Concern
from flowfabric.engine.api.frames import AppendOptions

log = logging.getLogger(__name__)
_PAGE = 500
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0


class Streams(Concern, Protocol):
    """Attempt output: appending, reading, following, summaries."""

    async def append_frame(
        self, handle: Handle, frame: Frame, **options: Unpack[AppendOptions]
    ) -> AppendOutcome:
        """Append one frame; see `append_frames`."""
        return await self.append_frames(handle, (frame,), **options)

    async def append_frames(
        self, handle: Handle, frames: Sequence[Frame], **options: Unpack[AppendOptions]
    ) -> AppendOutcome:
        """Append frames, all or nothing, in one step that also proves the lease."""
        ...

    async def read_summary(
        self, execution_id: ExecutionId, attempt_index: int
    ) -> SummaryDocument | None:
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
        visibility: Visibility = "all",
    ) -> StreamFrames:
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
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames after `after`; waits up to `block_ms` for one, or for the end of the stream."""
        ...

    def follow_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str = START.text,
        visibility: Visibility = "all",
    ) -> StreamFollower:
        """Every frame after `after`, live, until the stream ends.

        >>> async for frame in backend.streams.follow_stream(execution_id, 0):  # doctest: +SKIP
        ...     print(frame.payload)
        """
        return StreamFollower(self, execution_id, attempt_index, after, visibility)


class StreamFollower:
    """Iterates over the frames of one attempt until the stream ends, also over lost connections.

    Then `closed_reason` and `closed_at` are set. `position` is where a later follower can
    continue; `truncated` tells whether frames may have been trimmed before they were read.
    """

    def __init__(
        self,
        streams: Streams,
        execution_id: ExecutionId,
        attempt_index: int,
        after: str,
        visibility: Visibility,
    ) -> None:
        self._streams = streams
        self._target = (execution_id, attempt_index)
        self._visibility: Visibility = visibility
        self._next = StreamCursor.parse(after).after()
        self._ready: deque[StreamedFrame] = deque()
        self.position = self._next
        self.closed_at: int | None = None
        self.closed_reason: str | None = None
        self.truncated = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamedFrame:
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

    async def _tail(self) -> StreamFrames:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await self._streams.tail_stream(
                    *self._target,
                    after=self._next,
                    block_ms=MAX_TAIL_BLOCK_MS,
                    count_limit=_PAGE,
                    visibility=self._visibility,
                )
            except (TransportError, LimitError) as error:
                if not error.retryable:
                    raise
                log.debug("follower continues after %s despite: %s", self._next, error)
                advised = error.retry_after_ms if isinstance(error, LimitError) else None
            # Many followers of one server must not return at the same moment.
            await asyncio.sleep((advised / 1000 if advised else pause) * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LAST_PAUSE_S)
