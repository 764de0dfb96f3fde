"""Inputs and results of operations on flows: graphs of executions."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState

DependencyKind = Literal["success_only", "terminal", "failure_only"]
"""Which outcome of the upstream satisfies an edge: success, any, or failure and expiry."""
OnSatisfied = Literal["cancel_remaining", "let_run"]
CancellationPolicy = Literal["cancel_all", "cancel_pending", "flow_only"]
FlowState = Literal["open", "running", "blocked", "completed", "failed"]
"""The state that follows from the states of all members."""


class JoinAll(msgspec.Struct, frozen=True, tag_field="kind", tag="all_of"):
    """Every edge must be satisfied: the default."""


class AnyOf(msgspec.Struct, frozen=True, tag_field="kind", tag="any_of"):
    """The first satisfied edge decides."""

    on_satisfied: OnSatisfied
    spare_shared: bool = False
    """Whether `cancel_remaining` spares upstreams that another undecided child waits for."""


class Quorum(msgspec.Struct, frozen=True, tag_field="kind", tag="quorum"):
    """`k` satisfied edges decide."""

    k: int
    on_satisfied: OnSatisfied
    spare_shared: bool = False


JoinPolicy = JoinAll | AnyOf | Quorum


class GraphNode(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a graph; its key names it there."""

    key: str
    execution_kind: str
    input_payload: bytes = b""
    payload_encoding: str = ""
    lane_id: str = "default"
    priority: int | None = None
    creator_identity: str = ""
    tags: Mapping[str, str] = {}
    policy: ExecutionPolicy | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    execution_deadline_at: int | None = None
    join: JoinPolicy = JoinAll()
    """The policy of its inbound edges."""


class GraphEdge(msgspec.Struct, frozen=True, kw_only=True):
    """`to` waits for `frm`; both are keys of nodes."""

    frm: str = msgspec.field(name="from")
    to: str
    kind: DependencyKind = "success_only"
    input_name: str = ""
    """The name of the result of `frm` in the claim of `to`."""
    data_passing_ref: str = ""
    """If not empty, the result of `frm` replaces the payload of `to`."""
    edge_id: str = ""
    """By default derived from the flow, the keys and the input name."""


class Dependency(msgspec.Struct, frozen=True, kw_only=True):
    """An edge from an existing member to an execution that is being created."""

    upstream: ExecutionId
    kind: DependencyKind = "success_only"
    input_name: str = ""
    """The name of the result of `upstream` in the claim."""
    data_passing_ref: str = ""
    """If not empty, the result of `upstream` replaces the payload."""
    edge_id: str = ""
    """By default derived from both executions and the input name."""


class FlowGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A whole flow to submit at once."""

    flow_id: str
    flow_kind: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...] = ()
    namespace: str = "default"
    tags: Mapping[str, str] = {}
    hold: bool = False
    """Whether its members wait for `release_flow`."""


class CascadeCounts(msgspec.Struct, frozen=True):
    """How many edges a call resolved, and how many members it released, skipped and cancelled."""

    resolved: int = 0
    promoted: int = 0
    skipped: int = 0
    cancelled: int = 0
    pending: bool = False


class FlowCreated(NamedOutcome[Literal["created"]], frozen=True):
    """The flow exists now."""

    flow_id: str


class FlowExists(NamedOutcome[Literal["already_satisfied"]], frozen=True):
    """The flow already existed, with the same kind and namespace."""

    flow_id: str


class MemberAdded(NamedOutcome[Literal["added"]], frozen=True):
    """The execution is a member now."""

    execution_id: ExecutionId
    new_node_count: int


class AlreadyMember(NamedOutcome[Literal["already_member"]], frozen=True):
    """The execution was already a member."""

    execution_id: ExecutionId
    node_count: int


class Staged(NamedOutcome[Literal["staged"]], frozen=True):
    """The edge is stored; it takes effect when it is applied."""

    edge_id: str
    new_graph_revision: int


class AlreadyStaged(NamedOutcome[Literal["already_staged"]], frozen=True):
    """The same edge was already stored."""

    edge_id: str
    graph_revision: int


class EdgeApplied(NamedOutcome[Literal["applied"]], frozen=True):
    """The child waits for the upstream, unless the upstream has already ended."""

    unsatisfied_count: int
    resolution: str = ""
    """What the edge became at once because its upstream had already ended; otherwise empty."""
    graph_revision: int = 0
    cascade: CascadeCounts | None = None
    """What this changed for other members; None if nothing."""


class AlreadyApplied(NamedOutcome[Literal["already_applied"]], frozen=True):
    """The edge was already applied."""


class Submitted(NamedOutcome[Literal["submitted"]], frozen=True):
    """The whole graph is stored; its roots can run."""

    flow_id: str
    graph_revision: int
    nodes: dict[str, ExecutionId]


class AlreadySubmitted(NamedOutcome[Literal["already_submitted"]], frozen=True):
    """The same graph was submitted before."""

    flow_id: str
    graph_revision: int
    nodes: dict[str, ExecutionId]


class Extended(NamedOutcome[Literal["extended"]], frozen=True):
    """The flow has the new members and edges."""

    graph_revision: int
    nodes: dict[str, ExecutionId]


class AlreadyExtended(NamedOutcome[Literal["already_extended"]], frozen=True):
    """The flow already had all of these members and edges."""

    graph_revision: int
    nodes: dict[str, ExecutionId]


class Spawned(NamedOutcome[Literal["spawned"]], frozen=True):
    """The children are stored; `parked` if the lease was released until they have ended."""

    graph_revision: int
    nodes: dict[str, ExecutionId]
    parked: bool = False
    cascade: CascadeCounts | None = None


class Released(NamedOutcome[Literal["released"]], frozen=True):
    """The flow is no longer held; `eligible` members can run now.

    If `pending`, the engine releases the others in the background.
    """

    eligible: int
    pending: bool = False


class FlowCancelled(NamedOutcome[Literal["cancelled"]], frozen=True):
    """The flow is cancelled; `pending_members` are still to be cancelled."""

    cancellation_policy: str
    member_execution_ids: tuple[ExecutionId, ...]
    total_members: int
    truncated: bool = False
    pending_members: int = 0


class CancellationScheduled(NamedOutcome[Literal["cancellation_scheduled"]], frozen=True):
    """The flow is cancelled; the engine cancels the remaining members in the background."""

    cancellation_policy: str
    member_count: int
    member_execution_ids: tuple[ExecutionId, ...]


class PartiallyCancelled(NamedOutcome[Literal["partially_cancelled"]], frozen=True):
    """The flow is cancelled, but some members could not be; the engine keeps trying."""

    cancellation_policy: str
    member_execution_ids: tuple[ExecutionId, ...]
    failed_member_execution_ids: tuple[ExecutionId, ...]


CancelFlowOutcome = FlowCancelled | CancellationScheduled | PartiallyCancelled


class FlowDeleted(NamedOutcome[Literal["deleted"]], frozen=True):
    """The flow, its members and edges are gone."""

    flow_id: str


class FlowReplayed(msgspec.Struct, frozen=True):
    """How many members of a flow run again, and how many wait again."""

    replayed: int
    reopened: int
    pending: bool = False
    """Whether the engine continues in the background."""


class HeaderCancelled(NamedOutcome[Literal["cancelled"]], frozen=True):
    """The flow is cancelled now."""

    cancellation_policy: str
    member_execution_ids: tuple[ExecutionId, ...]


class HeaderAlreadyTerminal(NamedOutcome[Literal["already_terminal"]], frozen=True):
    """The flow was cancelled before."""

    stored_cancellation_policy: str | None
    stored_cancel_reason: str | None
    member_execution_ids: tuple[ExecutionId, ...]


class DependencyResolved(msgspec.Struct, frozen=True):
    """What the end of an upstream changed for one child."""

    verdict: Literal["satisfied", "impossible", "pending", "already_fired", "already_resolved"]
    data_injected: bool = False
    """Whether the upstream's result replaced the child's payload."""
    child_skipped: bool = False


class CascadeOutcome(msgspec.Struct, frozen=True):
    """What the end of a member changed for the members that depend on it."""

    resolved: int
    cascaded_children: int
    """How many children ended because of it."""
    synchronous: bool
    """Whether this call did everything."""


SiblingDrain = Literal["drained", "already_drained", "drained_sans_group", "pending"]
SiblingReconcile = Literal["no_op", "sremmed_stale", "completed_drain"]


class FlowAudit(msgspec.Struct, frozen=True):
    """What an audit of a flow found and did."""

    outcome: Literal[
        "consistent", "repaired", "changed", "submitting", "deleting", "deleted", "orphan_removed"
    ]
    """`changed`: the flow changed during the audit, so nothing was compared."""
    drift: tuple[str, ...] = ()
    """Counters that were wrong, each as `<name> <stored>><counted>`."""


class FlowInput(msgspec.Struct, frozen=True):
    """The outcome and result that a satisfied edge with an input name passes to the child."""

    execution_id: ExecutionId
    outcome: str
    result: bytes | None
    encoding: str = ""


class FlowInputs(msgspec.Struct, frozen=True):
    """The inputs of an execution by name, and the upstream that decided an any_of or quorum."""

    inputs: Mapping[str, FlowInput] = {}
    fired_by: ExecutionId | None = None


NO_INPUTS = FlowInputs()


class JoinSnapshot(msgspec.Struct, frozen=True):
    """The progress of one child's join."""

    downstream_execution_id: ExecutionId
    policy: JoinPolicy
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: Literal["pending", "satisfied", "impossible"]


