"""Flows: their headers, members and edges, and cancelling them (10 §3.4, §3.7)."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from flowfabric.core.contracts import executions, flows
from flowfabric.core.contracts.executions import ExecutionInfo, ExecutionSummary
from flowfabric.core.errors import NotFoundError, TimeoutError_, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.flows import FlowFilter
from flowfabric.server.bodies import U64, EdgeKind, OfFlow, Uuid
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem, invalid, problem_of
from flowfabric.server.queries import NoQuery, PageQuery, Partition, WaitQuery, between
from flowfabric.server.routes.execution_reads import page_of, parse_tags, rows_wanted
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import (
    Counted,
    FlowAnswer,
    FlowReplayAnswer,
    FlowSummary,
    Listed,
    variants,
)
from flowfabric.server.wire import Reply, answer, struct, tagged, variant

routes = Routes()
_MAX_WAIT_MS = 300_000
_FINISHED = frozenset({"completed", "failed"})
_ROW = ExecutionSummary.__struct_fields__


class CreateFlow(msgspec.Struct, frozen=True, kw_only=True):
    """An empty flow."""

    flow_id: Uuid
    flow_kind: str
    namespace: str


@routes.post(
    "/v1/flows",
    scope="submit",
    answers={201: variants(flows.FlowCreated), 200: variants(flows.FlowExists)},
)
async def create_flow(call: Call[CreateFlow, NoQuery]) -> Reply:
    """Create an empty flow."""
    body = call.body
    call.check_namespace(body.namespace)
    outcome = await call.backend.flows.create_flow(body.flow_id, body.flow_kind, body.namespace)
    return answer(variant(outcome), 201 if isinstance(outcome, flows.FlowCreated) else 200)


class FlowListQuery(PageQuery, frozen=True, kw_only=True):
    """Which flows to list."""

    partition: Partition | None = None
    namespace: str | None = None
    status: str | None = None
    tag: tuple[str, ...] = ()


@routes.get("/v1/flows", scope="read", answers={200: Listed("flows", flows.FlowListing)})
async def list_flows(call: Call[None, FlowListQuery]) -> Reply:
    """List flows by partition and id."""
    query = call.query
    where = FlowFilter(
        namespace=query.namespace,
        status=query.status,  # pyright: ignore[reportArgumentType] - checked by the engine
        tags=parse_tags(query.tag),
    )
    page = await call.backend.flows.list_flows(
        partition=query.partition,
        cursor=query.cursor,
        limit=rows_wanted(query.tag, query.size),
        where=where,
    )
    rows = [struct(row) for row in page.entries if call.caller.sees(row.namespace)]
    return answer(page_of("flows", rows, page))


def summary_of(flow: flows.FlowSnapshot) -> dict[str, Any]:
    """The counters of a flow, one per public state."""
    states = [state for state in PublicState if state is not PublicState.RESUMABLE]
    return {
        "flow_id": flow.flow_id,
        "derived_state": flow.derived_state,
        "total_members": flow.node_count,
        **{f"members_{state}": flow.members.get(state, 0) for state in states},
        "last_summary_update_at": flow.last_mutation_at,
    }


async def _flow(call: Call[Any, Any], *, edge_groups: bool = False) -> flows.FlowSnapshot:
    flow_id = call.uuid("flow_id")
    found = await call.backend.flows.describe_flow(flow_id, edge_groups=edge_groups)
    if found is None or not call.caller.sees(found.namespace):
        raise NotFoundError("flow_not_found", flow_id)
    return found


@routes.get("/v1/flows/{id}", scope="read", answers={200: FlowAnswer}, errors=(404,))
async def read_flow(call: Call[None, NoQuery]) -> Reply:
    """Read a flow with its tags, counters and joins."""
    found = await _flow(call, edge_groups=True)
    return answer(struct(found) | {"summary": summary_of(found)})


@routes.get("/v1/flows/{id}/summary", scope="read", answers={200: FlowSummary}, errors=(404,))
async def read_flow_summary(call: Call[None, WaitQuery]) -> Reply:
    """Read the counters of a flow; with `wait_ms`, wait until it has finished."""
    found = await _flow(call)
    if found.derived_state not in _FINISHED and call.query.wait_ms:

        async def finished() -> None:
            await call.backend.flows.wait_flow(found.flow_id)

        await call.until(finished, call.query.wait_ms)
        found = await _flow(call)
    return answer(summary_of(found))


@routes.delete("/v1/flows/{id}", scope="operate", answers={200: str}, errors=(404, 409))
async def delete_flow(call: Call[None, NoQuery]) -> Reply:
    """Delete a finished flow with all its members."""
    await call.backend.flows.delete_flow(await call.flow())
    return answer("Deleted")


@routes.put("/v1/flows/{id}/tags", scope="submit", answers={200: Counted}, errors=(404,))
async def set_flow_tags(call: Call[dict[str, str], NoQuery]) -> Reply:
    """Add or replace tags of a flow."""
    count = await call.backend.flows.set_flow_tags(await call.flow(), call.body)
    return answer(tagged("ok", {"count": count}))


class AddMember(msgspec.Struct, frozen=True, kw_only=True):
    """An existing execution that joins a flow."""

    flow_id: Uuid
    execution_id: ExecutionId


@routes.post(
    "/v1/flows/{id}/members",
    scope="submit",
    answers={201: variants(flows.MemberAdded), 200: variants(flows.AlreadyMember)},
    errors=(404, 409),
)
async def add_member(call: Call[AddMember, NoQuery]) -> Reply:
    """Add an existing execution to a flow."""
    flow_id = call.uuid("flow_id")
    await call.visible_flow(flow_id)
    await call.visible(call.body.execution_id)
    try:
        outcome = await call.backend.flows.add_execution_to_flow(flow_id, call.body.execution_id)
    except NotFoundError as error:
        found = flow_id if error.code == "flow_not_found" else call.body.execution_id
        raise problem_of(error, found) from error
    return answer(variant(outcome), 201 if isinstance(outcome, flows.MemberAdded) else 200)


@routes.get(
    "/v1/flows/{id}/members",
    scope="read",
    answers={200: Listed("members", executions.ExecutionSummary)},
    errors=(404,),
)
async def list_members(call: Call[None, PageQuery]) -> Reply:
    """List the members of a flow by id."""
    flow, query = await _flow(call), call.query
    page = await call.backend.flows.list_members(
        flow.flow_id, cursor=query.cursor, limit=query.size
    )
    rows = await asyncio.gather(*(_summary(call, each.execution_id) for each in page.entries))
    return answer(page_of("members", [row for row in rows if row is not None], page))


async def _summary(call: Call[Any, Any], execution_id: ExecutionId) -> dict[str, Any] | None:
    try:
        info: ExecutionInfo = await call.backend.reads.read_execution_info(execution_id)
    except NotFoundError:
        # Its retention ended while the page was read.
        return None
    return {name: getattr(info, name, None) for name in _ROW}


class EdgeListQuery(PageQuery, frozen=True, kw_only=True):
    """Which edges to list."""

    upstream_execution_id: str | None = None
    downstream_execution_id: str | None = None


def _member(call: Call[Any, Any], name: str, text: str | None) -> ExecutionId | None:
    try:
        found = None if text is None else ExecutionId.parse(text, name)
        return None if found is None else found.check_partition(call.backend.counts)
    except ValidationError as error:
        raise invalid(name, error.detail.partition(": ")[2]) from None


@routes.get(
    "/v1/flows/{id}/edges",
    scope="read",
    answers={200: Listed("edges", flows.EdgeSnapshot)},
    errors=(404,),
)
async def list_edges(call: Call[None, EdgeListQuery]) -> Reply:
    """List the edges of a flow, or only those of one member."""
    query = call.query
    upstream = _member(call, "upstream_execution_id", query.upstream_execution_id)
    downstream = _member(call, "downstream_execution_id", query.downstream_execution_id)
    flow = await _flow(call)
    page = await call.backend.flows.list_edges(
        flow.flow_id,
        outgoing=upstream,
        incoming=None if upstream is not None else downstream,
        cursor=query.cursor,
        limit=query.size,
    )
    edges: Sequence[flows.EdgeSnapshot] = page.entries
    if downstream is not None:
        edges = [edge for edge in edges if edge.downstream_execution_id == downstream]
    return answer(page_of("edges", [struct(edge) for edge in edges], page))


class StageEdge(msgspec.Struct, frozen=True, kw_only=True):
    """An edge to store."""

    flow_id: Uuid
    edge_id: Uuid
    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    expected_graph_revision: U64 | None = None
    dependency_kind: EdgeKind | None = None
    data_passing_ref: str | None = None
    input_name: str | None = None


@routes.post(
    "/v1/flows/{id}/edges",
    scope="submit",
    answers={201: variants(flows.Staged), 200: variants(flows.AlreadyStaged)},
    errors=(404, 409),
)
async def stage_edge(call: Call[StageEdge, NoQuery]) -> Reply:
    """Store an edge; it takes effect when it is applied."""
    flow_id, body = call.uuid("flow_id"), call.body
    await call.visible_flow(flow_id)
    outcome = await call.backend.flows.stage_dependency_edge(
        flow_id,
        body.upstream_execution_id,
        body.downstream_execution_id,
        edge_id=body.edge_id,
        dependency_kind=body.dependency_kind or "success_only",
        data_passing_ref=body.data_passing_ref or "",
        input_name=body.input_name or "",
        expected_graph_revision=body.expected_graph_revision,
    )
    return answer(variant(outcome), 201 if isinstance(outcome, flows.Staged) else 200)


class ApplyEdge(msgspec.Struct, frozen=True, kw_only=True):
    """A staged edge to apply; the other fields, if given, must match it."""

    flow_id: Uuid
    edge_id: Uuid
    downstream_execution_id: ExecutionId | None = None
    upstream_execution_id: ExecutionId | None = None
    graph_revision: U64 | None = None
    dependency_kind: EdgeKind | None = None
    data_passing_ref: str | None = None


@routes.post(
    "/v1/flows/{id}/edges/apply",
    scope="submit",
    answers={
        200: variants(
            *(flows.EdgeApplied, flows.AlreadyApplied),
            omit=("resolution", "graph_revision", "cascade"),
        )
    },
    errors=(404, 409),
)
async def apply_edge(call: Call[ApplyEdge, NoQuery]) -> Reply:
    """Apply a staged edge to its child."""
    flow_id, body = call.uuid("flow_id"), call.body
    await call.visible_flow(flow_id)
    outcome = await call.backend.flows.apply_dependency_to_child(
        flow_id,
        body.edge_id,
        upstream_execution_id=body.upstream_execution_id,
        downstream_execution_id=body.downstream_execution_id,
        dependency_kind=body.dependency_kind or "",
        data_passing_ref=body.data_passing_ref or "",
    )
    return answer(variant(outcome, "resolution", "graph_revision", "cascade"))


_Policy = Annotated[
    str,
    msgspec.Meta(
        description="`cancel_all`, `cancel_pending` or `flow_only`; other text means `flow_only`."
    ),
]


class CancelFlow(msgspec.Struct, frozen=True, kw_only=True):
    """How a flow is cancelled."""

    flow_id: Uuid
    reason: str
    cancellation_policy: _Policy
    grace_ms: U64 | None = None


class CancelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to wait until the members have ended."""

    wait: bool = False
    wait_timeout_ms: Annotated[int, between(1, _MAX_WAIT_MS)] = _MAX_WAIT_MS


