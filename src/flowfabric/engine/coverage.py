"""Which of an execution's required capabilities no live worker brings along."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.ids import validate_lane
from flowfabric.core.state import LifecyclePhase, OwnershipState, StateVector
from flowfabric.engine.registry import Registry, WorkerEntry

__all__ = ["Coverage", "Gaps", "least_missing", "waits_for_worker"]

_PAGE = 1000
_RECLAIMABLE = frozenset({OwnershipState.LEASE_EXPIRED_RECLAIMABLE, OwnershipState.LEASE_REVOKED})


class Coverage(msgspec.Struct, frozen=True):
    """How near the live workers of a lane come to what an execution requires."""

    workers: int
    missing: tuple[str, ...]
    """What the best of them lacks; with no worker at all, everything required."""


def waits_for_worker(vector: StateVector) -> bool:
    """Whether a worker is what the execution needs next: it may be claimed, now or later."""
    return (
        vector.lifecycle_phase is LifecyclePhase.RUNNABLE or vector.ownership_state in _RECLAIMABLE
    )


def least_missing(required: Iterable[str], workers: Iterable[WorkerEntry]) -> Coverage:
    """Coverage is one worker's own: two that offer half each cover nothing."""
    wanted = frozenset(required)
    count = 0
    fewest = tuple(sorted(wanted))
    for worker in workers:
        lacks = caps.missing(wanted, worker.capabilities)
        if (len(lacks), lacks) < (len(fewest), fewest):
            fewest = lacks
        count += 1
    return Coverage(count, fewest)


class Gaps(Registry):
    """Reads the registry for one execution's sake."""

    async def coverage(self, namespace: str, lane_id: str, required: Iterable[str]) -> Coverage:
        """What the live workers of a lane and namespace offer towards a requirement."""
        validate_lane(lane_id)
        required = caps.normalise(required)
        serving: list[WorkerEntry] = []
        after = ""
        while True:
            page = await self.list_workers(namespace, after, _PAGE)
            serving += (worker for worker in page if lane_id in worker.lanes)
            if len(page) < _PAGE:
                return least_missing(required, serving)
            after = page[-1].worker_instance_id
