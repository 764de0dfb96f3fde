"""The claim cycle: hints and permits in, claims out.

A cycle visits partitions of a lane until it has taken what its caller can use. Hints say where to
go: doorbell rings, sweeps, and what an earlier visit left over. Two callers share it:

* `WorkerClaims` takes leases for the handlers of its own process, within its permits;
* `WorkerGrants` reserves executions for workers that claim through a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.scheduler.hints import LaneHints

log = logging.getLogger(__name__)

T = TypeVar("T")

Take = Callable[[str, str, int], Awaitable[tuple[list[T], bool]]]
"""Takes up to N executions of a lane and partition; also tells whether to come back for more."""


class ClaimCycle:
    """Finds, admits and takes work."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def sweep(self, lane: LaneHints) -> list[str]:
        """The partitions of the lane's next window that hold work, hinted ones left out."""
        unknown = [tag for tag in lane.sweep() if tag not in lane]
        return await self.backend.wakeups.find_work(lane.lane_id, unknown) if unknown else []

    async def visit(
        self, lane: LaneHints, tags: Iterable[str], wanted: int, take: Take[T]
    ) -> list[T]:
        """Go to the partitions in this order until `wanted` executions were taken."""
        taken: list[T] = []
        for tag in tags:
            if len(taken) >= wanted:
                break
            found, more = await take(lane.lane_id, tag, wanted - len(taken))
            lane.visited(tag, more=more)
            taken += found
        return taken

    async def give_back(self, handles: Iterable[Handle]) -> None:
        """Return leases of executions that cannot start; best effort, they lapse otherwise."""
        outcomes = await asyncio.gather(
            *(self.backend.executions.delay(handle, 1) for handle in handles),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                log.debug("lease not given back: %s", outcome)

    async def admit(self, candidates: Sequence[ExecutionId]) -> Sequence[ExecutionId]:
        """The candidates that may run now: the one place to check budgets and quotas.

        Every candidate passes until executions can have budgets and quotas. A claim that finds
        candidates with them returns their ids, which then pass here before they are claimed.
        """
        return candidates
