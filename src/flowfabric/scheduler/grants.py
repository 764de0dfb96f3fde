"""Grants for workers that claim through a server (`claim_for_worker`)."""

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import ContentionError, EngineError, NotFoundError, StateError
from flowfabric.core.ids import ExecutionId, fnv1a64, validate_lane, validate_worker_id
from flowfabric.engine.api import check
from flowfabric.engine.api.admission import NEEDS_ADMISSION
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.concern import provide
from flowfabric.scheduler.admission import Admissions, Budgets, Decision
from flowfabric.scheduler.cycles import measures_grants
from flowfabric.scheduler.hints import WINDOW, LaneHints, window

log = logging.getLogger(__name__)

_CANDIDATES = 16
_MOST_TRIED = 1024
"""How many candidates of a partition one call tries; the next call continues."""
_ROTATION_S = 0.25
_MAX_GRANT_TTL_MS = 60_000


Scan = Callable[[int], Awaitable[list[ExecutionId]]]
"""Reads so many candidates of a partition, best first."""


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
        self._admissions = Admissions(backend)
        self._hinted: dict[str, LaneHints] = {}
        self._cursor = 0
        self._moved_at = time.monotonic()

    def attach(self) -> None:
        """Make this the `claim_for_worker` of the backend's claims."""
        provide(self._backend.claims, self.claim_for_worker)

    @measures_grants
    async def claim_for_worker(
        self,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        *,
        worker_capabilities: Iterable[str] = (),
        worker_tasks: Iterable[str] = (),
        grant_ttl_ms: int = 5_000,
        namespace: str | None = None,
    ) -> ClaimGrant | NoWork:
        """Reserve one waiting execution of a lane for a worker.

        Serves all namespaces in turn, or only one.
        Visits the lane's own partitions, then those where work was left, then a window of the
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
        budgets: Budgets = {}
        since = time.monotonic()

        async def take(lane_id: str, tag: str, _: int) -> tuple[list[ClaimGrant], bool]:
            def scan(limit: int) -> Awaitable[list[ExecutionId]]:
                return claims.scan_eligible_executions(
                    lane_id, tag, limit, offered, tasks, namespace
                )

            try:
                return await self._first(scan, grant, budgets, failures)
            except EngineError as error:
                extra = {"action": "claim_failed"}
                log.warning("cannot search partition %s for work: %s", tag, error, extra=extra)
                failures.append(error)
            return [], False

        asked = dict.fromkeys(
            (*lane.own(self._backend, start), *lane.hinted, *window(start, counts))
        )
        found = await self._backend.wakeups.find_work([(lane_id, tag) for tag in asked])
        tags = [tag for _, tag in found]
        grants = await lane.visit(tags, 1, take)
        log.debug(
            "claim cycle of %s on lane %s: %s",
            *(worker_instance_id, lane_id, "granted" if grants else "no work"),
            extra={
                "action": "claim_cycle",
                "worker_instance_id": worker_instance_id,
                "start_p": start % counts.flow,
                "partitions_visited": len(asked),
                "partitions_skipped": len(asked) - len(tags),
                "partitions_hit": len(grants),
                "elapsed_ms": round((time.monotonic() - since) * 1000, 3),
            },
        )
        if lane.hinted:
            self._hinted[lane_id] = lane
        else:
            self._hinted.pop(lane_id, None)
        if failures and not grants:
            raise failures[0]
        return grants[0] if grants else NoWork()

    async def _first(
        self, scan: Scan, grant: partial[Any], budgets: Budgets, failures: list[EngineError]
    ) -> tuple[list[ClaimGrant], bool]:
        """A grant for the first candidate that can get one, and whether to look there again."""
        limit, tried, more = _CANDIDATES, set[ExecutionId](), False
        while True:
            found, held_back = await scan(limit), False
            for execution_id in (each for each in found if each not in tried):
                tried.add(execution_id)
                # Others may have granted, claimed or cancelled it since it was read.
                with contextlib.suppress(ContentionError, StateError, NotFoundError):
                    granted = await self._granted(execution_id, grant, budgets)
                    if not isinstance(granted, Decision):
                        return [granted], more or execution_id != found[-1]
                    failures.extend(granted.faults)
                    more = held_back = True
            if len(found) < limit or len(tried) >= _MOST_TRIED:
                return [], more
            if not held_back:
                # They are reserved for others and stay in line: look past them.
                limit *= 4

    async def _granted(
        self,
        execution_id: ExecutionId,
        grant: partial[Any],
        known: Budgets,
    ) -> ClaimGrant | Decision:
        """The grant, or why the budgets or the quota of the execution do not admit it now."""
        try:
            return await grant(execution_id)
        except ContentionError as error:
            if error.details != (NEEDS_ADMISSION,):
                raise
        (candidate,) = await self._backend.admission.read_candidates([execution_id])
        if isinstance(candidate, EngineError):
            raise candidate
        decision = await self._admissions.decide(
            [candidate], slot_ttl_ms=grant.keywords["grant_ttl_ms"], known=known
        )
        if not decision.admitted:
            await self._admissions.hold_back(execution_id.tag, decision.blocks)
            return decision
        try:
            return await grant(execution_id, admitted=True)
        except EngineError:
            await self._admissions.undo(decision, [execution_id])
            raise

    def _start(self, instance: str) -> int:
        """Where the window of a worker begins: workers are spread out, and all windows move on."""
        now = time.monotonic()
        if now - self._moved_at >= _ROTATION_S:
            self._moved_at = now
            self._cursor += WINDOW
        return fnv1a64(instance.encode()) + self._cursor
