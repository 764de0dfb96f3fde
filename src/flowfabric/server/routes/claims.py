"""Grants for workers that claim through the server, and holding executions back (10 §3.3)."""

from typing import Any

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import Blocked, ClaimGrant, Granted, NotReclaimable
from flowfabric.core.errors import engine_error
from flowfabric.core.ids import ExecutionId, validate_lane, validate_worker_id
from flowfabric.engine.api import check
from flowfabric.engine.api.claims import GrantOptions
from flowfabric.scheduler.grants import NoWork
from flowfabric.server.bodies import U64, OfExecution
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem
from flowfabric.server.queries import NoQuery, WaitQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import ReclaimAnswer, variants
from flowfabric.server.wire import Reply, answer, variant

routes = Routes()
_MAX_GRANT_TTL_MS = 60_000
_RING_S = 5.0
_PAUSED = "paused_by_operator"


class ClaimBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker process asks for work of which lane."""

    lane_id: str
    worker_instance_id: str
    grant_ttl_ms: U64
    worker_id: str | None = None
    capabilities: list[str] = []


def _check_claim(worker_id: str, instance: str, lane_id: str, ttl_ms: int) -> None:
    """The checks of both claims, in the order that the specification gives."""
    validate_worker_id(worker_id)
    validate_worker_id(instance, "worker_instance_id")
    validate_lane(lane_id)
    check.whole(ttl_ms, "grant_ttl_ms", 1, _MAX_GRANT_TTL_MS)


@routes.post(
    "/v1/workers/{worker_id}/claim",
    scope="operate",
    answers={200: ClaimGrant, 204: None},
)
async def claim_for_worker(call: Call[ClaimBody, WaitQuery]) -> Reply:
    """Reserve one waiting execution for a worker; with `wait_ms`, wait for one."""
    body, worker_id = call.body, call.worker("worker_id")
    _check_claim(worker_id, body.worker_instance_id, body.lane_id, body.grant_ttl_ms)
    offered = caps.normalise(body.capabilities, "worker")

    async def claim() -> ClaimGrant | None:
        for namespace in call.caller.namespaces or (None,):
            found = await call.services.grants.claim_for_worker(
                body.lane_id,
                worker_id,
                body.worker_instance_id,
                worker_capabilities=offered,
                grant_ttl_ms=body.grant_ttl_ms,
                namespace=namespace,
            )
            if not isinstance(found, NoWork):
                return found
        return None

    grant = await claim()
    if grant is None and call.query.wait_ms:
        grant = await _await_work(call, claim)
    if grant is None:
        return Reply(204)
    return answer(grant)


async def _await_work(call: Call[ClaimBody, WaitQuery], claim: Any) -> ClaimGrant | None:
    bell = call.backend.wakeups.listen([call.body.lane_id])

    async def until_claimed() -> ClaimGrant:
        while True:
            # Rings may be lost, so it also looks now and then.
            await bell.wait(_RING_S)
            if (grant := await claim()) is not None:
                return grant

    try:
        return await call.until(until_claimed, call.query.wait_ms)
    finally:
        await bell.aclose()


class ReclaimBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker process takes over."""

    worker_id: str
    worker_instance_id: str
    lane_id: str
    grant_ttl_ms: U64
    capability_hash: str | None = None
    route_snapshot_json: str | None = None
    admission_summary: str | None = None
    execution_id: ExecutionId | None = None
    worker_capabilities: list[str] = []


@routes.post(
    "/v1/executions/{id}/reclaim", scope="operate", answers={200: ReclaimAnswer}, errors=(404, 409)
)
async def issue_reclaim_grant(call: Call[ReclaimBody, NoQuery]) -> Reply:
    """Reserve an execution whose worker lost its lease."""
    body, execution_id = call.body, call.execution_id()
    _check_claim(body.worker_id, body.worker_instance_id, body.lane_id, body.grant_ttl_ms)
    options: GrantOptions = {
        "worker_id": body.worker_id,
        "worker_instance_id": body.worker_instance_id,
        "worker_capabilities": body.worker_capabilities,
        "grant_ttl_ms": body.grant_ttl_ms,
        "lane_id": body.lane_id,
        "capability_hash": body.capability_hash or "",
        "route_snapshot_json": body.route_snapshot_json or "",
        "admission_summary": body.admission_summary or "",
    }
    await call.visible(execution_id)
    outcome = await call.backend.claims.issue_reclaim_grant(execution_id, **options)
    fields: dict[str, Any] = {"status": outcome.kind, "execution_id": execution_id}
    if isinstance(outcome, Granted):
        fields |= msgspec.structs.asdict(outcome.grant)
    elif isinstance(outcome, NotReclaimable):
        fields["detail"] = outcome.detail
    else:
        fields["reclaim_count"] = outcome.reclaim_count
    return answer(fields)


class BlockRequest(OfExecution, frozen=True, kw_only=True):
    """Why an operator blocks an execution."""

    reason: str | None = None
    reason_detail: str | None = None


@routes.post(
    "/v1/executions/{id}/block",
    scope="operate",
    optional_body=True,
    answers={200: variants(Blocked)},
    errors=(404, 409),
)
async def block_execution(call: Call[BlockRequest, NoQuery]) -> Reply:
    """Block an execution that waits for a worker."""
    execution_id, body = call.execution_id(), call.body
    if body.reason not in (None, _PAUSED):
        raise Problem("invalid_blocking_reason", f"only {_PAUSED} is allowed here")
    await call.visible(execution_id)
    outcome = await call.backend.claims.block_execution_for_admission(
        execution_id, _PAUSED, body.reason_detail or ""
    )
    if isinstance(outcome, Blocked):
        return answer(variant(outcome))
    raise engine_error(outcome.code, [execution_id])


class UnblockRequest(OfExecution, frozen=True, kw_only=True):
    """The blocking reason that the execution must have."""

    expected_blocking_reason: str | None = None


@routes.post(
    "/v1/executions/{id}/unblock",
    scope="operate",
    optional_body=True,
    answers={200: str},
    errors=(404, 409),
)
async def unblock_execution(call: Call[UnblockRequest, NoQuery]) -> Reply:
    """Let a blocked execution wait for a worker again."""
    expected = call.body.expected_blocking_reason or ""
    await call.backend.claims.unblock_execution(
        await call.execution(), expected_blocking_reason=expected
    )
    return answer("Unblocked")
