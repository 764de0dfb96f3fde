"""Grants for workers that claim through the server, and holding executions back (10 §3.3)."""

import asyncio
from typing import Annotated, Any

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.leases import Blocked, ClaimGrant, Granted, NotReclaimable
from flowfabric.core.errors import engine_error
from flowfabric.core.ids import (
    ExecutionId,
    validate_lane,
    validate_namespace,
    validate_worker_id,
)
from flowfabric.engine.api import check
from flowfabric.engine.api.claims import GrantOptions
from flowfabric.scheduler.grant_search import GrantRequest
from flowfabric.server.bodies import U64, OfExecution, words
from flowfabric.server.calls import Call
from flowfabric.server.exchange import ClientGone
from flowfabric.server.problems import Problem
from flowfabric.server.queries import NoQuery, WaitQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import ReclaimAnswer, variants
from flowfabric.server.wire import Reply, answer, variant

routes = Routes()
_MAX_GRANT_TTL_MS = 60_000
_PAUSED = "paused_by_operator"


class ClaimBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker process asks for work of which lane."""

    lane_id: str
    worker_instance_id: str
    grant_ttl_ms: U64
    worker_id: str | None = None
    capabilities: list[str] = []
    tasks: list[str] = []
    """The tasks that the worker knows: it also gets executions that other workers left to it."""
    namespace: str | None = None
    """Only work of this namespace; by default, that of all that the token allows."""


def _check_claim(
    worker_id: str, instance: str, lane_id: str, ttl_ms: int, capabilities: list[str]
) -> tuple[str, ...]:
    """The checks of both claims, in the order that the specification gives; the capabilities."""
    validate_worker_id(worker_id)
    validate_worker_id(instance, "worker_instance_id")
    validate_lane(lane_id)
    check.whole(ttl_ms, "grant_ttl_ms", 1, _MAX_GRANT_TTL_MS)
    return caps.normalise(capabilities, "worker")


@routes.post(
    "/v1/workers/{worker_id}/claim",
    scope="operate",
    answers={200: ClaimGrant, 204: None},
)
async def claim_for_worker(call: Call[ClaimBody, WaitQuery]) -> Reply:
    """Reserve one waiting execution for a worker; with `wait_ms`, wait for one."""
    body, worker_id = call.body, call.worker("worker_id")
    instance = body.worker_instance_id
    offered = _check_claim(worker_id, instance, body.lane_id, body.grant_ttl_ms, body.capabilities)
    spaces = call.caller.namespaces
    namespaces = None if spaces is None else tuple(sorted(spaces))
    if body.namespace is not None:
        call.check_namespace(validate_namespace(body.namespace))
        namespaces = (body.namespace,)
    grant = await _claimed(
        call,
        GrantRequest(
            lane_id=body.lane_id,
            worker_id=worker_id,
            worker_instance_id=instance,
            capabilities=offered,
            tasks=tuple(sorted(set(check.texts(body.tasks, "tasks")))),
            grant_ttl_ms=body.grant_ttl_ms,
            namespaces=namespaces,
        ),
    )
    return Reply(204) if grant is None else answer(grant)


async def _claimed(call: Call[ClaimBody, WaitQuery], request: GrantRequest) -> ClaimGrant | None:
    """A grant. If the client disconnects, the claim goes on, so that its grant can be returned."""
    desk = call.services.grant_desk
    given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    work = call.services.run(
        desk.claim(request, call.query.wait_ms / 1000, given_up), "ff-claim-for-worker"
    )
    gone = asyncio.ensure_future(call.request.disconnected())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return work.result()
        if work.done() and work.exception() is None and (grant := work.result()) is not None:
            await desk.release(grant)
        raise ClientGone
    finally:
        gone.cancel()
        if not work.done():
            given_up.set_result(None)
            work.add_done_callback(lambda done: done.cancelled() or done.exception())


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
    offered = _check_claim(
        *(body.worker_id, body.worker_instance_id, body.lane_id, body.grant_ttl_ms),
        body.worker_capabilities,
    )
    options: GrantOptions = {
        "worker_id": body.worker_id,
        "worker_instance_id": body.worker_instance_id,
        "worker_capabilities": offered,
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

    reason: Annotated[str, words((_PAUSED,))] | None = None
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
