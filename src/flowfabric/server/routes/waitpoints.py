"""Waitpoints, tokens and signals (10 §3.1, §3.7, 05 §6 and §11)."""

from typing import Any
from urllib.parse import quote

import msgspec

from flowfabric.core.contracts import suspension as contracts
from flowfabric.core.errors import EngineError, NotFoundError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.server.bodies import I64, U64, Byte, LaneName, OfWaitpoint, Uuid, payload_of
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem
from flowfabric.server.queries import AnyLimit, NoQuery, PageQuery, Partition
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import Listed, TokenOnly, variants
from flowfabric.server.wire import Reply, answer, encode, struct, variant

routes = Routes()
_DAY_MS = 86_400_000
_SIGNAL = variants(contracts.Accepted, contracts.DuplicateSignal)
_NO_STORE = {"Cache-Control": "no-store"}
_HIDDEN = frozenset(
    {"execution_not_found", "waitpoint_not_found", "invalid_token", "missing_token"}
) | {"invalid_waitpoint_for_execution"}
"""What a sender without a valid token must not be able to tell apart."""


class AfterQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One page of waitpoints."""

    after: str = ""
    limit: AnyLimit = 100


@routes.get(
    "/v1/executions/{id}/pending-waitpoints",
    scope="read",
    answers={200: list[contracts.OpenWaitpoint]},
    errors=(404,),
)
async def list_pending_waitpoints(call: Call[None, AfterQuery]) -> Reply:
    """List the open waitpoints of an execution, without their tokens."""
    execution_id = call.execution_id()
    limit = min(max(call.query.limit, 1), 1000)
    try:
        await call.visible(execution_id)
        page = await call.backend.waitpoints.list_pending_waitpoints(
            execution_id, call.query.after, limit
        )
    except NotFoundError:
        text = "not found: execution"
        raise Problem("execution_not_found", execution_id, error=text) from None
    entries = [struct(entry) for entry in page.entries]
    if page.next_cursor is None:
        return answer(entries)
    path = f"/v1/executions/{quote(execution_id)}/pending-waitpoints"
    query = f"after={quote(page.next_cursor, safe='')}&limit={limit}"
    return answer(entries, link=f'<{path}?{query}>; rel="next"')


@routes.get(
    "/v1/executions/{id}/waitpoints/{waitpoint_id}/token",
    scope="signal",
    answers={200: TokenOnly},
    errors=(404,),
)
async def read_waitpoint_token(call: Call[None, NoQuery]) -> Reply:
    """Read the token of a waitpoint. It is a credential."""
    execution_id = call.execution_id()
    waitpoint_id = call.uuid("waitpoint_id", "waitpoint_id")
    try:
        await call.visible(execution_id)
        token = await call.backend.signals.read_waitpoint_token(execution_id, waitpoint_id)
    except NotFoundError:
        token = None
    if token is None:
        text = "waitpoint token not found (consumed, expired, or unknown id)"
        raise Problem("waitpoint_token_not_found", waitpoint_id, error=text, headers=_NO_STORE)
    return answer({"token": token.reveal()}, cache_control="no-store")


class SignalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A signal with the token of its waitpoint."""

    execution_id: ExecutionId
    waitpoint_id: Uuid
    signal_id: Uuid
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    target_scope: str
    waitpoint_token: str
    payload: list[Byte] | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    created_at: I64 | None = None
    dedup_ttl_ms: U64 | None = None
    resume_delay_ms: U64 | None = None
    max_signals_per_execution: U64 | None = None
    signal_maxlen: U64 | None = None

    @property
    def trusted_options(self) -> dict[str, int]:
        """What only callers that may operate the engine can set (05 ★9)."""
        names = ("dedup_ttl_ms", "resume_delay_ms", "max_signals_per_execution", "signal_maxlen")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


@routes.post(
    "/v1/executions/{id}/signal",
    scope="signal",
    limit="medium",
    answers={200: _SIGNAL},
    errors=(404, 409),
)
async def deliver_signal(call: Call[SignalRequest, NoQuery]) -> Reply:
    """Deliver a signal to a waitpoint."""
    execution_id, body = call.execution_id(), call.body
    payload = payload_of(body.payload, body.payload_b64, "payload")
    await call.visible(execution_id)
    options: dict[str, Any] = body.trusted_options if call.caller.may("operate") else {}
    outcome = await call.backend.signals.deliver_signal(
        execution_id,
        body.waitpoint_id,
        body.waitpoint_token,
        body.signal_name,
        payload=payload,
        payload_encoding=body.payload_encoding,
        signal_category=body.signal_category,
        source_type=body.source_type,
        source_identity=body.source_identity,
        correlation_id=body.correlation_id or "",
        idempotency_key=body.idempotency_key or "",
        target_scope=body.target_scope,
        signal_id=body.signal_id,
        created_at=body.created_at,
        **options,
    )
    return answer(variant(outcome))


class ApproveRequest(OfWaitpoint, frozen=True, kw_only=True):
    """An operator's decision, which needs no token."""

    signal_name: str
    idempotency_suffix: str | None = None
    lane_id: LaneName | None = None
    signal_dedup_ttl_ms: U64 | None = None
    decided_by: str | None = None
    payload: list[Byte] | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None


