"""The registry of worker processes. Advisory: leases do not depend on it."""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.state import LifecyclePhase, OwnershipState, StateVector
from flowfabric.engine.api.concern import Concern

Registration = Literal["registered", "refreshed"]
Removal = Literal["marked", "not_registered"]
_RECLAIMABLE = frozenset({OwnershipState.LEASE_EXPIRED_RECLAIMABLE, OwnershipState.LEASE_REVOKED})


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker process."""

    worker_id: str
    worker_instance_id: str
    namespace: str
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    """The tasks it has handlers for."""
    takes_other_tasks: bool = True
    """Whether it also takes tasks that it does not know."""
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int

    def knows(self, kind: str, *, required: bool) -> bool:
        """Whether it takes a task; `required`: only if it has a handler for it."""
        return kind in self.tasks or (self.takes_other_tasks and not required)


class Coverage(msgspec.Struct, frozen=True):
    """How well the live workers of a lane cover what an execution requires."""

    workers: int
    missing: tuple[str, ...]
    """What the best of them lacks; without workers, everything required."""


def waits_for_worker(vector: StateVector) -> bool:
    """Whether the execution waits for a worker, or will after its delay."""
    return (
        vector.lifecycle_phase is LifecyclePhase.RUNNABLE or vector.ownership_state in _RECLAIMABLE
    )


def least_missing(required: Iterable[str], workers: Iterable[WorkerEntry]) -> Coverage:
    """The coverage by the best single worker; two halves do not add up."""
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
    """The registry of worker processes. Advisory: leases do not depend on it."""

    async def register_worker(
        self,
        *,
        worker_id: str,
        worker_instance_id: str,
        lanes: Iterable[str],
        capabilities: Iterable[str] = (),
        tasks: Iterable[str] = (),
        takes_other_tasks: bool = True,
        liveness_ttl_ms: int = 60_000,
        namespace: str = "default",
        only_if_absent: bool = False,
    ) -> Registration:
        """Register a worker process, or refresh its registration."""
        ...

    async def heartbeat_worker(
        self, worker_instance_id: str, namespace: str = "default"
    ) -> int | None:
        """Renew a registration; returns its next expiry in ms, or None if it is not registered."""
        ...

    async def mark_worker_dead(
        self, worker_instance_id: str, namespace: str = "default", reason: str = "shutdown"
    ) -> Removal:
        """Remove a worker process from the registry; its leases stay until they expire."""
        ...

    async def list_workers(
        self, namespace: str | None = "default", after: str = "", limit: int | None = 1000
    ) -> list[WorkerEntry]:
        """Live worker processes by instance id, at most `limit` of those after `after`.

        None stands for all namespaces, and for no limit. Workers whose record is gone are skipped,
        and damaged ones with a warning. A page shorter than `limit` is the last one.
        """
        ...
