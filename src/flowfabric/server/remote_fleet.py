"""Remote workers, which are registered and kept alive by their calls (04 §9)."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import solo_partition
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.workers import Heartbeat
from flowfabric.engine.outage import Outage
from flowfabric.scheduler.routes import release_routes

log = logging.getLogger(__name__)

_PROMPT_S = 0.5
_MAX_KNOWN = 10_000
_LEAST_LIVENESS_MS = 60_000
"""More than two of the longest polls, so that a waiting worker counts as alive."""


class RemoteWorker(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is registered."""

    worker_id: str
    worker_instance_id: str
    lanes: tuple[str, ...]
    capabilities: tuple[str, ...]
    tasks: tuple[str, ...]
    takes_other_tasks: bool
    namespace: str
    namespaces: tuple[str, ...]
    lease_ttl_ms: int

    @property
    def liveness_ttl_ms(self) -> int:
        """How long it is listed after its last call."""
        return max(2 * self.lease_ttl_ms, _LEAST_LIVENESS_MS)


class _Known(msgspec.Struct):
    worker: RemoteWorker
    seen_at: float
    start_id: str | None = None
    """The request with which it started."""


class RemoteFleet:
    """The workers that have called this server lately."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[tuple[str, str], _Known] = {}
        self._renewing: dict[tuple[str, str], asyncio.Task[Heartbeat | None]] = {}

    async def claims(self, worker: RemoteWorker) -> None:
        """Register a worker that claims, unless that happened recently."""
        key = worker.namespace, worker.worker_instance_id
        known = self._known.get(key)
        if known is None or known.worker != worker:
            await self._soon(key, self._register(worker))
        elif _is_due(known):
            await self._soon(key, self._beat_or_register(known))

    async def _beat_or_register(self, known: _Known) -> Heartbeat | None:
        beat = await self._beat(known)
        if beat is None:
            await self._register(known.worker)
        return beat

    async def _soon(
        self, key: tuple[str, str], renewing: Coroutine[Any, Any, Heartbeat | None]
    ) -> Heartbeat | None:
        """What renewing a registration returns; None if it takes long or meets an outage.

        No claim and no lease depends on it.
        """
        if key in self._renewing:
            renewing.close()
            return None
        task = self._renewing[key] = asyncio.create_task(renewing)
        task.add_done_callback(partial(self._renewed, key))
        done, _ = await asyncio.wait([task], timeout=_PROMPT_S)
        if not done or ((error := task.exception()) is not None and Outage.causes(error)):
            return None
        return task.result()

    def _renewed(self, key: tuple[str, str], task: asyncio.Task[Heartbeat | None]) -> None:
        del self._renewing[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("cannot renew the registration of %s: %s", key[1], error)

    async def aclose(self) -> None:
        """Stop renewing registrations."""
        if tasks := list(self._renewing.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def starts(self, worker: RemoteWorker, request_id: str | None) -> None:
        """Register a worker that starts, unless another one with its instance id is alive.

        A repeat of the request does not count as another worker.
        """
        await self._register(worker, request_id or new_uuid())

    async def beats(self, worker: RemoteWorker) -> bool:
        """Renew the registration of a worker; returns whether it is being drained."""
        key = worker.namespace, worker.worker_instance_id
        known = self._known.get(key)
        if known is None or known.worker != worker:
            await self._register(worker)
            known = self._known[key]
        beat = await self._beat(known)
        if beat is None:
            await self._register(worker)
        return beat is not None and beat.draining

    async def renews(self, instance: str, namespace: str) -> bool:
        """Renew the registration of a worker that renews leases; returns whether it is drained."""
        known = self._known.get((namespace, instance))
        if known is not None and not _is_due(known):
            return False
        if known is None:
            beating = self._backend.workers.heartbeat_worker(instance, namespace)
        else:
            beating = self._beat(known)
        beat = await self._soon((namespace, instance), beating)
        return beat is not None and beat.draining

    async def leaves(self, worker: RemoteWorker) -> None:
        """Remove a worker that stops from the registry."""
        self._known.pop((worker.namespace, worker.worker_instance_id), None)
        await self._backend.workers.mark_worker_dead(
            worker.worker_instance_id, worker.namespace, "shutdown"
        )

    async def _beat(self, known: _Known) -> Heartbeat | None:
        """Renew a registration; None if the worker is no longer registered."""
        worker = known.worker
        beat = await self._backend.workers.heartbeat_worker(
            worker.worker_instance_id, worker.namespace
        )
        if beat is not None:
            known.seen_at = time.monotonic()
        return beat

    async def _register(self, worker: RemoteWorker, starts_as: str | None = None) -> None:
        backend, lanes = self._backend, worker.lanes
        key = worker.namespace, worker.worker_instance_id
        known = self._known.get(key)
        start_id = starts_as or (None if known is None else known.start_id)
        await backend.workers.register_worker(
            worker_id=worker.worker_id,
            worker_instance_id=worker.worker_instance_id,
            lanes=lanes,
            capabilities=worker.capabilities,
            tasks=worker.tasks,
            takes_other_tasks=worker.takes_other_tasks,
            liveness_ttl_ms=worker.liveness_ttl_ms,
            namespace=worker.namespace,
            namespaces=worker.namespaces,
            only_if_absent=starts_as is not None,
            start_id=start_id,
        )
        if len(self._known) >= _MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        self._known[key] = _Known(worker, time.monotonic(), start_id)
        places: dict[str, list[str]] = {}
        for lane in lanes:
            home = f"{{fp:{solo_partition(lane, backend.counts)}}}"
            places.setdefault(home, []).append(lane)
        await backend.places.register_places(places)
        used = await backend.places.lanes_by_partition()
        # Some executions may be blocked until a worker like this one registers.
        await release_routes(backend, {tag: names & set(lanes) for tag, names in used.items()})


def _is_due(known: _Known) -> bool:
    return time.monotonic() - known.seen_at >= known.worker.liveness_ttl_ms / 3000
