"""A stored flow as callers see it: its nodes, edges and changes, and why it failed."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from flowfabric.core.contracts.flows import DependencyKind, FlowState
from flowfabric.core.errors import FlowFabricError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.core.text import plural
from flowfabric.sdk.client import RunError

_SHOWN_FAILURES = 3
_FAILED = (PublicState.FAILED, PublicState.CANCELLED, PublicState.EXPIRED)


class GraphNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a stored flow."""

    key: str
    """Its name in the flow; the execution's id if it was added without a key."""
    execution_id: ExecutionId
    task: str
    state: PublicState
    subflow_id: str | None = None
    """The flow that it runs, if it was added with `flow.subflow()`."""


class GraphEdgeView(msgspec.Struct, frozen=True, kw_only=True):
    """`to` waits for `frm`; both are keys of nodes."""

    frm: str
    to: str
    kind: DependencyKind
    state: Literal["pending", "satisfied", "impossible"]
    input_name: str | None = None


class GraphView(msgspec.Struct, frozen=True, kw_only=True):
    """A flow with the states of its nodes."""

    flow_id: str
    kind: str
    state: FlowState
    cancelled: bool
    nodes: Mapping[str, GraphNodeView]
    edges: Sequence[GraphEdgeView]

    @property
    def exits(self) -> list[str]:
        """The nodes whose result or success no other node needs."""
        needed = {e.frm for e in self.edges if e.input_name or e.kind == "success_only"}
        return [key for key in self.nodes if key not in needed]

    def culprits(self) -> list[str]:
        """The nodes whose failure left an exit without a result.

        Follows a skipped exit back to the nodes that it waited for. Finds nothing if an exit was
        skipped although no node failed, such as an alarm for a failure that did not happen.
        """
        missing: dict[str, list[str]] = {}
        for edge in self.edges:
            if edge.state == "impossible":
                missing.setdefault(edge.to, []).append(edge.frm)
        open_keys = self.exits
        seen = set(open_keys)
        found: set[str] = set()
        while open_keys:
            key = open_keys.pop()
            state = self.nodes[key].state
            if state in _FAILED:
                found.add(key)
            elif state is PublicState.SKIPPED:
                new = [each for each in missing.get(key, ()) if each not in seen]
                seen.update(new)
                open_keys += new
        return [key for key in self.nodes if key in found]


class NodeChange(msgspec.Struct, frozen=True):
    """A node and its new state."""

    key: str
    state: PublicState
    execution_id: ExecutionId


class FlowFailed(FlowFabricError):
    """The flow has no result: some of its nodes did not complete.

    >>> try:
    ...     await flow.result()
    ... except FlowFailed as error:
    ...     print(error.failures["resize-2"].reason)
    """

    def __init__(self, graph: GraphView, failures: Mapping[str, RunError], reason: str) -> None:
        super().__init__(graph, failures, reason)
        self.graph = graph
        """The flow, with the state of each node."""
        self.failures = failures
        """The nodes that failed, expired or were cancelled, each with its error."""
        self.reason = reason
        """Why the flow was cancelled; empty if it was not."""

    @property
    def skipped(self) -> list[str]:
        """The nodes that did not run because of the failures."""
        nodes = self.graph.nodes.values()
        return [node.key for node in nodes if node.state is PublicState.SKIPPED]

    def __str__(self) -> str:
        ended = f"was cancelled ({self.reason or 'no reason given'})"
        parts = [f"Flow {self.graph.kind} {self.graph.flow_id} "]
        parts[0] += ended if self.graph.cancelled else "failed"
        shown = list(self.failures.items())[:_SHOWN_FAILURES]
        parts += (f"{key}: {error}" for key, error in shown)
        more = len(self.failures) - len(shown)
        if more:
            parts.append(f"and {plural(more, 'more node')}")
        if self.skipped:
            parts.append(f"{plural(len(self.skipped), 'node')} skipped")
        return "; ".join(parts)
