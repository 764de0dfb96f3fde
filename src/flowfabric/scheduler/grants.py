"""Grants for workers that claim through a server (`claim_for_worker`)."""

import contextlib
import logging
import math
import time
from collections.abc import Iterable

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import ClaimGrant, NoWork
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import fnv1a64, validate_namespaces
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.concern import provide
from flowfabric.engine.metrics import UNKNOWN, active
from flowfabric.scheduler.admission import Admissions
from flowfabric.scheduler.cycles import measure_cycle
from flowfabric.scheduler.grant_search import GrantRequest, GrantSearch
from flowfabric.scheduler.hints import WINDOW, LaneHints, window

log = logging.getLogger(__name__)

_ROTATION_S = 0.25
_LANES_S = 60.0
"""How often the registered lanes are read again for the names of metrics."""


class WorkerDraining(msgspec.Struct, frozen=True):
    """An operator drains the worker: it gets no work."""


class WorkerGrants:
    """Reserves work for workers that claim through a server.

    Keep one per process: it remembers where work was left, and which partitions come next.

    >>> grants = WorkerGrants(backend)
    >>> grant = await grants.claim_for_worker("default", "pool", "pool-1")
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._admissions = Admissions(backend)
        self._hinted: dict[str, LaneHints] = {}
        self._cursor = 0
        self._moved_at = time.monotonic()
        self._lanes: frozenset[str] = frozenset()
        self._lanes_read_at = -math.inf

    def attach(self) -> None:
        """Make this the `claim_for_worker` of the backend's claims."""
        provide(self._backend.claims, self.claim_for_worker)

    async def claim_for_worker(
        self,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        *,
        worker_capabilities: Iterable[str] = (),
        worker_tasks: Iterable[str] = (),
        grant_ttl_ms: int = 5_000,
        namespaces: Iterable[str] | None = None,
    ) -> ClaimGrant | NoWork:
        """Reserve one waiting execution of a lane for a worker.

        Serves these namespaces in turn, or all.
        Visits the lane's own partitions, then those where work was left, then a window of the
        others. A partition that cannot be searched is skipped; its error is raised when no other
        has work.
        """
        spaces = None if namespaces is None else validate_namespaces(namespaces)
        request = GrantRequest(
            lane_id=lane_id,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=caps.normalise(worker_capabilities, "worker"),
            tasks=tuple(check.texts(worker_tasks, "worker_tasks")),
            grant_ttl_ms=grant_ttl_ms,
            namespaces=spaces,
        )
        lane = self._hinted.get(lane_id) or LaneHints(lane_id, self._backend.counts, 0)
        grant = await self.claim_hinted(request, lane)
        if lane.hinted:
            self._hinted[lane_id] = lane
        else:
            self._hinted.pop(lane_id, None)
        return grant if isinstance(grant, ClaimGrant) else NoWork()

    async def claim_hinted(
        self, request: GrantRequest, lane: LaneHints
    ) -> ClaimGrant | NoWork | WorkerDraining:
        """`claim_for_worker` with hints that belong to the caller, and are updated."""
        meter, since = active(), time.monotonic()
        if meter is None:
            return await self._cycle(request, lane)
        found: list[ClaimGrant] | None = None
        try:
            outcome = await self._cycle(request, lane)
            found = [outcome] if isinstance(outcome, ClaimGrant) else []
            return outcome
        finally:
            # Clients may ask for any name.
            known = found or await self._is_registered(request.lane_id)
            measure_cycle(meter, request.lane_id if known else UNKNOWN, since, found)

    async def _is_registered(self, lane_id: str) -> bool:
        now = time.monotonic()
        if lane_id not in self._lanes and now - self._lanes_read_at >= _LANES_S:
            self._lanes_read_at = now
            with contextlib.suppress(EngineError):
                self._lanes = frozenset(await self._backend.places.lanes_in_use())
        return lane_id in self._lanes

    async def _cycle(
        self, request: GrantRequest, lane: LaneHints
    ) -> ClaimGrant | NoWork | WorkerDraining:
        counts, lane_id = self._backend.counts, request.lane_id
        start, since = self._start(request.worker_instance_id), time.monotonic()
        search = GrantSearch(self._backend, self._admissions, request)
        asked = dict.fromkeys(
            (*lane.own(self._backend, start), *lane.hinted, *window(start, counts))
        )
        # A hint that comes while this looks stays.
        hinted = lane.take_hints()
        found = await self._backend.wakeups.find_work([(lane_id, tag) for tag in asked])
        tags = [tag for _, tag in found]
        for tag in hinted:
            if tag in tags:
                lane.add(tag)
        grants = await lane.visit(tags, 1, search.take)
        log.debug(
            "claim cycle of %s on lane %s: %s",
            *(request.worker_instance_id, lane_id, "granted" if grants else "no work"),
            extra={
                "action": "claim_cycle",
                "worker_instance_id": request.worker_instance_id,
                "start_p": start % counts.flow,
                "partitions_visited": len(asked),
                "partitions_skipped": len(asked) - len(tags),
                "partitions_hit": len(grants),
                "elapsed_ms": round((time.monotonic() - since) * 1000, 3),
            },
        )
        if grants:
            return grants[0]
        if search.failures:
            raise search.failures[0]
        return WorkerDraining() if search.drained else NoWork()

    def _start(self, instance: str) -> int:
        """Where the window of a worker begins: workers are spread out, and all windows move on."""
        now = time.monotonic()
        if now - self._moved_at >= _ROTATION_S:
            self._moved_at = now
            self._cursor += WINDOW
        return fnv1a64(instance.encode()) + self._cursor
