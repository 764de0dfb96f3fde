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
"""Makes a task of a claim and of when it was asked for."""
Start = Callable[[ClaimedTask], None]


class ClaimingLoop(Protocol):
    """Claims while permits are free, and starts what it claims."""

    def stop(self) -> None:
        """Claim nothing more; a claim under way is still started."""
        ...

    async def run(self) -> None:
        """Serve until `stop`. Only an error that no retry can cure ends it otherwise."""
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
        """Renew the registration; whether an operator drains it, or None if there is none."""
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
        await self._backend.places.register_places(self._places())
        self.claims.in_background(self._release_routes)

    async def _release_routes(self) -> None:
        """Let executions go that were blocked until a worker like this one registers."""
        used = await self._backend.places.lanes_by_partition()
        places = {tag: lanes & set(self._config.lanes) for tag, lanes in used.items()}
        await release_routes(self._backend, places)

    def _places(self) -> dict[str, list[str]]:
        """Where this worker looks for work by default."""
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
        for tag, lanes in self._places().items():
            places.known_places.setdefault(tag, set()).update(lanes)
        await places.register_again()
        return None if beat is None else beat.draining

    async def leave(self) -> None:
        """End the registration."""
        config = self._config
        await self._backend.workers.mark_worker_dead(
            config.worker_instance_id, config.namespace, "shutdown"
        )