class FlowMember(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a flow in a listing."""

    execution_id: ExecutionId
    number: int
    """Members are numbered in the order in which they joined."""
    node: str
    """Its key in the graph; empty if it was added without one."""
    public_state: PublicState
    execution_kind: str
    join: JoinSnapshot | None = None
    """The progress of its join; None without dependencies."""
    subflow_id: str | None = None
    """The flow that it owns and waits for; None unless it is of kind `subflow`."""


class FlowSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A flow as it is stored."""

    flow_id: str
    flow_kind: str
    namespace: str
    public_flow_state: Literal["open", "cancelled"]
    derived_state: FlowState
    graph_revision: int
    node_count: int
    edge_count: int
    created_at: int
    last_mutation_at: int
    members: Mapping[str, int]
    """The number of members in each public state."""
    held: bool = False
    """Whether its members wait for `release_flow`."""
    awaits_parent: bool = False
    """Whether it starts when the dependencies of the member that owns it are met."""
    finished_at: int | None = None
    cancelled_at: int | None = None
    cancel_reason: str | None = None
    cancellation_policy: str | None = None
    parent_execution_id: ExecutionId | None = None
    tags: Mapping[str, str] = {}
    edge_groups: tuple[JoinSnapshot, ...] = ()


class EdgeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An edge as it is stored."""

    edge_id: str
    flow_id: str
    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    dependency_kind: DependencyKind
    edge_state: Literal["pending", "satisfied", "impossible"]
    created_at: int
    input_name: str | None = None
    data_passing_ref: str | None = None
    satisfaction_condition: str = "all_required"
    created_by: str = "engine"


FlowStatus = Literal["active", "completed", "failed", "cancelled"]
"""The status of a flow in a listing: cancelled, or the one that follows from its members."""
FlowEligibility = Literal[
    "not_found",
    "not_runnable",
    "owned",
    "terminal",
    "impossible",
    "blocked_by_dependencies",
    "eligible",
]
"""Whether the dependencies of an execution let it run."""


class FlowListing(msgspec.Struct, frozen=True, kw_only=True):
    """One flow of a listing."""

    flow_id: str
    flow_kind: str
    namespace: str
    created_at: int
    public_flow_state: Literal["open", "cancelled"]
    derived_state: FlowState
    status: FlowStatus
    node_count: int
    ended_count: int
    """How many of its members have ended."""
    held: bool = False
    finished_at: int | None = None
