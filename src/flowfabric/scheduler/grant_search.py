"""The search for one execution that a worker may get, partition by partition (04 §6)."""

import logging
from collections.abc import Sequence

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import Candidate, ClaimGrant
from flowfabric.core.errors import (
    ContentionError,
    EngineError,
    NotFoundError,
    StateError,
    TransportError,
)
from flowfabric.core.ids import ExecutionId, validate_lane
from flowfabric.engine.api import check
from flowfabric.engine.api.admission import NEEDS_ADMISSION
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import LANE_CLOSED, WORKER_DRAINING, worker_pair
from flowfabric.scheduler.admission import Admissions, Budgets, Decision

log = logging.getLogger(__name__)

_CANDIDATES = 16
_MOST_TRIED = 1024
"""How many candidates of a partition one call tries; the next call continues."""
_MAX_GRANT_TTL_MS = 60_000


class GrantRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker process asks for a grant on which lane, and what it offers."""

    lane_id: str
    worker_id: str
    worker_instance_id: str
    capabilities: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    grant_ttl_ms: int = 5_000
    namespaces: tuple[str, ...] | None = None
    """Those that it serves, in fair turns; None means all."""

    def __post_init__(self) -> None:
        validate_lane(self.lane_id)
        worker_pair(self.worker_id, self.worker_instance_id)
        check.whole(self.grant_ttl_ms, "grant_ttl_ms", 1, _MAX_GRANT_TTL_MS)

    @property
    def offered(self) -> str:
        """CSV of the tokens that the worker offers."""
        return caps.offered_csv(self.capabilities, self.tasks, no_others=False)


class GrantSearch:
    """One call of `claim_for_worker`: what it found out, and the faults that it skipped."""

    def __init__(self, backend: Backend, admissions: Admissions, request: GrantRequest) -> None:
        self._backend = backend
        self._admissions = admissions
        self._request = request
        self._budgets: Budgets = {}
        self.failures: list[EngineError] = []
        self.drained: set[str] = set()
        """The namespaces with work of which the worker gets nothing, as an operator drains it."""

    async def take(self, lane_id: str, tag: str, _: int) -> tuple[list[ClaimGrant], bool]:
        """A grant for the first candidate that can get one, and whether to look there again."""
        try:
            return await self._first(lane_id, tag)
        except EngineError as error:
            extra = {"action": "claim_failed"}
            log.warning("partition %s not searched: %s", tag, error, extra=extra)
            self.failures.append(error)
        return [], False

    async def _first(self, lane_id: str, tag: str) -> tuple[list[ClaimGrant], bool]:
        request, limit, tried = self._request, _CANDIDATES, set[ExecutionId]()
        while True:
            found = await self._backend.claims.scan_eligible_executions(
                *(lane_id, tag, limit, request.capabilities, request.tasks, request.namespaces),
                lost=True,
                without=tuple(self.drained),
            )
            page = _CandidatePage([each for each in found if each not in tried])
            grant = await self._first_of(page)
            tried.update(page.ids)
            if grant is not None:
                return [grant], page.held_back or grant.execution_id != found[-1]
            if page.closed:
                return [], False
            if page.drained:
                continue
            if len(found) < limit or len(tried) >= _MOST_TRIED:
                return [], page.held_back
            # What is left in line is reserved for others: look past it.
            limit *= 4

    async def _first_of(self, page: "_CandidatePage") -> ClaimGrant | None:
        for position, execution_id in enumerate(page.ids):
            try:
                grant = await self._granted(page, position)
            except TransportError:
                raise
            except (ContentionError, StateError, NotFoundError) as error:
                # Others may have granted, claimed or cancelled it since it was read.
                page.closed = error.details == (LANE_CLOSED,)
                if error.details == (WORKER_DRAINING,):
                    await self._leave_out(page, position)
                    break
                grant = None
            except EngineError as error:
                # It stays in line, and hides nothing after it.
                extra = {"action": "candidate_skipped", "execution_id": execution_id}
                log.warning("%s cannot be granted: %s", execution_id, error, extra=extra)
                grant = None
            if grant is not None or page.closed:
                return grant
        return await self._admitted(page, page.alike) if page.alike else None

    async def _leave_out(self, page: "_CandidatePage", position: int) -> None:
        """End a page at a candidate of whose namespace the worker gets nothing."""
        page.drained = True
        del page.ids[position + 1 :]
        namespace = await self._backend.reads.get_execution_namespace(page.ids[position])
        if namespace is not None:
            self.drained.add(namespace)

    async def _granted(self, page: "_CandidatePage", position: int) -> ClaimGrant | None:
        """The grant; None if budgets or the quota of the execution do not admit it now."""
        execution_id = page.ids[position]
        try:
            return await self._grant(execution_id)
        except ContentionError as error:
            if error.details != (NEEDS_ADMISSION,):
                raise
        if page.candidates is None:
            read = await self._backend.admission.read_candidates(page.ids[position:])
            page.candidates = dict(zip(page.ids[position:], read, strict=True))
        candidate = page.candidates[execution_id]
        if isinstance(candidate, EngineError):
            raise candidate
        if candidate.quota_policy_id in page.full:
            page.alike.append(candidate)
            return None
        return await self._admitted(page, [candidate])

    async def _admitted(
        self, page: "_CandidatePage", asking: Sequence[Candidate]
    ) -> ClaimGrant | None:
        """A grant for the first of these that is admitted; the others are held back."""
        decision = await self._admissions.decide(
            asking, slot_ttl_ms=self._request.grant_ttl_ms, known=self._budgets
        )
        self.failures.extend(decision.faults)
        if decision.blocks:
            page.held_back = True
            page.full.update(block.waits_for for block in decision.blocks)
            await self._admissions.hold_back(asking[0].execution_id.tag, decision.blocks)
        return await self._first_admitted(decision)

    async def _first_admitted(self, decision: Decision) -> ClaimGrant | None:
        if not decision.admitted:
            return None
        ids = [each.execution_id for each in decision.admitted]
        try:
            grant = await self._grant(ids[0], admitted=decision.admitted[0].run)
        except EngineError:
            await self._admissions.undo(decision, ids)
            raise
        await self._admissions.undo(decision, ids[1:])
        return grant

    async def _grant(self, execution_id: ExecutionId, *, admitted: int = 0) -> ClaimGrant:
        request = self._request
        return await self._backend.claims.issue_claim_grant(
            execution_id,
            worker_id=request.worker_id,
            worker_instance_id=request.worker_instance_id,
            worker_capabilities=request.capabilities,
            worker_tasks=request.tasks,
            grant_ttl_ms=request.grant_ttl_ms,
            lane_id=request.lane_id,
            admitted=admitted,
            lost=True,
        )


class _CandidatePage:
    """Candidates of a partition that were read together, best first."""

    def __init__(self, ids: list[ExecutionId]) -> None:
        self.ids = ids
        self.candidates: dict[ExecutionId, Candidate | EngineError] | None = None
        """What each names, read together as soon as one needs admission."""
        self.full: set[str] = set()
        """The quotas that refused one: the others that name them are asked about together."""
        self.alike: list[Candidate] = []
        self.held_back = False
        self.closed = False
        """Whether the lane starts nothing here, even if work waits."""
        self.drained = False
        """Whether it ends at a candidate that the worker does not get because it is drained."""
