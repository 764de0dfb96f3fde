"""Promotes delays set by this process at their exact time, even if another process scans."""

import asyncio
import heapq
import logging
from typing import NamedTuple

from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.scanners.base import wait_until
from flowfabric.scanners.watch import ServerClock

log = logging.getLogger(__name__)

_BATCH = 100
_MAX_HINTS = 10_000
_HORIZON_MS = 600_000
_CLOCK_TRUST_S = 30.0
_TRIES = 3


class _Hint(NamedTuple):
    due_ms: int
    tries: int
    lane: str
    tag: str
    execution_id: str


class DueHints:
    """Promotes hinted executions when they are due. A lost hint costs only latency."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._heap: list[_Hint] = []
        self._wake = asyncio.Event()
        self._clock = ServerClock()
        self._task: asyncio.Task[None] | None = None

    def hint(self, lane: str, tag: str, execution_id: str, due_ms: int) -> None:
        """Promote this execution when the server's time is `due_ms`."""
        if len(self._heap) < _MAX_HINTS:
            heapq.heappush(self._heap, _Hint(due_ms, 0, lane, tag, execution_id))
            self._wake.set()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="ff-due-hints")

    async def stop(self) -> None:
        """Stop; the delayed promoter handles the remaining executions."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def __len__(self) -> int:
        return len(self._heap)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except EngineError as error:
                log.debug("hints failed: %s", error, extra={"action": "hints_failed"})
                await asyncio.sleep(1.0)

    async def _step(self) -> None:
        """Promote what is due, or wait for the next due time or hint."""
        self._wake.clear()
        if not self._heap:
            await self._wake.wait()
            return
        if self._clock.age_s > _CLOCK_TRUST_S:
            await self._read_clock()
        now = self._clock.now_ms()
        # One more millisecond: the server rounds its time down.
        wait_ms = self._heap[0].due_ms + 1 - now
        if wait_ms > _HORIZON_MS:
            # All others are due even later, so the promoter's interval is exact enough.
            self._heap.clear()
        elif wait_ms > 0:
            await wait_until(self._wake, min(wait_ms / 1000, _CLOCK_TRUST_S))
        else:
            await self._promote(now)

    async def _promote(self, now: float) -> None:
        groups: dict[tuple[str, str], list[_Hint]] = {}
        while self._heap and self._heap[0].due_ms + 1 <= now:
            hint = heapq.heappop(self._heap)
            group = groups.setdefault((hint.tag, hint.lane), [])
            group.append(hint)
            if len(group) == _BATCH:
                break
        for (tag, lane), group in groups.items():
            ids = [hint.execution_id for hint in group]
            answers = await self._backend.upkeep.promote_delayed(tag, lane, ids)
            early = [h for h, a in zip(group, answers, strict=True) if a == "not_yet_due"]
            if early:
                # Our estimate of the server's time is wrong, or the delay was changed.
                await self._read_clock()
            for hint in early:
                if hint.tries + 1 < _TRIES:
                    heapq.heappush(self._heap, hint._replace(tries=hint.tries + 1))

    async def _read_clock(self) -> None:
        self._clock.observe(await self._backend.meta.server_time_ms())