@routes.post(
    "/v1/executions/{id}/waitpoints/{waitpoint_id}/approve",
    scope="operate",
    answers={200: _SIGNAL},
    errors=(404, 409),
)
async def approve(call: Call[ApproveRequest, NoQuery]) -> Reply:
    """Answer a waitpoint as an operator."""
    execution_id, body = call.execution_id(), call.body
    waitpoint_id = call.uuid("waitpoint_id", "waitpoint_id")
    payload = payload_of(body.payload, body.payload_b64, "payload")
    ttl_ms = body.signal_dedup_ttl_ms
    await call.visible(execution_id)
    try:
        outcome = await call.backend.signals.deliver_approval_signal(
            execution_id,
            waitpoint_id,
            body.signal_name,
            idempotency_suffix=body.idempotency_suffix or "",
            decided_by=body.decided_by or "",
            payload=payload,
            payload_encoding=body.payload_encoding,
            lane_id=body.lane_id or "",
            signal_dedup_ttl_ms=_DAY_MS if ttl_ms is None else ttl_ms,
        )
    except NotFoundError as error:
        # Not retryable: unlike an early signal, an approval names an existing waitpoint.
        subject = execution_id if error.code == "execution_not_found" else waitpoint_id
        raise Problem(error.code, subject, status=404) from error
    return answer(variant(outcome))


class CloseRequest(OfWaitpoint, frozen=True, kw_only=True):
    """Why a waitpoint is closed."""

    reason: str | None = None


@routes.post(
    "/v1/executions/{id}/waitpoints/{waitpoint_id}/close",
    scope="operate",
    optional_body=True,
    answers={200: str},
    errors=(404, 409),
)
async def close_waitpoint(call: Call[CloseRequest, NoQuery]) -> Reply:
    """Close a waitpoint, so that its token stops working."""
    execution_id = call.execution_id()
    waitpoint_id = call.uuid("waitpoint_id", "waitpoint_id")
    await call.visible(execution_id)
    reason = "proactive_close" if call.body.reason is None else call.body.reason
    await call.backend.waitpoints.close_waitpoint(execution_id, waitpoint_id, reason)
    return answer("Closed")


class CallbackRequest(OfWaitpoint, frozen=True, kw_only=True):
    """A signal from someone who holds only the waitpoint's token."""

    signal_name: str
    signal_id: Uuid | None = None
    signal_category: str | None = None
    source_type: str | None = None
    source_identity: str | None = None
    payload: list[Byte] | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    created_at: I64 | None = None


@routes.post(
    "/v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}",
    scope=None,
    limit="medium",
    documented=CallbackRequest,
    headers=("X-FF-Waitpoint-Token",),
    answers={200: _SIGNAL},
    errors=(401, 409),
)
async def callback(call: Call[bytes, NoQuery]) -> Reply:
    """Answer a waitpoint with only its token, in `X-FF-Waitpoint-Token`."""
    token = call.request.header(b"x-ff-waitpoint-token")
    if not token:
        return _unauthorized("missing_token")
    sent = call.decoded(CallbackRequest)
    body, execution_id = sent.body, sent.execution_id()
    waitpoint_id = sent.uuid("waitpoint_id", "waitpoint_id")
    category, source_type = body.signal_category, body.source_type
    try:
        outcome = await call.backend.signals.deliver_signal(
            execution_id,
            waitpoint_id,
            token,
            body.signal_name,
            payload=payload_of(body.payload, body.payload_b64, "payload"),
            payload_encoding=body.payload_encoding,
            signal_category="callback" if category is None else category,
            source_type="callback" if source_type is None else source_type,
            source_identity=body.source_identity or "",
            correlation_id=body.correlation_id or "",
            idempotency_key=body.idempotency_key or call.request.header(b"idempotency-key") or "",
            signal_id=body.signal_id or new_uuid(),
            created_at=body.created_at,
        )
    except EngineError as error:
        if error.code == "token_expired":
            return _unauthorized(error.code)
        if error.code in _HIDDEN:
            return _unauthorized("invalid_token")
        raise
    return answer(variant(outcome))


def _unauthorized(code: str) -> Reply:
    return Reply(401, encode({"error": code, "code": code}))


class SuspendedQuery(PageQuery, frozen=True, kw_only=True):
    """Which suspended executions to list."""

    partition: Partition | None = None


@routes.get(
    "/v1/suspended", scope="read", answers={200: Listed("suspensions", contracts.SuspendedEntry)}
)
async def list_suspended(call: Call[None, SuspendedQuery]) -> Reply:
    """List suspended executions by their timeouts."""
    query = call.query
    page = await call.backend.suspensions.list_suspended(
        partition=query.partition, cursor=query.cursor, limit=query.size
    )
    rows = page.entries
    if call.caller.namespaces is not None:
        reads = call.backend.reads
        rows = [
            row
            for row in rows
            if call.caller.sees(await reads.get_execution_namespace(row.execution_id))
        ]
    return answer({"suspensions": list(rows), "next_cursor": page.next_cursor})
