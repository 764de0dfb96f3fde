"""Whole graphs in one call, and the policies of joins (10 §3.7)."""

from typing import Annotated, Any

import msgspec

from flowfabric.core.contracts import flows
from flowfabric.core.contracts.flows import AnyOf, GraphEdge, GraphNode, JoinAll, JoinPolicy, Quorum
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.server.bodies import (
    I32,
    I64,
    U32,
    EdgeKind,
    LaneName,
    Numbers,
    PolicyObject,
    Uuid,
    payload_of,
    words,
)
from flowfabric.server.calls import Call
from flowfabric.server.problems import invalid
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import variants
from flowfabric.server.wire import Reply, answer, variant

routes = Routes()
_MAX_NODES = 1000
_MAX_EDGES = 5000
_KINDS = ("all_of", "any_of", "quorum")
_ON_SATISFIED = ("cancel_remaining", "let_run")


class JoinBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy of a join."""

    kind: Annotated[str, words(_KINDS)]
    k: U32 | None = None
    on_satisfied: Annotated[str, words(_ON_SATISFIED)] | None = None
    spare_shared: bool | None = None

    def policy(self, where: str = "") -> JoinPolicy:
        """The policy as the engine takes it."""
        prefix = f"{where}." if where else ""
        if self.kind not in _KINDS:
            raise invalid(f"{prefix}kind", f"must be one of {', '.join(_KINDS)}")
        if self.kind == "all_of":
            return JoinAll()
        if self.kind == "quorum" and (self.k is None or not 1 <= self.k < 2**31):
            raise invalid(f"{prefix}k", "must be at least 1")
        if self.on_satisfied not in _ON_SATISFIED:
            raise invalid(f"{prefix}on_satisfied", f"must be one of {', '.join(_ON_SATISFIED)}")
        on_satisfied: Any = self.on_satisfied
        if self.kind == "any_of":
            return AnyOf(on_satisfied, bool(self.spare_shared))
        return Quorum(self.k or 1, on_satisfied, bool(self.spare_shared))


class NodeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One execution of a graph."""

    key: str
    execution_kind: str
    namespace: str | None = None
    lane_id: LaneName | None = None
    input_payload: Numbers = msgspec.UNSET
    input_payload_b64: bytes | None = None
    payload_encoding: str | None = None
    priority: I32 | None = None
    creator_identity: str | None = None
    tags: dict[str, str] = {}
    policy: PolicyObject | None = None
    delay_until: I64 | None = None
    execution_deadline_at: I64 | None = None

    def node(self, where: str, join: JoinPolicy) -> GraphNode:
        """The node as the engine takes it."""
        name = f"{where}.input_payload"
        return GraphNode(
            key=self.key,
            execution_kind=self.execution_kind,
            input_payload=payload_of(self.input_payload, self.input_payload_b64, name) or b"",
            payload_encoding=self.payload_encoding or "",
            lane_id=self.lane_id or "default",
            priority=self.priority,
            creator_identity=self.creator_identity or "",
            tags=self.tags,
            policy=None if self.policy is None else self.policy.policy,
            delay_until=self.delay_until,
            execution_deadline_at=self.execution_deadline_at,
            join=join,
        )


class EdgeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An edge between two nodes, named by their keys."""

    from_: str = msgspec.field(name="from")
    to: str
    kind: EdgeKind | None = None
    input_name: str | None = None
    data_passing_ref: str | None = None
    edge_id: Uuid | None = None

    @property
    def edge(self) -> GraphEdge:
        """The edge as the engine takes it, which checks the kind."""
        return GraphEdge(
            frm=self.from_,
            to=self.to,
            kind=self.kind or "success_only",  # pyright: ignore[reportArgumentType]
            input_name=self.input_name or "",
            data_passing_ref=self.data_passing_ref or "",
            edge_id=self.edge_id or "",
        )


class GroupBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy of one node's join."""

    node: str
    policy: JoinBody


