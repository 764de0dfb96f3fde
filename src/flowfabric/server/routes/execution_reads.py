"""Reading executions: one, or page by page (10 §3.1, §3.7)."""

import asyncio
import re
from base64 import b64encode
from typing import Any

import msgspec

from flowfabric.core.contracts import executions as contracts
from flowfabric.core.contracts.executions import ExecutionInfo, ExecutionPage, WhyWaiting
from flowfabric.core.contracts.steps import StepRecord
from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.overview import read_limits
from flowfabric.server.calls import Call
from flowfabric.server.entries import entry_of
from flowfabric.server.problems import Problem, invalid
from flowfabric.server.queries import AnyLimit, NoQuery, PageQuery, Partition, WaitQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import (
    BYTES,
    EventPage,
    ExecutionAnswer,
    ExecutionOutcome,
    Explanation,
    Listed,
    StateOnly,
    StepAnswer,
)
from flowfabric.server.wire import Reply, answer, struct

routes = Routes()
_is_step_cursor = re.compile(r"s[1-9][0-9]{0,8}").fullmatch
TERMINAL = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})
INDEXES = (
    *("eligible", "delayed", "active", "suspended", "terminal", "reclaimable"),
    *("blocked_dependencies", "blocked_budget", "blocked_quota", "blocked_route"),
    *("blocked_operator", "blocked_lane"),
)


class ListQuery(PageQuery, frozen=True, kw_only=True):
    """Which executions to list."""

    partition: Partition | None = None
    namespace: str | None = None
    lane: str | None = None
    kind: str | None = None
    state: str | None = None
    tag: tuple[str, ...] = ()
    limit: AnyLimit = 50


def parse_tags(given: tuple[str, ...]) -> dict[str, str]:
    """The pairs of `tag=<key>:<value>` parameters."""
    for each in given:
        if ":" not in each:
            raise invalid("tag", f"must be <key>:<value>, got {each[:80]!r}")
    return dict(each.split(":", 1) for each in given)


def rows_wanted(tags: tuple[str, ...], limit: int) -> int:
    """How many rows to list: all tags must match, so none can if a key has two values."""
    return limit if len(set(tags)) == len(parse_tags(tags)) else 0


@routes.get(
    "/v1/executions", scope="read", answers={200: Listed("executions", contracts.ExecutionSummary)}
)
async def list_executions(call: Call[None, ListQuery]) -> Reply:
    """List executions by partition and id, or those of one lane and state in index order."""
    query = call.query
    where = Filter(
        namespace=query.namespace,
        lane=query.lane,
        kind=query.kind,
        state=query.state,
        tags=parse_tags(query.tag),
    )
    listings, limit = call.backend.listings, rows_wanted(query.tag, query.size)
    if query.partition is not None and query.partition >= call.backend.counts.flow:
        raise invalid("partition", f"must be below {call.backend.counts.flow}")
    if query.partition is not None and query.lane is not None and query.state in INDEXES:
        msgspec.structs.replace(where, state=None).validate()
        page = await listings.list_lane(
            query.lane,
            query.state,
            partition=query.partition,
            cursor=query.cursor,
            limit=limit,
        )
        page = await _filtered(call, page, msgspec.structs.replace(where, state=None))
    else:
        if query.state in INDEXES and query.state not in list(PublicState):
            problem = f"{query.state!r} requires partition and lane"
            raise invalid("state", problem)
        where.validate()
        page = await listings.list_executions(
            partition=query.partition, cursor=query.cursor, limit=limit, where=where
        )
    rows = [row for row in page.executions if call.caller.sees(row.namespace)]
    return answer(page_of("executions", [struct(row) for row in rows], page))


async def _filtered(
    call: Call[None, ListQuery], page: ExecutionPage, where: Filter
) -> ExecutionPage:
    rows = [row for row in page.executions if where.accepts(row)]
    if where.tags:
        reads = call.backend.reads
        found = await asyncio.gather(*(reads.get_execution_tags(r.execution_id) for r in rows))
        wanted = where.tags.items()
        rows = [row for row, tags in zip(rows, found, strict=True) if wanted <= tags.items()]
    return msgspec.structs.replace(page, executions=tuple(rows))


def page_of(noun: str, rows: list[Any], page: Any) -> dict[str, Any]:
    """One page of a listing; what could not be read is named, if anything."""
    body: dict[str, Any] = {noun: rows, "next_cursor": page.next_cursor}
    if page.damaged:
        body["damaged"] = page.damaged
    return body


