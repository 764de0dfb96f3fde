"""The registry of worker processes. Advisory: leases do not depend on it."""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import LifecyclePhase, OwnershipState, StateVector
from flowfabric.engine.api.concern import Concern

Registration = Literal["registered", "refreshed"]
Removal = Literal["marked", "not_registered"]
DRAIN_TIMEOUT_MS = 30_000
_RECLAIMABLE = frozenset({OwnershipState.LEASE_EXPIRED_RECLAIMABLE, OwnershipState.LEASE_REVOKED})


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker process."""

    worker_id: str
    worker_instance_id: str
    namespace: str
    """Where it is registered."""
    namespaces: tuple[str, ...] = ()
    """The namespaces that it serves: its own if none are given, all of them with `*`."""
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    """The tasks it has handlers for."""
    takes_other_tasks: bool = True
    """Whether it also takes tasks that it does not know."""
    last_heartbeat_ms: int
    liveness_ttl_ms: int
    registered_at_ms: int
    draining: bool = False
    """Whether an operator drains it: it gets no more work."""

    @property
    def cursor(self) -> str:
        """Its place in the list of all workers: instance ids contain no spaces."""
        return f"{self.worker_instance_id} {self.namespace}"

    def is_for(self, lane_id: str, namespace: str) -> bool:
        """Whether it was started for executions of a lane and namespace."""
        served = self.namespaces or (self.namespace,)
        return lane_id in self.lanes and ("*" in served or namespace in served)

    def serves(self, lane_id: str, namespace: str) -> bool:
        """Whether it starts executions of a lane and namespace; a draining worker starts none."""
        return not self.draining and self.is_for(lane_id, namespace)

    def knows(self, kind: str, *, required: bool) -> bool:
        """Whether it takes a task; `required`: only if it has a handler for it."""
        return kind in self.tasks or (self.takes_other_tasks and not required)


class Heartbeat(msgspec.Struct, frozen=True):
    """A renewed registration."""

    next_expiry_ms: int
    draining: bool = False
    """Finish what runs and claim nothing more: an operator drains this worker."""


class Draining(NamedOutcome[Literal["draining"]], frozen=True):
    """The worker gets no more work."""

    leases: int
    """How many it still held."""


class NotRegistered(NamedOutcome[Literal["not_registered"]], frozen=True):
    """No such worker process is alive; nothing was changed."""


class WorkerLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that a worker process holds."""

    execution_id: ExecutionId
    lease_id: str
    lease_epoch: int
    expires_at_ms: int


class WorkerLeases(msgspec.Struct, frozen=True):
    """One page, and the start of the next if there is one."""

    entries: tuple[WorkerLease, ...]
    cursor: str | None = None
    """The last execution id: pass it as `after`."""
    damaged: tuple[str, ...] = ()
    """The entries that cannot be read."""


class Coverage(msgspec.Struct, frozen=True):
    """How well the live workers of a lane cover what an execution requires."""

    workers: int
    missing: tuple[str, ...]
    """What the best of them lacks; without workers, everything required."""
    closest: tuple[str, ...] = ()
    """The instance ids of those that lack only this."""


def waits_for_worker(vector: StateVector) -> bool:
    """Whether the execution waits for a worker, or will after its delay."""
    return (
        vector.lifecycle_phase is LifecyclePhase.RUNNABLE or vector.ownership_state in _RECLAIMABLE
    )


def least_missing(required: Iterable[str], workers: Iterable[WorkerEntry]) -> Coverage:
    """The coverage by the best single worker; two halves do not add up."""
    wanted = frozenset(required)
    lacking: dict[tuple[str, ...], list[str]] = {}
    count = 0
    for worker in workers:
        lacks = caps.missing(wanted, worker.capabilities)
        lacking.setdefault(lacks, []).append(worker.worker_instance_id)
        count += 1
    fewest = min(lacking, key=lambda lacks: (len(lacks), lacks), default=tuple(sorted(wanted)))
    # Those that offer nothing of it are not close.
    near = lacking.get(fewest, []) if len(fewest) < len(wanted) else []
    return Coverage(count, fewest, tuple(near))


def no_worker_for(lane_id: str, signature: str, fleet: Iterable[WorkerEntry]) -> bool:
    """Whether no live worker can take work of a lane with this signature; one alone must do.

    Work that requires nothing waits for any worker, so it never lacks a capable one.
    """
    namespace, required = caps.signature_parts(signature)
    if not required:
        return False
    named, tasks = caps.split_tasks(required)
    return not any(
        worker.serves(lane_id, namespace)
        and named.issubset(worker.capabilities)
        and all(worker.knows(task, required=True) for task in tasks)
        for worker in fleet
    )


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
        namespaces: Iterable[str] = (),
        only_if_absent: bool = False,
        start_id: str | None = None,
    ) -> Registration:
        """Register a worker process, or refresh its registration.

        It serves its own namespace, or `namespaces`; `*` stands for all. `only_if_absent` refuses a
        process whose instance id is alive. `start_id` tells a repeat by the same process from
        another one; without it, all calls of this backend come from one process.
        """
        ...

    async def heartbeat_worker(
        self, worker_instance_id: str, namespace: str = "default"
    ) -> Heartbeat | None:
        """Renew a registration; None if there is none: register again."""
        ...

    async def mark_worker_dead(
        self,
        worker_instance_id: str,
        namespace: str = "default",
        reason: str = "shutdown",
        *,
        revoke_leases: bool = False,
    ) -> Removal:
        """Remove a worker process from the registry.

        Its leases stay until they expire, unless they are revoked too: other workers then continue
        the executions at once. Revoked are the leases of the namespaces that it served, or only of
        `namespace` if it was removed before.
        """
        ...

    async def drain_worker(
        self,
        worker_instance_id: str,
        namespace: str = "default",
        timeout_ms: int = DRAIN_TIMEOUT_MS,
    ) -> Draining | NotRegistered:
        """Give a worker process no more work; leases it holds after the timeout are revoked.

        This concerns the namespaces that it serves: a process of another namespace with the same
        instance id works on.
        """
        ...

    async def list_worker_leases(
        self, worker_instance_id: str, after: str = "", limit: int = 1000
    ) -> WorkerLeases:
        """The leases that a worker process holds, by execution id."""
        ...

    async def list_workers(
        self, namespace: str | None = "default", after: str = "", limit: int | None = 1000
    ) -> list[WorkerEntry]:
        """Live worker processes by instance id, at most `limit` of those after `after`.

        None stands for all namespaces, and for no limit. `after` is an instance id, or the `cursor`
        of the last entry: in several namespaces, workers may have the same instance id. Workers
        whose record is gone are skipped, and damaged ones with a warning. A page shorter than
        `limit` is the last one.
        """
        ...
