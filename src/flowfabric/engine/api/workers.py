"""Which worker processes exist. Advisory: it never decides on a lease."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.state import LifecyclePhase, OwnershipState, StateVector
from flowfabric.engine.api.concern import Concern

_RECLAIMABLE = frozenset({OwnershipState.LEASE_EXPIRED_RECLAIMABLE, OwnershipState.LEASE_REVOKED})


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker process."""

    worker_id: str
    worker_instance_id: str
    namespace: str
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int


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


class Workers(Concern, Protocol):
    """Which worker processes exist. Advisory: it never decides on a lease."""

    async def register_worker(
        self,
        *,
        worker_id: str,
        worker_instance_id: str,
        lanes: Iterable[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int = 60_000,
        namespace: str = "default",
        only_if_absent: bool = False,
    ) -> Literal["registered", "refreshed"]:
        """Announce a worker process, or refresh what is known of it."""
        ...

    async def heartbeat_worker(
        self, worker_instance_id: str, namespace: str = "default"
    ) -> int | None:
        """Renew a registration; its next expiry in ms, or None when it is not registered."""
        ...

    async def mark_worker_dead(
        self, worker_instance_id: str, namespace: str = "default", reason: str = "shutdown"
    ) -> Literal["marked", "not_registered"]:
        """Remove a worker process from the registry; its leases are judged by their expiry."""
        ...

    async def list_workers(
        self, namespace: str | None = "default", after: str = "", limit: int | None = 1000
    ) -> list[WorkerEntry]:
        """Live worker processes by instance id, at most `limit` of those after `after`.

        None stands for all namespaces, and for no limit. Workers whose record is gone are skipped,
        and damaged ones with a warning. A page shorter than `limit` is the last one.
        """
        ...
