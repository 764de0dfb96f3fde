"""Delays that this process set itself end at their exact time, whoever runs the scanners."""

from __future__ import annotations

import asyncio
import heapq
import logging

from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.clock import ServerClock

log = logging.getLogger(__name__)

_BATCH = 100
_MAX_HINTS = 10_000
_HORIZON_MS = 600_000
_CLOCK_TRUST_S = 30.0
_TRIES = 3

Hint = tuple[int, int, str, str, str]
"""Due time, tries left (negative), lane, tag, execution id."""


class DueHints:
    """Promotes hinted executions when they are due. A hint that is lost costs only latency.

    >>> hints.hint("default", execution_id.tag, execution_id, due_ms)  # doctest: +SKIP
    """

    def __init__(self, backend: ValkeyBackend) -> None:
        self._backend = backend
        self._heap: list[Hint] = []
        self._wake = asyncio.Event()
        self._clock = ServerClock()
        self._task: asyncio.Task[None] | None = None

    def hint(self, lane: str, tag: str, execution_id: str, due_ms: int) -> None:
        """An execution of this lane and partition may be promoted at a server time."""
        if len(self._heap) < _MAX_HINTS:
            heapq.heappush(self._heap, (due_ms, -_TRIES, lane, tag, execution_id))
            self._wake.set()

    def start(self) -> None:
        """Begin to act on hints."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="ff-due-hints")

    async def stop(self) -> None:
        """End; hints not yet due are left to the delayed promoter."""
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
                log.debug("hints wait: %s", error, extra={"action": "hints_failed"})
                await asyncio.sleep(1.0)

    async def _step(self) -> None:
        """Promote what is due, or wait for the next due time or hint."""
        self._wake.clear()
        if not self._heap:
            await self._wake.wait()
            return
        if self._clock.age_s > _CLOCK_TRUST_S:
            self._clock.observe(await self._backend.meta.server_time_ms())
        now = self._clock.now_ms()
        if self._heap[0][0] > now + _HORIZON_MS:
            # Everything behind lies further ahead: the promoter's interval is exact enough.
            self._heap.clear()
            return
        # One more millisecond: the server rounds its time down.
        wait = (self._heap[0][0] + 1 - now) / 1000
        if wait > 0:
            try:
                async with asyncio.timeout(min(wait, _CLOCK_TRUST_S)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            return
        await self._promote(now)

    async def _promote(self, now: float) -> None:
        groups: dict[tuple[str, str], list[Hint]] = {}
        while self._heap and self._heap[0][0] + 1 <= now:
            hint = heapq.heappop(self._heap)
            group = groups.setdefault((hint[3], hint[2]), [])
            group.append(hint)
            if len(group) == _BATCH:
                break
        early: list[Hint] = []
        for (tag, lane), group in groups.items():
            answers = await self._backend.upkeep.promote_delayed(
                tag, lane, [hint[4] for hint in group]
            )
            early += [
                hint for hint, answer in zip(group, answers, strict=True) if answer == "not_yet_due"
            ]
        if early:
            # Our idea of the server's time is wrong, or the delay was changed since.
            self._clock.observe(await self._backend.meta.server_time_ms())
            for due, tries, lane, tag, execution_id in early:
                if tries + 1 < 0:
                    heapq.heappush(self._heap, (due, tries + 1, lane, tag, execution_id))
