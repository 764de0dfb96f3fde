"""Flow records, edges and joins as stored, and the typed views of them."""

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from flowfabric.core.contracts import flows
from flowfabric.core.contracts.flows import AnyOf, JoinAll, JoinPolicy, Quorum
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.core.stored import Stored, corrupt

_EDGE = re.compile(
    r"([gusik])([stf]) ([0-9]+) ([0-9a-f-]{36}) ([0-9a-f-]{36}) ([0-9]+)/([0-9]*)/([0-9]*)"
    r" ([A-Za-z0-9_]*) ?(.*)",
    re.DOTALL,
)
_JOIN = re.compile(r"([aq]) ([0-9]+) ([cl]) ([01])")
_KINDS: dict[str, flows.DependencyKind] = {
    "s": "success_only",
    "t": "terminal",
    "f": "failure_only",
}
_STATES = {"g": "pending", "u": "pending", "s": "satisfied", "i": "impossible", "k": "impossible"}
_DECIDED = {"p": "pending", "s": "satisfied", "i": "impossible"}
_ENDED = ("completed", "failed", "cancelled", "expired", "skipped")
_FAILED = ("failed", "cancelled", "expired")
_BLOCKED = ("suspended", "delayed", "rate_limited", "waiting_children")
_STATES_COUNTED = tuple(state.value for state in PublicState if state != PublicState.RESUMABLE)
COUNTERS = (
    *("changes", "live", "kept", "node_count", "edge_count", "graph_revision"),
    *(f"members_{state}" for state in _STATES_COUNTED),
)
"""The names of a flow's counters, in their stored order."""
_unpack = msgspec.msgpack.Decoder(list[int]).decode


def join_of(stored: Stored) -> JoinPolicy:
    """The join policy of this child."""
    if not stored.is_set("join"):
        return JoinAll()
    parts = _JOIN.fullmatch(stored.text("join"))
    if parts is None:
        raise stored.corrupt("join", "is not a policy")
    ends = "cancel_remaining" if parts[3] == "c" else "let_run"
    if parts[1] == "a":
        return AnyOf(ends, parts[4] == "1")
    return Quorum(int(parts[2]), ends, parts[4] == "1")


def join_snapshot(execution_id: ExecutionId, stored: Stored) -> flows.JoinSnapshot | None:
    """The progress of a child's join; None without applied edges."""
    if not stored.is_set("deps"):
        return None
    try:
        n, succeeded, failed, skipped = map(int, stored.text("deps").split()[:4])
        state = _DECIDED[stored.text("deps")[-1]]
    except (ValueError, KeyError):
        raise stored.corrupt("deps", "are not counters") from None
    return flows.JoinSnapshot(
        *(execution_id, join_of(stored), n, succeeded, failed, skipped),
        running_count=n - succeeded - failed - skipped,
        group_state=cast("Any", state),
    )


def edge_snapshot(
    flow_id: str, tag: str, child: str, line: str, created_at: int
) -> flows.EdgeSnapshot:
    """One edge from the line that is stored with its child."""
    parts = _EDGE.fullmatch(line)
    if parts is None:
        raise corrupt(f"flow {flow_id}", f"edge into {child}", "cannot be decoded")
    return flows.EdgeSnapshot(
        edge_id=parts[5],
        flow_id=flow_id,
        upstream_execution_id=ExecutionId.trusted(f"{tag}:{parts[4]}"),
        downstream_execution_id=ExecutionId.trusted(f"{tag}:{child}"),
        dependency_kind=_KINDS[parts[2]],
        edge_state=cast("Any", _STATES[parts[1]]),
        created_at=created_at + int(parts[6]),
        input_name=parts[9] or None,
        data_passing_ref=parts[10] or None,
    )


def derived_state(members: Mapping[str, int]) -> flows.FlowState:
    """The state derived from all members."""
    total = sum(members.values())
    if total and sum(members.get(state, 0) for state in _ENDED) == total:
        return "failed" if any(members.get(state) for state in _FAILED) else "completed"
    if members.get("active"):
        return "running"
    return "blocked" if any(members.get(state) for state in _BLOCKED) else "open"


def _counters(stored: Stored) -> dict[str, int]:
    """The counters by name; all are 0 before the flow has members."""
    if not stored.is_set("counters"):
        return dict.fromkeys(COUNTERS, 0)
    try:
        return dict(zip(COUNTERS, _unpack(stored.fields["counters"]), strict=True))
    except (ValueError, TypeError):
        raise stored.corrupt("counters", "are not counters") from None


def _members(counters: Mapping[str, int]) -> dict[str, int]:
    """The number of members in each state, without states that have none."""
    return {state: count for state in _STATES_COUNTED if (count := counters[f"members_{state}"])}


def is_shown(stored: Stored) -> bool:
    """Whether the flow is visible: fully submitted and not being deleted."""
    return not stored.is_set("submitting") and not stored.is_set("deleting")


def finished_state(stored: Stored) -> flows.FlowState | None:
    """The state in which a flow finished; None while members have not ended."""
    return derived_state(_members(_counters(stored))) if stored.is_set("finished_at") else None


def _is_held(stored: Stored) -> bool:
    """Whether the members wait for a release; a subflow may only wait for its parent."""
    owned = stored.is_set("awaits_parent") and not stored.is_set("hold")
    return stored.is_set("held_from") and not owned


def flow_listing(flow_id: str, stored: Stored) -> flows.FlowListing:
    """One row of a listing from the flow's record."""
    counters = _counters(stored)
    members = _members(counters)
    state = derived_state(members)
    status: flows.FlowStatus = "active"
    if stored.is_set("cancelled_at"):
        status = "cancelled"
    elif state in ("completed", "failed"):
        status = state
    return flows.FlowListing(
        flow_id=flow_id,
        flow_kind=stored.text("flow_kind"),
        namespace=stored.text("namespace", "default"),
        created_at=stored.number("created_at"),
        public_flow_state="cancelled" if stored.is_set("cancelled_at") else "open",
        derived_state=state,
        status=status,
        node_count=counters["node_count"],
        ended_count=sum(members.get(ended, 0) for ended in _ENDED),
        held=_is_held(stored),
        finished_at=stored.maybe_number("finished_at"),
    )


def flow_snapshot(
    flow_id: str,
    stored: Stored,
    tags: Mapping[str, str],
    joins: tuple[flows.JoinSnapshot, ...],
) -> flows.FlowSnapshot:
    """The whole flow from its record."""
    counters = _counters(stored)
    members = _members(counters)
    return flows.FlowSnapshot(
        flow_id=flow_id,
        flow_kind=stored.text("flow_kind"),
        namespace=stored.text("namespace", "default"),
        public_flow_state="cancelled" if stored.is_set("cancelled_at") else "open",
        derived_state=derived_state(members),
        graph_revision=counters["graph_revision"],
        node_count=counters["node_count"],
        edge_count=counters["edge_count"],
        created_at=stored.number("created_at"),
        last_mutation_at=stored.number("last_mutation_at"),
        members=members,
        held=_is_held(stored),
        awaits_parent=stored.is_set("awaits_parent"),
        finished_at=stored.maybe_number("finished_at"),
        cancelled_at=stored.maybe_number("cancelled_at"),
        cancel_reason=stored.maybe_text("cancel_reason"),
        cancellation_policy=stored.maybe_text("cancellation_policy"),
        parent_execution_id=(
            ExecutionId.parse(stored.text("parent_execution_id"))
            if stored.is_set("parent_execution_id")
            else None
        ),
        tags=dict(sorted(tags.items())),
        edge_groups=joins,
    )
