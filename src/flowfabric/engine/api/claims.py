"""Taking work: from a lane, by a grant, or from a worker that lost its lease."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from flowfabric.core.contracts.leases import (
    Claim,
    ClaimedMany,
    ClaimGrant,
    ReclaimGrant,
    ReclaimGrantOutcome,
    ReclaimOutcome,
    ResumeGrant,
)
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, validate_lane, validate_worker_id
from flowfabric.engine.api.arguments import checked_text, positive_ms
from flowfabric.engine.api.executions import Completion

log = logging.getLogger(__name__)


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for work, of which lane, and how much of it."""

    lane_id: str
    worker: str
    """`<worker_id> <worker_instance_id>`, see `ClaimRequest.of`."""
    capabilities: str = ""
    """Sorted CSV of the tokens the worker offers."""
    lease_ttl_ms: int = 30_000

    def __post_init__(self) -> None:
        # Here, once: a request is used for every claim of a worker.
        validate_lane(self.lane_id)
        worker_pair(*checked_text(self.worker, "worker").partition(" ")[::2])
        checked_text(self.capabilities, "capabilities")
        positive_ms(self.lease_ttl_ms, "lease_ttl_ms")

    @classmethod
    def of(
        cls,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        *,
        capabilities: str = "",
        lease_ttl_ms: int = 30_000,
    ) -> ClaimRequest:
        """A request of a worker process; build it once and use it for every claim."""
        return cls(
            lane_id=lane_id,
            worker=worker_pair(worker_id, worker_instance_id),
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
        )

    @property
    def worker_instance_id(self) -> str:
        """The process that will hold the leases."""
        return self.worker.partition(" ")[2]


class Claims(Protocol):
    """Taking work: from a lane, by a grant, or from a worker that lost its lease."""

    async def claim_many(
        self, want: ClaimRequest, tag: str, max_n: int, *, request_id: str | None = None
    ) -> ClaimedMany:
        """Take up to `max_n` executions of one lane and partition in one step.

        The engine picks fresh, resumed or reclaimed per candidate. Repeating a request id gives
        the first answer again.
        """
        ...

    async def complete_and_claim(
        self,
        tag: str,
        items: Sequence[Completion],
        want: ClaimRequest,
        max_n: int,
        *,
        request_id: str | None = None,
    ) -> tuple[list[EngineError | None], ClaimedMany]:
        """Complete executions of one partition and take the next ones there, in one trip.

        The completions commit first and never depend on the claim. None stands for success.
        """
        ...

    async def scan_eligible_executions(
        self, lane_id: str, tag: str, limit: int, worker_capabilities: Iterable[str] | None = None
    ) -> list[ExecutionId]:
        """Up to `limit` waiting executions in claim order. Reads only.

        With capabilities, only those that a worker with them may take.
        """
        ...

    async def issue_claim_grant(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        lane_id: str = "",
        capability_hash: str = "",
        route_snapshot_json: str = "",
        admission_summary: str = "",
    ) -> ClaimGrant:
        """Reserve one eligible execution for one worker; it stays in its index until claimed."""
        ...

    async def issue_reclaim_grant(
        self,
        execution_id: ExecutionId,
        *,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        lane_id: str = "",
        capability_hash: str = "",
        route_snapshot_json: str = "",
        admission_summary: str = "",
    ) -> ReclaimGrantOutcome:
        """Reserve an execution whose lease expired or was revoked."""
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
        """Turn a claim grant into a lease and a new attempt; a repeat gives the same claim."""
        ...

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
        ...

    async def claim_from_resume_grant(
        self, grant: ResumeGrant, *, worker_id: str, worker_instance_id: str, lease_ttl_ms: int
    ) -> Claim:
        """`claim_resumed_execution` on the grant's own lane."""
        ...

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

        Repeating a request id gives the first answer again.
        """
        ...

    async def reclaim_execution(
        self,
        grant: ReclaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int,
        max_reclaim_count: int | None = None,
        lease_id: str | None = None,
        attempt_id: str | None = None,
    ) -> ReclaimOutcome:
        """Turn a reclaim grant into a lease and a new attempt; at the cap the execution fails."""
        ...


def worker_pair(worker_id: str, worker_instance_id: str) -> str:
    """Both identities in the one form the record keeps."""
    validate_worker_id(worker_id)
    validate_worker_id(worker_instance_id, "worker_instance_id")
    return f"{worker_id} {worker_instance_id}"
