"""Flows: executions that wait for each other."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

import msgspec

from flowfabric.core.contracts import ListingPage, flows
from flowfabric.core.contracts.flows import (
    AnyOf,
    FlowGraph,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
    Quorum,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.graph import KINDS
from flowfabric.core.ids import ExecutionId, validate_namespace, validate_text, validate_uuid
from flowfabric.core.partition import PartitionCounts, flow_partition
from flowfabric.core.state import PublicState
from flowfabric.core.tags import validate_tag_filter, validate_tag_key, validate_tags
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

POLICIES = ("cancel_all", "cancel_pending", "flow_only")
_MAX_QUORUM = 2**31 - 1
_ON_SATISFIED = ("cancel_remaining", "let_run")


def tag_of(flow_id: Any, counts: PartitionCounts) -> str:
    """The hash tag of the flow's partition; raises an error unless the id is a UUID."""
    return f"{{fp:{flow_partition(validate_uuid(flow_id, 'flow_id'), counts)}}}"


def check_member(flow_tag: str, execution_id: ExecutionId) -> None:
    """Raise an error for an execution of another partition: it can never be a member."""
    if execution_id.tag != flow_tag:
        raise ValidationError(
            "partition_mismatch", f"the flow is in {flow_tag}, the execution is {execution_id}"
        )


def check_header(graph: FlowGraph) -> None:
    """Raise an error for a graph whose flow cannot be created."""
    validate_text(graph.flow_kind, "flow_kind", limit=256, required=True)
    validate_namespace(graph.namespace)
    check.flag(graph.hold, "hold")
    if graph.tags != {}:
        validate_tags(graph.tags)
    if not graph.nodes:
        raise invalid_input("nodes", "must not be empty")


def check_parts(nodes: Any, edges: Any) -> tuple[list[GraphNode], list[GraphEdge]]:
    """The nodes and edges of a graph as lists of the right types."""
    nodes = check.listed(nodes, "nodes")
    for node in nodes:
        check.text(check.instance(node, GraphNode, "nodes").key, "nodes.key")
        check_join(node.join)
        if node.priority is not None:
            check.whole(node.priority, "nodes.priority", -check.MAX_EXACT)
    edges = check.listed(edges, "edges")
    for edge in edges:
        check.instance(edge, GraphEdge, "edges")
        ends = {"from": edge.frm, "to": edge.to}
        named = {"input_name": edge.input_name, "edge_id": edge.edge_id}
        for field, value in (ends | named).items():
            check.text(value, f"edges.{field}")
        check.one_of(edge.kind, "edges.kind", KINDS)
    return nodes, edges


def check_join(policy: Any) -> JoinPolicy:
    """A policy of a join in a valid form."""
    if isinstance(policy, JoinAll):
        return policy
    if not isinstance(policy, AnyOf | Quorum):
        raise invalid_input("policy", "must be JoinAll, AnyOf or Quorum")
    if isinstance(policy, Quorum):
        check.whole(policy.k, "policy.k", 1, _MAX_QUORUM)
    check.one_of(policy.on_satisfied, "policy.on_satisfied", _ON_SATISFIED)
    check.flag(policy.spare_shared, "policy.spare_shared")
    return policy


class FlowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects flows of a listing. Every part that is set must match."""

    namespace: str | None = None
    status: flows.FlowStatus | None = None
    tags: Mapping[str, str] = {}

    def validate(self) -> None:
        """Raise an error for a misspelled filter, which would look like an empty deployment."""
        if self.namespace is not None:
            validate_namespace(self.namespace)
        if self.status is not None:
            check.one_of(self.status, "status", get_args(flows.FlowStatus))
        if self.tags != {}:
            validate_tag_filter(self.tags)


class Flows(Concern, Protocol):
    """Graphs of executions: submit, extend, read, cancel and replay them."""

    async def create_flow(
        self, flow_id: str, flow_kind: str, namespace: str = "default"
    ) -> flows.FlowCreated | flows.FlowExists:
        """Create an empty flow; a repeat with another kind or namespace fails."""
        ...

    async def submit_flow(
        self,
        graph: FlowGraph,
        *,
        parent_execution_id: ExecutionId | None = None,
        spread: bool = False,
    ) -> flows.Submitted | flows.AlreadySubmitted:
        """Store a whole graph; no member runs or is listed before all of it is stored.

        With `parent_execution_id` the graph is a subflow. That execution is a member of kind
        `subflow` of another flow: the graph starts once the dependencies of that member are met,
        and the member ends when the graph finishes. Its result is that of the graph's exit nodes,
        the nodes without children: the bytes of the only one, or a JSON object by node key if all
        are JSON, or otherwise a msgpack map of bytes. With more than 1,000 exit nodes, or more than
        4 MiB, it has no result. Leave `flow_id` empty to have it derived from the parent. A subflow
        is stored in the partition of its parent; with `spread`, in another one, and the two
        partitions exchange messages in the background.
        """
        ...

    async def extend_flow(
        self,
        flow_id: str,
        nodes: Sequence[GraphNode] = (),
        edges: Sequence[GraphEdge] = (),
    ) -> flows.Extended | flows.AlreadyExtended:
        """Add nodes and edges; edges may name nodes of earlier calls."""
        ...

    async def spawn_children(
        self,
        handle: Handle,
        nodes: Sequence[GraphNode],
        edges: Sequence[GraphEdge] = (),
        *,
        kind: flows.DependencyKind = "terminal",
        wait: bool = False,
    ) -> flows.Spawned:
        """Add members that the caller's execution depends on.

        With `wait`, the lease is released until they have ended.
        """
        ...

    async def resolve_execution_flow_id(self, execution_id: ExecutionId) -> str | None:
        """The flow of an execution, or None."""
        ...

    async def release_flow(self, flow_id: str) -> flows.Released:
        """Let the members of a held flow run."""
        ...

    async def add_execution_to_flow(
        self, flow_id: str, execution_id: ExecutionId
    ) -> flows.MemberAdded | flows.AlreadyMember:
        """Add an existing execution to a flow."""
        ...

    async def stage_dependency_edge(
        self,
        flow_id: str,
        upstream_execution_id: ExecutionId,
        downstream_execution_id: ExecutionId,
        *,
        edge_id: str | None = None,
        dependency_kind: str = "success_only",
        data_passing_ref: str = "",
        input_name: str = "",
        expected_graph_revision: int | None = None,
    ) -> flows.Staged | flows.AlreadyStaged:
        """Store an edge; it takes effect when it is applied."""
        ...

    async def apply_dependency_to_child(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: ExecutionId | None = None,
        downstream_execution_id: ExecutionId | None = None,
        dependency_kind: str = "",
        data_passing_ref: str = "",
    ) -> flows.EdgeApplied | flows.AlreadyApplied:
        """Apply a staged edge; the optional arguments must match what was staged."""
        ...

    async def add_dependency(
        self,
        flow_id: str,
        upstream_execution_id: ExecutionId,
        downstream_execution_id: ExecutionId,
        *,
        edge_id: str | None = None,
        dependency_kind: str = "success_only",
        data_passing_ref: str = "",
        input_name: str = "",
        expected_graph_revision: int | None = None,
    ) -> flows.EdgeApplied | flows.AlreadyApplied:
        """Stage and apply an edge in one call."""
        ...

    async def set_edge_group_policy(
        self, flow_id: str, downstream_execution_id: ExecutionId, policy: JoinPolicy
    ) -> bool:
        """Set the policy of a child's join; returns whether that changed anything."""
        ...

    async def set_flow_tags(self, flow_id: str, tags: Mapping[str, str]) -> int:
        """Set tags, keeping the others; returns how many were set."""
        ...

    async def set_flow_tag(self, flow_id: str, key: str, value: str) -> int:
        """`set_flow_tags` with one pair."""
        return await self.set_flow_tags(flow_id, {validate_tag_key(key): value})

    async def get_flow_tag(self, flow_id: str, key: str) -> str | None:
        """One tag, or None if the flow or the tag does not exist."""
        ...

    async def cancel_flow(
        self,
        flow_id: str,
        reason: str = "",
        *,
        cancellation_policy: str = "cancel_all",
        grace_ms: int = 30_000,
        wait_timeout_ms: int = 0,
    ) -> flows.CancelFlowOutcome:
        """Cancel the flow and the members that the policy includes.

        With `wait_timeout_ms`, waits until they have ended.
        """
        ...

    async def describe_flow(
        self, flow_id: str, *, edge_groups: bool = True
    ) -> flows.FlowSnapshot | None:
        """The flow as it is stored, or None. Without `edge_groups` it reads no member."""
        ...

    async def wait_flow(self, flow_id: str, timeout: float | None = None) -> flows.FlowState:
        """Wait until all members have ended; returns the state of the flow.

        Raises `timeout` after that many seconds.
        """
        ...

    async def list_flows(
        self,
        *,
        partition: int | None = None,
        cursor: str = "",
        limit: int = 50,
        where: FlowFilter | None = None,
    ) -> ListingPage[flows.FlowListing]:
        """Flows, ordered by partition and id. A filtered page may be short before the last one."""
        ...

    async def list_members(
        self, flow_id: str, *, cursor: str = "", limit: int = 500
    ) -> ListingPage[flows.FlowMember]:
        """The members of a flow by id; none of an unknown flow."""
        ...

    async def describe_edge(self, flow_id: str, edge_id: str) -> flows.EdgeSnapshot | None:
        """One edge, or None."""
        ...

    async def list_edges(
        self,
        flow_id: str,
        *,
        outgoing: ExecutionId | None = None,
        incoming: ExecutionId | None = None,
        cursor: str = "",
        limit: int = 500,
    ) -> ListingPage[flows.EdgeSnapshot]:
        """The edges of a flow, or only those that leave or lead to one member."""
        ...

    async def list_outgoing_edges(self, execution_id: ExecutionId) -> list[flows.EdgeSnapshot]:
        """Every edge that leaves an execution; none without a flow."""
        ...

    async def list_incoming_edges(self, execution_id: ExecutionId) -> list[flows.EdgeSnapshot]:
        """Every edge that leads to an execution; none without a flow."""
        ...

    async def evaluate_flow_eligibility(self, execution_id: ExecutionId) -> flows.FlowEligibility:
        """Whether its dependencies let an execution run; an unknown one is `not_found`."""
        ...

    async def get_inputs(self, execution_id: ExecutionId) -> flows.FlowInputs:
        """The inputs that satisfied edges with input names pass to an execution."""
        ...

    async def delete_flow(self, flow_id: str) -> flows.FlowDeleted:
        """Delete an ended flow with all its members; `flow_not_terminal` if it has not ended.

        The engine deletes subflows of its members in the background.
        """
        ...

    async def replay_flow(self, flow_id: str, *, failed_only: bool = True) -> flows.FlowReplayed:
        """Rerun failed and expired members; members skipped because of them wait again.

        Without `failed_only`, reruns cancelled members, too.
        """
        ...

    async def flow_ids(self, partition: int, after: str = "", limit: int = 100) -> list[str]:
        """Ids of the flows of a partition in order, hidden ones included: for upkeep."""
        ...

    async def project_flow_summary(self, flow_id: str) -> flows.FlowAudit:
        """Compare the counters of a flow with its members, and repair them.

        Deletes a flow whose retention is over, or whose submission was interrupted, instead.
        """
        ...

    async def promote_blocked_to_eligible(self, execution_id: ExecutionId) -> PublicState:
        """Release a member that waits for dependencies although all are resolved."""
        ...

    async def resolve_dependency(
        self, flow_id: str, edge_id: str, upstream_outcome: str
    ) -> flows.DependencyResolved:
        """Resolve one edge of an upstream that ended.

        The outcome in the upstream's record takes precedence over `upstream_outcome`.
        """
        ...

    async def cascade_completion(self, execution_id: ExecutionId) -> flows.CascadeOutcome:
        """Resolve what depends on an ended member; a repeat changes nothing."""
        ...

    async def cancel_flow_header(
        self,
        flow_id: str,
        reason: str = "",
        *,
        cancellation_policy: str = "cancel_all",
        grace_ms: int = 30_000,
    ) -> flows.HeaderCancelled | flows.HeaderAlreadyTerminal:
        """The first step of `cancel_flow`: cancel members, within the limit of one call."""
        ...

    async def ack_cancel_member(self, flow_id: str, execution_id: ExecutionId) -> int:
        """Note that a member no longer needs to be cancelled; returns how many still do."""
        ...

    async def drain_sibling_cancel_group(
        self, flow_id: str, downstream_execution_id: ExecutionId
    ) -> flows.SiblingDrain:
        """Cancel upstreams that a decided join no longer needs, within the limit of one call."""
        ...

    async def reconcile_sibling_cancel_group(
        self, flow_id: str, downstream_execution_id: ExecutionId
    ) -> flows.SiblingReconcile:
        """Remove a group whose siblings have all ended from the queue; cancels nothing."""
        ...

    async def drain_cascade(
        self, partition: int, *, retry: bool = True, parked: bool = False
    ) -> flows.CascadeCounts:
        """Continue with the backlog of earlier calls, within the limit of one call.

        With `retry`, includes updates that failed; with `parked`, those that failed too often.
        """
        ...

    async def drain_flow_cancel(self, flow_id: str) -> tuple[int, int, int]:
        """Cancel more members of a cancelled flow.

        Returns how many were cancelled, how many needed no cancellation, and how many remain.
        """
        ...
