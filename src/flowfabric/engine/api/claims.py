"""Claiming work: from a lane, by a grant, or from a worker that lost its lease."""

from collections.abc import Iterable, Sequence
from typing import Protocol, Required, TypedDict, Unpack

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts import leases
from flowfabric.core.contracts.leases import Claim, ClaimGrant
from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    validate_lane,
    validate_namespaces,
    validate_worker_id,
)
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern
from flowfabric.engine.api.executions import End, EndOutcome

LANE_CLOSED = "lane closed"
WORKER_DRAINING = "worker draining"
"""Why a grant is refused for any execution."""


class ClaimRequest(msgspec.Struct, frozen=True):
    """Which worker process claims from which lane. Build it once and use it for every claim."""

    lane_id: str
    worker_id: str
    worker_instance_id: str
    capabilities: str = ""
    """CSV of the tokens the worker offers, as `capabilities.offered_csv` builds it."""
    lease_ttl_ms: int = 30_000
    namespaces: tuple[str, ...] | None = None
    """Those that the worker serves, in fair turns; None means all."""

    def __post_init__(self) -> None:
        validate_lane(self.lane_id)
        worker_pair(self.worker_id, self.worker_instance_id)
        check.text(self.capabilities, "capabilities")
        check.positive_ms(self.lease_ttl_ms, "lease_ttl_ms")
        if self.namespaces is not None and not validate_namespaces(self.namespaces):
            raise invalid_input("namespaces", "must name at least one; pass None for all")

    @property
    def offer(self) -> caps.Offer:
        """What the worker may take."""
        return caps.Offer(self.capabilities, self.namespaces)


class GrantOptions(TypedDict, total=False):
    """Who may claim with a grant, for how long, and what is recorded about the decision."""

    worker_id: Required[str]
    worker_instance_id: Required[str]
    worker_capabilities: Iterable[str]
    worker_tasks: Iterable[str]
    grant_ttl_ms: int
    lane_id: str
    admitted: int
    lost: bool
    capability_hash: str
    route_snapshot_json: str
    admission_summary: str


