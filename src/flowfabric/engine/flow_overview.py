"""Reports about flows for people, read only through the engine's interface."""

import asyncio
from collections import Counter

import msgspec

from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.flows import (
    DependencyKind,
    EdgeSnapshot,
    FlowListing,
    FlowMember,
    FlowSnapshot,
    FlowState,
)
from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import ExecutionId, PartitionKey
from flowfabric.core.state import PublicState
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.flows import FlowFilter
from flowfabric.engine.paging import read_every, read_pages

_PAGE = 1000
_PAGES = 10
"""How many pages to read unless the caller asks for everything."""
_UPSTREAMS = 20
_EDGE_ORDER = ("impossible", "pending", "satisfied")
_UNITS = {
    "e": "an edge",
    "s": "a sibling to cancel",
    "f": "the end",
    "c": "a member to cancel",
    "h": "a member to release",
    "m": "a message between partitions",
    **dict.fromkeys("rR", "a member to reopen"),
    **dict.fromkeys("pPw", "a member to replay"),
}
"""The flow updates that may fail too often, by their letter."""


def describe_unit(unit: str) -> str:
    """A flow update that failed too often, for people."""
    kind, _, rest = unit.partition("|")
    return f"{_UNITS.get(kind, 'an update')} of flow {rest.partition('|')[0]}"


class NewestFlows(msgspec.Struct, frozen=True):
    """The newest flows, and how many have each status."""

    rows: list[FlowListing]
    statuses: Counter[str]
    complete: bool
    """Whether every flow was read, or only the first pages."""
    now_ms: int


async def list_newest_flows(backend: Backend, where: FlowFilter, limit: int | None) -> NewestFlows:
    """The newest flows that match; without a limit, all of them."""
    found: list[FlowListing] = []
    statuses: Counter[str] = Counter()
    pages, complete = 0, False
    async for page in read_pages(
        lambda cursor: backend.flows.list_flows(cursor=cursor, limit=_PAGE, where=where)
    ):
        statuses.update(row.status for row in page.entries)
        found += page.entries
        found.sort(key=lambda row: (-row.created_at, row.flow_id))
        del found[limit or len(found) :]
        pages += 1
        complete = page.next_cursor is None
        if limit is not None and pages == _PAGES:
            break
    return NewestFlows(found, statuses, complete, await backend.meta.server_time_ms())


async def flows_that_start_with(
    backend: Backend, start: str, namespace: str | None, limit: int
) -> list[str]:
    """The ids of flows that start with this text; at most `limit`."""
    tags = await backend.places.used_partitions()
    partitions = [PartitionKey.trusted(tag).index_number for tag in tags]
    flows = backend.flows
    pages = await asyncio.gather(*(flows.flow_ids(each, start, limit) for each in partitions))
    near = sorted(each for page in pages for each in page if each.startswith(start))
    found: list[str] = []
    for flow_id in near:
        flow = await flows.describe_flow(flow_id, edge_groups=False)
        if flow is not None and namespace in (None, flow.namespace):
            found.append(flow_id)
        if len(found) == limit:
            break
    return found


class FlowDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A flow with its members in the order in which they joined, and its edges by upstream."""

    flow: FlowSnapshot
    nodes: list[FlowMember]
    edges: list[EdgeSnapshot]
    now_ms: int


async def read_flow(backend: Backend, flow_id: str, before: FlowDetail | None = None) -> FlowDetail:
    """Read a flow. Edges are read again only if the graph has grown since `before`."""
    flow, now = await asyncio.gather(
        backend.flows.describe_flow(flow_id, edge_groups=False), backend.meta.server_time_ms()
    )
    if flow is None:
        raise NotFoundError("flow_not_found", flow_id)
    same = before is not None and before.flow.graph_revision == flow.graph_revision
    flows = backend.flows
    members = await read_every(
        lambda cursor: flows.list_members(flow_id, cursor=cursor, limit=_PAGE)
    )
    members.sort(key=lambda member: member.number)
    if before is not None and same:
        edges = before.edges
    else:
        edges = await read_every(
            lambda cursor: flows.list_edges(flow_id, cursor=cursor, limit=_PAGE)
        )
        at = {member.execution_id: member.number for member in members}
        edges.sort(key=lambda edge: at.get(edge.upstream_execution_id, 0))
    return FlowDetail(flow=flow, nodes=members, edges=edges, now_ms=now)


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """A member that another one depends on."""

    execution_id: ExecutionId
    node: str | None
    execution_kind: str
    public_state: PublicState | None
    """None if the execution was deleted."""
    dependency_kind: DependencyKind
    edge_state: str
    input_name: str | None

    @property
    def name(self) -> str:
        """Its key in the graph, or its task and the start of its id."""
        return member_name(self.node, self.execution_kind, self.execution_id)


def member_name(node: str | None, task: str, execution_id: ExecutionId) -> str:
    """A member's name for people: its key, or its task and the start of its id."""
    return node or f"{task} {execution_id.uuid[:8]}".lstrip()


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The flow of an execution, and the executions before it."""

    flow_id: str
    flow_kind: str
    derived_state: FlowState
    held: bool
    awaited_parent: ExecutionId | None
    """The member that owns the flow, if the flow still waits for that member's dependencies."""
    cancelled_at: int | None
    node: str | None
    upstreams: list[Upstream]
    """At most 20: first those that can no longer satisfy it, then those that have not ended."""
    upstream_count: int
    open_count: int


async def read_membership(backend: Backend, info: ExecutionInfo) -> Membership | None:
    """The flow of an execution; None if it has none, or if the flow was deleted."""
    if info.flow_id is None:
        return None
    flow, edges = await asyncio.gather(
        backend.flows.describe_flow(info.flow_id, edge_groups=False),
        backend.flows.list_incoming_edges(info.execution_id),
    )
    if flow is None:
        return None
    edges.sort(key=lambda edge: _EDGE_ORDER.index(edge.edge_state))
    return Membership(
        flow_id=flow.flow_id,
        flow_kind=flow.flow_kind,
        derived_state=flow.derived_state,
        held=flow.held,
        awaited_parent=flow.parent_execution_id if flow.awaits_parent else None,
        cancelled_at=flow.cancelled_at,
        node=info.node,
        upstreams=list(
            await asyncio.gather(*(_upstream(backend, edge) for edge in edges[:_UPSTREAMS]))
        ),
        upstream_count=len(edges),
        open_count=sum(edge.edge_state == "pending" for edge in edges),
    )


async def _upstream(backend: Backend, edge: EdgeSnapshot) -> Upstream:
    try:
        info = await backend.reads.read_execution_info(edge.upstream_execution_id)
    except NotFoundError:
        info = None
    return Upstream(
        execution_id=edge.upstream_execution_id,
        node=None if info is None else info.node,
        execution_kind="" if info is None else info.execution_kind,
        public_state=None if info is None else info.public_state,
        dependency_kind=edge.dependency_kind,
        edge_state=edge.edge_state,
        input_name=edge.input_name,
    )
