"""Following attempt output: viewers at the same position share one read of the store."""

import asyncio

from flowfabric.core.contracts.streams import MAX_TAIL_BLOCK_MS, StreamFrames
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.streams import StreamViewers

_PAGE = 500


class FrameHub:
    """Viewers of one stream at the same position share one read of the store."""

    def __init__(self, streams: StreamViewers) -> None:
        self._streams = streams
        self._tails: dict[tuple[str, int, str], tuple[asyncio.Task[StreamFrames], list[int]]] = {}

    @property
    def reads(self) -> int:
        """How many reads are under way."""
        return len(self._tails)

    async def aclose(self) -> None:
        """Close the connections that the reads used."""
        await self._streams.aclose()

    async def tail(self, execution_id: ExecutionId, attempt: int, after: str) -> StreamFrames:
        """The frames after a position; waits for one, or for the end of the stream."""
        key = (execution_id, attempt, after)
        if key not in self._tails:
            read = self._streams.tail_stream(
                execution_id,
                attempt,
                after=after,
                block_ms=MAX_TAIL_BLOCK_MS,
                count_limit=_PAGE,
            )
            self._tails[key] = (asyncio.ensure_future(read), [0])
        task, waiting = self._tails[key]
        waiting[0] += 1
        try:
            return await asyncio.shield(task)
        finally:
            waiting[0] -= 1
            if not waiting[0] and self._tails.get(key, (None,))[0] is task:
                del self._tails[key]
                task.cancel()
