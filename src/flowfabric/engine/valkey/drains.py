"""Continues flow updates in the background that exceeded the limit of one call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flowfabric.core.contracts.flows import CascadeCounts
from flowfabric.core.errors import EngineError
from flowfabric.core.forks import forget_on_fork
from flowfabric.engine import metrics
from flowfabric.engine.valkey.calls import FunctionCalls

log = logging.getLogger(__name__)
_PENDING = 4
Step = Callable[[], Awaitable[bool]]


class CascadeDrains:
    """Runs one task per partition at a time; scanners take over if the process ends."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._closed = False
        self.deliver: Callable[[str], Awaitable[int]] | None = None
        """Sends the messages of a partition to others."""
        forget_on_fork(self)

    def note(self, tag: str, cascade_counts: Sequence[Any]) -> None:
        """Continue in the background if the end of a reply says that something is left."""
        if not cascade_counts or cascade_counts[0] is None:
            return
        if cascade_counts[0][_PENDING]:
            self.drain(tag)
        _count_resolved("inline", cascade_counts[0][0])
        _count_hops(cascade_counts[0][1])

    def cascade_counts(self, tag: str, cascade_counts: Sequence[Any]) -> CascadeCounts | None:
        """The effects on other members, from the end of a reply; None if there were none."""
        self.note(tag, cascade_counts)
        if not cascade_counts or cascade_counts[0] is None:
            return None
        *counts, pending = cascade_counts[0]
        return CascadeCounts(*counts, pending=pending == 1)

    def drain(self, tag: str) -> None:
        """Resolve, promote, skip and reopen until nothing is left in the partition."""

        async def step() -> bool:
            reply = await self._calls.fcall("ff_drain_cascade", tag, ("0",), op="drain_cascade")
            _count_resolved("drain", reply[2])
            if reply[7] and self.deliver is not None:
                return await self.deliver(tag) > 0
            return reply[6] == 1 and any(reply[2:6])

        self.start(tag, step)

    def cancel(self, tag: str, flow_id: str) -> None:
        """Cancel members of a cancelled flow until none is left."""

        async def step() -> bool:
            reply = await self._calls.fcall(
                "ff_drain_flow_cancel", tag, (flow_id,), op="drain_flow_cancel"
            )
            return reply[4] > 0

        self.start(flow_id, step)

    def start(self, name: str, step: Step) -> None:
        """Repeat a step in the background until it returns False; one task per name."""
        if self._closed:
            return
        if name in self._tasks:
            self._again.add(name)
            return
        self._tasks[name] = asyncio.get_running_loop().create_task(self._run(name, step))

    async def _run(self, name: str, step: Step) -> None:
        try:
            more = True
            while more:
                self._again.discard(name)
                more = await step() or name in self._again
        except EngineError as error:
            log.debug("left the rest of %s to the scanners: %s", name, error)
        finally:
            self._tasks.pop(name, None)
            self._again.discard(name)

    async def finish(self) -> None:
        """Wait until nothing is left to do."""
        while tasks := list(self._tasks.values()):
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Stop; the remaining work stays stored."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def forget(self) -> None:
        """In a forked child: leave the parent's tasks alone."""
        self._tasks = {}
        self._again = set()


def _count_hops(promoted: int) -> None:
    """Count members that were released by the call that ended their upstream."""
    if promoted and (meter := metrics.active()) is not None:
        meter.observe("ff_dag_hop_seconds", 0.0, times=promoted)


def _count_resolved(path: str, edges: int) -> None:
    if edges and (meter := metrics.active()) is not None:
        meter.count("ff_cascade_resolved_total", path, by=edges)
