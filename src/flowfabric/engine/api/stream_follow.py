"""Following a stream to its end, over lost connections."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import Protocol, Self

from flowfabric.core.contracts.streams import StreamedFrame, StreamFrames, Visibility
from flowfabric.core.cursors import MAX_TAIL_BLOCK_MS, StreamCursor
from flowfabric.core.errors import LimitError, TransportError
from flowfabric.core.ids import ExecutionId

log = logging.getLogger(__name__)
_PAGE = 500
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0


class _Tails(Protocol):
    async def tail_stream(
        self,
        execution_id: ExecutionId,
        attempt_index: int,
        *,
        after: str,
        block_ms: int,
        count_limit: int,
        visibility: Visibility,
    ) -> StreamFrames: ...


class StreamFollower:
    """Iterates over the frames of one attempt as they come; ends when the stream is closed.

    Afterwards `closed_reason` and `closed_at` tell how it ended. `position` is where to go on
    later, `truncated` whether frames may have been trimmed away before they were read.
    """

    def __init__(
        self,
        tails: _Tails,
        execution_id: ExecutionId,
        attempt_index: int,
        after: str,
        visibility: Visibility,
    ) -> None:
        self._tails = tails
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
        # Closed and nothing was left to look at: this was the end.
        if page.closed_at is not None and page.next_cursor == self._next:
            self.closed_at, self.closed_reason = page.closed_at, page.closed_reason
            self.position = self._next
        self._next = page.next_cursor

    async def _tail(self) -> StreamFrames:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await self._tails.tail_stream(
                    *self._target,
                    after=self._next,
                    block_ms=MAX_TAIL_BLOCK_MS,
                    count_limit=_PAGE,
                    visibility=self._visibility,
                )
            except (TransportError, LimitError) as error:
                if not error.retryable:
                    raise
                log.debug("follower goes on behind %s after: %s", self._next, error)
                told = error.retry_after_ms if isinstance(error, LimitError) else None
            # Many followers of one server must not come back together.
            await asyncio.sleep((told / 1000 if told else pause) * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LAST_PAUSE_S)