async def _info(call: Call[Any, Any], execution_id: ExecutionId) -> ExecutionInfo:
    """The execution, or the 404 that clients of this route know."""
    try:
        info = await call.backend.reads.read_execution_info(execution_id)
    except NotFoundError:
        raise _unknown(execution_id) from None
    if not call.caller.sees(info.namespace):
        raise _unknown(execution_id)
    return info


def _unknown(execution_id: ExecutionId) -> Problem:
    text = f"execution not found: {execution_id}"
    return Problem("execution_not_found", execution_id, error=text)


@routes.get("/v1/executions/{id}", scope="read", answers={200: ExecutionAnswer}, errors=(404,))
async def read_execution(call: Call[None, NoQuery]) -> Reply:
    """Read an execution."""
    info = await _info(call, call.execution_id())
    body = struct(info, "started_at", "completed_at")
    body["state_vector"] = struct(info.state_vector) | {"public_state": info.public_state}
    return answer(body)


async def wait_terminal(call: Call[Any, Any], execution_id: ExecutionId, wait_ms: int) -> None:
    """Wait until the execution has ended, at most so long; read its state then."""
    backend = call.backend

    async def ended() -> None:
        while await backend.reads.read_execution_state(execution_id) not in TERMINAL:
            await backend.events.wait_ended(execution_id)

    await call.until(ended, wait_ms)


@routes.get("/v1/executions/{id}/state", scope="read", answers={200: PublicState}, errors=(404,))
async def read_state(call: Call[None, WaitQuery]) -> Reply:
    """Read the state of an execution; with `wait_ms`, wait until it has ended."""
    execution_id = call.execution_id()
    try:
        await call.visible(execution_id)
        state = await call.backend.reads.read_execution_state(execution_id)
        if state not in TERMINAL and call.query.wait_ms:
            await wait_terminal(call, execution_id, call.query.wait_ms)
            state = await call.backend.reads.read_execution_state(execution_id)
    except NotFoundError:
        raise _unknown(execution_id) from None
    return answer(state)


def _state_header(info: ExecutionInfo) -> tuple[str, str]:
    return "X-FF-Public-State", info.public_state.value


async def _outcome(
    call: Call[None, WaitQuery], execution_id: ExecutionId
) -> tuple[ExecutionInfo, bytes | None]:
    """The execution and its result; with `wait_ms`, waits until it has ended."""
    info, result = await call.backend.reads.read_outcome(execution_id)
    if info.public_state not in TERMINAL and call.query.wait_ms:
        await wait_terminal(call, execution_id, call.query.wait_ms)
        info, result = await call.backend.reads.read_outcome(execution_id)
    return info, result


@routes.get(
    "/v1/executions/{id}/result", scope="read", answers={200: BYTES, 202: StateOnly}, errors=(404,)
)
async def read_result(call: Call[None, WaitQuery]) -> Reply:
    """Read the result bytes of a completed execution; with `wait_ms`, wait until it has ended."""
    execution_id = call.execution_id()
    text = f"execution result not found: {execution_id}"
    try:
        await call.visible(execution_id)
        info, result = await _outcome(call, execution_id)
    except NotFoundError:
        raise Problem("execution_not_found", execution_id, error=text) from None
    if info.public_state not in TERMINAL and call.query.wait_ms:
        reply = answer({"public_state": info.public_state}, 202)
        return msgspec.structs.replace(reply, headers=(_state_header(info),))
    if result is None or info.public_state is not PublicState.COMPLETED:
        headers = dict((_state_header(info),))
        raise Problem("result_not_found", execution_id, error=text, headers=headers)
    headers = (_state_header(info), ("X-FF-Payload-Encoding", info.result_encoding))
    return Reply(200, result, "application/octet-stream", headers)


@routes.get(
    "/v1/executions/{id}/outcome",
    scope="read",
    answers={200: ExecutionOutcome, 202: StateOnly},
    errors=(404,),
)
async def read_outcome(call: Call[None, WaitQuery]) -> Reply:
    """Read how an execution ended; with `wait_ms`, wait until it has ended."""
    execution_id = await call.execution()
    info, result = await _outcome(call, execution_id)
    if info.public_state not in TERMINAL:
        return answer({"public_state": info.public_state}, 202)
    return answer(
        ExecutionOutcome(
            execution_id=execution_id,
            public_state=info.public_state,
            terminal_outcome=info.state_vector.terminal_outcome,
            completed_at=int(info.completed_at or 0),
            failure_reason=info.failure_reason,
            failure_category=info.failure_category,
            cancellation_reason=info.cancellation_reason,
            cancelled_by=info.cancelled_by,
            current_attempt_index=info.current_attempt_index,
            total_attempt_count=info.total_attempt_count,
            has_result=result is not None,
        )
    )