class GraphBody(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that submit and extend share."""

    edges: list[EdgeBody] = []
    groups: list[GroupBody] = []

    def parts(
        self, nodes: list[NodeBody], namespace: str | None
    ) -> tuple[tuple[GraphNode, ...], tuple[GraphEdge, ...]]:
        """Nodes and edges as the engine takes them."""
        if len(nodes) > _MAX_NODES:
            raise invalid(
                "nodes", f"must have at most {_MAX_NODES} items; add the others with /extend"
            )
        if len(self.edges) > _MAX_EDGES:
            raise invalid(
                "edges", f"must have at most {_MAX_EDGES} items; add the others with /extend"
            )
        joins: dict[str, JoinPolicy] = {}
        keys = {node.key for node in nodes}
        for i, group in enumerate(self.groups):
            if group.node not in keys:
                advice = "is not a node of this call: use PUT …/groups/{execution_id}"
                raise invalid(f"groups[{i}].node", advice)
            joins[group.node] = group.policy.policy(f"groups[{i}].policy")
        found: list[GraphNode] = []
        for i, node in enumerate(nodes):
            if node.namespace is not None and namespace not in (None, node.namespace):
                raise invalid(f"nodes[{i}].namespace", "must be the namespace of the flow")
            found.append(node.node(f"nodes[{i}]", joins.get(node.key, JoinAll())))
        return tuple(found), tuple(edge.edge for edge in self.edges)


class SubmitFlow(GraphBody, frozen=True, kw_only=True):
    """A whole flow."""

    flow_kind: str
    namespace: str
    nodes: list[NodeBody]
    flow_id: Uuid | None = None
    tags: dict[str, str] = {}
    hold: bool | None = None


@routes.post(
    "/v1/flows/submit",
    scope="submit",
    limit="bulk",
    answers={201: variants(flows.Submitted), 200: variants(flows.AlreadySubmitted)},
    errors=(409,),
)
async def submit_flow(call: Call[SubmitFlow, NoQuery]) -> Reply:
    """Submit a whole graph; no member runs before all of it is stored."""
    body = call.body
    call.check_namespace(body.namespace)
    nodes, edges = body.parts(body.nodes, body.namespace)
    graph = flows.FlowGraph(
        flow_id=body.flow_id or new_uuid(),
        flow_kind=body.flow_kind,
        nodes=nodes,
        edges=edges,
        namespace=body.namespace,
        tags=body.tags,
        hold=bool(body.hold),
    )
    outcome = await call.backend.flows.submit_flow(graph)
    return answer(variant(outcome), 201 if isinstance(outcome, flows.Submitted) else 200)


class ExtendFlow(GraphBody, frozen=True, kw_only=True):
    """More nodes and edges of a flow."""

    nodes: list[NodeBody] = []
    flow_id: Uuid | None = None


@routes.post(
    "/v1/flows/{id}/extend",
    scope="submit",
    limit="bulk",
    answers={201: variants(flows.Extended), 200: variants(flows.AlreadyExtended)},
    errors=(404, 409),
)
async def extend_flow(call: Call[ExtendFlow, NoQuery]) -> Reply:
    """Add nodes and edges to a flow; edges may name nodes of earlier calls."""
    flow_id, body = call.uuid("flow_id"), call.body
    if not (body.nodes or body.edges or body.groups):
        raise invalid("nodes", "must not be empty unless there are edges or groups")
    nodes, edges = body.parts(body.nodes, None)
    await call.visible_flow(flow_id)
    outcome = await call.backend.flows.extend_flow(flow_id, nodes, edges)
    return answer(variant(outcome), 201 if isinstance(outcome, flows.Extended) else 200)


class GroupPolicy(JoinBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The policy of the join of the path's member; as in every request, more may be sent."""

    flow_id: Uuid | None = None
    execution_id: ExecutionId | None = None


@routes.put(
    "/v1/flows/{id}/groups/{execution_id}", scope="submit", answers={200: str}, errors=(404, 409)
)
async def set_group_policy(call: Call[GroupPolicy, NoQuery]) -> Reply:
    """Set the policy of a member's join, before its first edge is applied."""
    flow_id, execution_id = call.uuid("flow_id"), call.execution_id("execution_id")
    policy = call.body.policy()
    await call.visible_flow(flow_id)
    changed = await call.backend.flows.set_edge_group_policy(flow_id, execution_id, policy)
    return answer("Set" if changed else "AlreadySet")