@routes.post(
    "/v1/flows/{id}/cancel",
    scope="operate",
    answers={
        200: variants(flows.FlowCancelled, flows.CancellationScheduled, flows.PartiallyCancelled)
    },
    errors=(404, 504),
)
async def cancel_flow(call: Call[CancelFlow, CancelQuery]) -> Reply:
    """Cancel a flow and the members that the policy includes."""
    flow_id, body = call.uuid("flow_id"), call.body
    await call.visible_flow(flow_id)
    grace = {} if body.grace_ms is None else {"grace_ms": body.grace_ms}
    try:
        outcome = await call.backend.flows.cancel_flow(
            flow_id,
            body.reason,
            cancellation_policy=body.cancellation_policy,
            wait_timeout_ms=call.query.wait_timeout_ms if call.query.wait else 0,
            **grace,
        )
    except TimeoutError_ as error:
        raise Problem("timeout", error.detail or "cancel_flow") from error
    return answer(variant(outcome))


@routes.post(
    "/v1/flows/{id}/release",
    scope="operate",
    answers={200: variants(flows.Released)},
    errors=(404,),
)
async def release_flow(call: Call[None, NoQuery]) -> Reply:
    """Let the members of a held flow run."""
    return answer(variant(await call.backend.flows.release_flow(await call.flow())))


class ReplayFlow(OfFlow, frozen=True, kw_only=True):
    """Which members are replayed."""

    failed_only: bool | None = None


@routes.post(
    "/v1/flows/{id}/replay",
    scope="operate",
    optional_body=True,
    answers={200: FlowReplayAnswer},
    errors=(404,),
)
async def replay_flow(call: Call[ReplayFlow, NoQuery]) -> Reply:
    """Rerun failed members; members that were skipped because of them wait again."""
    flow_id, failed_only = await call.flow(), call.body.failed_only is not False
    outcome = await call.backend.flows.replay_flow(flow_id, failed_only=failed_only)
    return answer(tagged("replayed", struct(outcome) | {"pending": int(outcome.pending)}))