@routes.get(
    "/v1/executions/{id}/describe",
    scope="read",
    answers={200: contracts.ExecutionSnapshot},
    errors=(404,),
)
async def describe_execution(call: Call[None, NoQuery]) -> Reply:
    """Read an execution with its attempt, lease, waitpoint and tags."""
    execution_id = call.execution_id()
    found = await call.backend.reads.describe_execution(execution_id)
    if found is None or not call.caller.sees(found.namespace):
        raise NotFoundError("execution_not_found", execution_id)
    return answer(found)


@routes.get("/v1/executions/{id}/history", scope="read", answers={200: EventPage}, errors=(404,))
async def read_history(call: Call[None, NoQuery]) -> Reply:
    """List the expiries, retries, pauses and other unusual events of an execution, oldest first."""
    events = await call.backend.reads.read_execution_history(await call.execution())
    return answer({"events": [entry_of(event) for event in events], "next_cursor": None})


@routes.get(
    "/v1/executions/{id}/steps",
    scope="read",
    answers={200: Listed("steps", StepAnswer)},
    errors=(404,),
)
async def list_steps(call: Call[None, PageQuery]) -> Reply:
    """List the steps that the handlers of an execution recorded, in order."""
    execution_id, cursor = await call.execution(), call.query.cursor
    if cursor and not _is_step_cursor(cursor):
        raise Problem("invalid_cursor", "cursor: must be one that this listing returned")
    after = int(cursor[1:]) if cursor else 0
    page = await call.backend.steps.read_steps(execution_id, after, call.query.size)
    following = None if page.next_after_seq is None else f"s{page.next_after_seq}"
    return answer({"steps": [_step(each) for each in page.steps], "next_cursor": following})


def _step(step: StepRecord) -> StepAnswer:
    fields, result, encoding = msgspec.structs.asdict(step), None, None
    if (stored := fields.pop("result")) is not None:
        try:
            result, encoding = stored.decode(), "utf8"
        except UnicodeDecodeError:
            result, encoding = b64encode(stored).decode(), "base64"
    return StepAnswer(**fields, result=result, encoding=encoding)


@routes.get("/v1/executions/{id}/tags", scope="read", answers={200: dict[str, str]}, errors=(404,))
async def read_tags(call: Call[None, NoQuery]) -> Reply:
    """Read the tags of an execution."""
    execution_id = call.execution_id()
    await _info(call, execution_id)
    return answer(dict(await call.backend.reads.get_execution_tags(execution_id)))


@routes.get("/v1/executions/{id}/explain", scope="read", answers={200: Explanation}, errors=(404,))
async def explain_execution(call: Call[None, NoQuery]) -> Reply:
    """Explain why an execution is not running."""
    execution_id = await call.execution()
    why = await call.backend.reads.explain_execution(execution_id)
    edges, waitpoints, limits = await asyncio.gather(
        _unresolved(call, execution_id, why),
        _waitpoints(call, execution_id, why),
        read_limits(call.backend, execution_id, why.public_state),
    )
    return answer(
        Explanation(
            public_state=why.public_state,
            blocking_reason=why.blocking_reason,
            blocking_detail=why.blocking_detail,
            since=why.since,
            retry_at=why.retry_at,
            missing_capabilities=list(why.missing_capabilities) or None,
            budgets=list(limits.budgets) or None,
            quota=limits.quota,
            unresolved_edges=edges,
            waitpoints=waitpoints,
            lane_state=why.lane_state,
        )
    )


async def _unresolved(
    call: Call[Any, Any], execution_id: ExecutionId, why: WhyWaiting
) -> list[dict[str, Any]] | None:
    if not why.unresolved_edges:
        return None
    reads = call.backend.reads
    edges = await call.backend.flows.list_incoming_edges(execution_id)
    found: list[dict[str, Any]] = []
    for edge in edges:
        if edge.edge_state == "pending":
            upstream = edge.upstream_execution_id
            try:
                state = await reads.read_execution_state(upstream)
            except NotFoundError:
                state = None
            names = {"edge_id": edge.edge_id, "upstream_execution_id": upstream}
            found.append({**names, "upstream_state": state})
    return found


async def _waitpoints(
    call: Call[Any, Any], execution_id: ExecutionId, why: WhyWaiting
) -> list[dict[str, Any]] | None:
    if not why.waitpoints:
        return None
    page = await call.backend.waitpoints.list_pending_waitpoints(execution_id)
    names = ("waitpoint_id", "waitpoint_key", "state", "expires_at")
    return [{name: getattr(each, name) for name in names} for each in page.entries]