class Claims(Concern, Protocol):
    """Claiming work: from a lane, by a grant, or from a worker that lost its lease."""

    async def claim_many(
        self, request: ClaimRequest, tag: str, max_n: int, *, request_id: str | None = None
    ) -> leases.ClaimedMany:
        """Claim up to `max_n` executions of one lane and partition in one step.

        They may be new, resumed or reclaimed. Repeating a request id returns the first answer.
        """
        ...

    async def complete_and_claim(
        self,
        tag: str,
        items: Sequence[End],
        request: ClaimRequest,
        max_n: int,
        *,
        request_id: str | None = None,
    ) -> tuple[list[EndOutcome], leases.ClaimedMany]:
        """Complete and fail executions of one partition and claim the next ones in one round trip.

        The ends commit first and never depend on the claim, nor the claim on them. None means
        completed. Repeating a request id returns the claims that its first call made, also without
        the items.
        """
        ...

    async def claim_admitted(
        self,
        request: ClaimRequest,
        tag: str,
        candidates: Sequence[leases.Candidate],
        *,
        request_id: str | None = None,
    ) -> list[Claim]:
        """Claim those of `ClaimedMany.needing` that budgets and quotas admitted.

        Executions that can no longer be claimed, or only for a later run, are left out. Repeating a
        request id returns the first answer.
        """
        ...

    async def scan_eligible_executions(
        self,
        lane_id: str,
        tag: str,
        limit: int,
        worker_capabilities: Iterable[str] | None = None,
        worker_tasks: Iterable[str] = (),
        namespaces: Iterable[str] | None = None,
        *,
        lost: bool = False,
        without: Iterable[str] = (),
    ) -> list[ExecutionId]:
        """Up to `limit` waiting executions in claim order. Reads only.

        With capabilities, only those that a worker with them may take, and with these tasks;
        namespaces then take turns. With namespaces, only those of them, and none of the namespaces
        in `without`. With `lost`, also executions whose worker lost its lease.
        """
        ...

    async def issue_claim_grant(
        self, execution_id: ExecutionId, **options: Unpack[GrantOptions]
    ) -> ClaimGrant:
        """Reserve one eligible execution for one worker; it stays in its index until claimed.

        `admitted`: the run that its budgets and its quota admitted (`Candidate.run`). Without that,
        an execution that names some is refused: `claim_for_worker` asks them first. `lost`: it may
        also be an execution whose worker lost its lease, once its lane offers it; use the grant to
        reclaim it.
        """
        ...

    async def issue_reclaim_grant(
        self, execution_id: ExecutionId, **options: Unpack[GrantOptions]
    ) -> leases.ReclaimGrantOutcome:
        """Reserve an execution whose lease expired or was revoked."""
        ...

    async def release_grant(self, grant: ClaimGrant) -> None:
        """Return a grant that is not used, so that others may claim at once.

        A grant that is no longer valid is ignored.
        """
        ...

    async def claim_execution(
        self,
        grant: ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
    ) -> Claim:
        """Turn a claim grant into a lease and a new attempt; a repeat returns the same claim."""
        ids = (check.uuid(lease_id, "lease_id"), check.uuid(attempt_id, "attempt_id"))
        lane, ttl = check.text(lane_id, "lane_id"), check.positive_ms(lease_ttl_ms, "lease_ttl_ms")
        worker = (worker_id, worker_instance_id)
        return await self._claim("claim_execution", grant, lane, worker, ttl, *ids)

    async def claim_resumed_execution(
        self,
        grant: ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        lane_id: str = "",
        lease_id: str | None = None,
    ) -> Claim:
        """Take over a paused attempt: same attempt, new lease, next epoch."""
        new_lease = check.uuid(lease_id, "lease_id")
        lane, ttl = check.text(lane_id, "lane_id"), check.positive_ms(lease_ttl_ms, "lease_ttl_ms")
        worker = (worker_id, worker_instance_id)
        return await self._claim("claim_resumed", grant, lane, worker, ttl, new_lease)

    async def _claim(
        self, op: str, grant: ClaimGrant, lane: str, worker: tuple[str, str], ttl: int, *ids: str
    ) -> Claim:
        """Use a grant; `ids` are those of the lease and of a new attempt."""
        ...

    async def claim_from_resume_grant(
        self,
        grant: leases.ResumeGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
    ) -> Claim:
        """`claim_resumed_execution` on the grant's own lane."""
        return await self.claim_resumed_execution(
            check.instance(grant, leases.ResumeGrant, "grant"),
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
            lane_id=grant.lane_id,
        )

    async def issue_grant_and_claim(
        self,
        execution_id: ExecutionId,
        *,
        lease_duration_ms: int,
        lane_id: str = "",
        worker_id: str = "operator",
        worker_instance_id: str = "operator",
        request_id: str | None = None,
    ) -> Claim:
        """An operator takes one named execution: no capability, budget or quota check.

        Repeating a request id returns the first answer.
        """
        ...

    async def reclaim_execution(
        self,
        grant: leases.ReclaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        max_reclaim_count: int | None = None,
        lease_id: str | None = None,
        attempt_id: str | None = None,
    ) -> leases.ReclaimOutcome:
        """Turn a reclaim grant into a lease and a new attempt; at the cap the execution fails."""
        ...

    async def block_execution_for_admission(
        self,
        execution_id: ExecutionId,
        reason: str,
        reason_detail: str = "",
        *,
        lane_id: str = "",
        retry_at: int | None = None,
    ) -> leases.BlockOutcome:
        """Hold back an execution that could be claimed now, for a `BlockingReason`.

        Accepts `waiting_for_budget`, `waiting_for_quota`, `waiting_for_capable_worker`,
        `paused_by_operator` and `paused_by_policy`. `retry_at`: when the cause is expected to end.
        """
        ...

    async def block_route(
        self,
        execution_id: ExecutionId,
        reason_code: str = "waiting_for_capable_worker",
        reason_detail: str = "",
        *,
        lane_id: str = "",
    ) -> leases.BlockOutcome:
        """`block_execution_for_admission` for work that no live worker can take."""
        return await self.block_execution_for_admission(
            execution_id, check.text(reason_code, "reason_code"), reason_detail, lane_id=lane_id
        )

    async def unblock_execution(
        self, execution_id: ExecutionId, *, expected_blocking_reason: str = ""
    ) -> leases.Unblocked:
        """Let a blocked execution wait for a worker again; admission decides when it is claimed.

        With an expected reason, a block for another reason stays.
        """
        ...


def worker_pair(worker_id: str, worker_instance_id: str) -> str:
    """Both identities in the one form the record keeps."""
    validate_worker_id(worker_id)
    validate_worker_id(worker_instance_id, "worker_instance_id")
    return f"{worker_id} {worker_instance_id}"
