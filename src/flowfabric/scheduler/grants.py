"""Grants for workers that claim through a server (`claim_for_worker`)."""

import contextlib
import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import ClassVar, Literal

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import ContentionError, EngineError, NotFoundError, StateError
from flowfabric.core.ids import fnv1a64, validate_lane, validate_worker_id
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.concern import provide
from flowfabric.scheduler.hints import WINDOW, LaneHints, window

log = logging.getLogger(__name__)

_CANDIDATES = 16
_ROTATION_S = 0.25
_MAX_GRANT_TTL_MS = 60_000


class NoWork(msgspec.Struct, frozen=True):
    """Nothing that the worker may take waits in the partitions that were visited."""

    kind: ClassVar[Literal["no_work"]] = "no_work"


class WorkerGrants:
    """Reserves work for workers that claim through a server.

    Keep one per process: it remembers where work was left, and which partitions come next.

    >>> grants = WorkerGrants(backend)
    >>> grant = await grants.claim_for_worker("default", "pool", "pool-1")
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._hinted: dict[str, LaneHints] = {}
        self._cursor = 0
        self._moved_at = time.monotonic()

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
    ) -> ClaimGrant | NoWork:
        """Reserve one waiting execution of a lane for a worker.

        Visits the lane's own partition, then those where work was left, then a window of the
        others. A partition that cannot be searched is skipped; its error is raised when no other
        has work.
        """
        counts, claims = self._backend.counts, self._backend.claims
        lane = self._hinted.get(lane_id) or LaneHints(validate_lane(lane_id), counts, 0)
        validate_worker_id(worker_id)
        start = self._start(validate_worker_id(worker_instance_id, "worker_instance_id"))
        offered = caps.normalise(worker_capabilities, "worker")
        tasks = check.texts(worker_tasks, "worker_tasks")
        grant = partial(
            claims.issue_claim_grant,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            worker_capabilities=offered,
            worker_tasks=tasks,
            grant_ttl_ms=check.whole(grant_ttl_ms, "grant_ttl_ms", 1, _MAX_GRANT_TTL_MS),
            lane_id=lane_id,
        )
        failures: list[EngineError] = []

        async def take(lane_id: str, tag: str, _: int) -> tuple[list[ClaimGrant], bool]:
            try:
                found = await claims.scan_eligible_executions(
                    lane_id, tag, _CANDIDATES, offered, tasks
                )
                for execution_id in found:
                    # Others may have granted, claimed or cancelled it since it was read.
                    with contextlib.suppress(ContentionError, StateError, NotFoundError):
                        return [await grant(execution_id)], execution_id != found[-1]
            except EngineError as error:
                extra = {"action": "claim_failed"}
                log.warning("partition %s not searched: %s", tag, error, extra=extra)
                failures.append(error)
            return [], False

        tags = list(dict.fromkeys((lane.home, *lane.hinted, *window(start, counts))))
        tags = await self._backend.wakeups.find_work(lane_id, tags)
        grants = await lane.visit(tags, 1, take)
        if lane.hinted:
            self._hinted[lane_id] = lane
        else:
            self._hinted.pop(lane_id, None)
        if failures and not grants:
            raise failures[0]
        return grants[0] if grants else NoWork()

    def _start(self, instance: str) -> int:
        """Where the window of a worker begins: workers are spread out, and all windows move on."""
        now = time.monotonic()
        if now - self._moved_at >= _ROTATION_S:
            self._moved_at = now
            self._cursor += WINDOW
        return fnv1a64(instance.encode()) + self._cursor
