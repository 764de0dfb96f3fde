"""Where a worker gets its tasks: from the store, with the scheduler in its own process."""

from collections.abc import Callable, Mapping
from typing import Protocol

from flowfabric.core.contracts.leases import Claim
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.outage import Outage
from flowfabric.scheduler.claim_loop import ClaimLoop
from flowfabric.scheduler.claims import WorkerClaims
from flowfabric.scheduler.permits import ClaimPermits
from flowfabric.scheduler.routes import release_routes
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.task import ClaimedTask

Adopt = Callable[[Claim, float], ClaimedTask]
"""Makes a task from a claim and the time at which the claim was requested."""
Start = Callable[[ClaimedTask], None]


class ClaimingLoop(Protocol):
    """Claims while permits are free, and starts what it claims."""

    def stop(self) -> None:
        """Claim nothing more."""
        ...

    async def run(self) -> None:
        """Serve until `stop`; raises permanent errors only."""
        ...


class WorkSource(Protocol):
    """Where a worker gets its tasks, and where it is registered."""

    @property
    def claims(self) -> ClaimPermits[ClaimedTask]:
        """Permits and claims of this process."""
        ...

    def new_loop(self, start: Start, *, batch: int, listen_s: float) -> ClaimingLoop:
        """What claims for as long as the worker serves."""
        ...

    async def register(self, *, only_if_absent: bool) -> None:
        """Register this process."""
        ...

    async def beat(self) -> bool | None:
        """Renew the registration. Returns whether it is being drained; None if it is missing."""
        ...

    async def leave(self) -> None:
        """End the registration."""
        ...


class StoreSource:
    """Claims from the store: this process runs the scheduler itself."""

    def __init__(
        self,
        config: WorkerConfig,
        backend: Backend,
        requests: Mapping[str, ClaimRequest],
        adopt: Adopt,
        outage: Outage,
    ) -> None:
        poll_s = config.claim_poll_interval_ms / 1000
        self.claims = WorkerClaims(
            *(backend, requests, adopt, config.permits, poll_s),
            outage=outage,
            weights=config.lane_weights,
        )
        self._config = config
        self._backend = backend

    def new_loop(self, start: Start, *, batch: int, listen_s: float) -> ClaimingLoop:
        """What claims for as long as the worker serves."""
        return ClaimLoop(self.claims, start, batch=batch, listen_s=listen_s)

    async def register(self, *, only_if_absent: bool) -> None:
        """Register this process and its lanes."""
        config = self._config
        await self._backend.workers.register_worker(
            worker_id=config.worker_id,
            worker_instance_id=config.worker_instance_id,
            lanes=config.lanes,
            capabilities=config.capabilities,
            tasks=self.claims.tasks,
            takes_other_tasks=not self.claims.no_others,
            liveness_ttl_ms=config.liveness_ttl_ms,
            namespace=config.namespace,
            namespaces=config.namespaces,
            only_if_absent=only_if_absent,
        )
        await self._backend.places.register_places(self._home_places())
        self.claims.in_background(self._release_unroutable)

    async def _release_unroutable(self) -> None:
        """Unblock executions that wait for a worker like this one."""
        used = await self._backend.places.lanes_by_partition()
        places = {tag: lanes & set(self._config.lanes) for tag, lanes in used.items()}
        await release_routes(self._backend, places)

    def _home_places(self) -> dict[str, list[str]]:
        """The lanes of this worker, by the partition where each one is at home."""
        places: dict[str, list[str]] = {}
        for lane in self.claims.lanes:
            places.setdefault(lane.home, []).append(lane.lane_id)
        return places

    async def beat(self) -> bool | None:
        """Renew the registration of this process and its lanes."""
        config, places = self._config, self._backend.places
        beat = await self._backend.workers.heartbeat_worker(
            config.worker_instance_id, config.namespace
        )
        for tag, lanes in self._home_places().items():
            places.known_places.setdefault(tag, set()).update(lanes)
        await places.register_again()
        return None if beat is None else beat.draining

    async def leave(self) -> None:
        """End the registration."""
        config = self._config
        await self._backend.workers.mark_worker_dead(
            config.worker_instance_id, config.namespace, "shutdown"
        )
