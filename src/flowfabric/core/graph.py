"""Check a graph of nodes and edges, order it, and derive the ids of its executions."""

import itertools
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from flowfabric.core.contracts.flows import Dependency, GraphEdge, GraphNode, JoinAll, Quorum
from flowfabric.core.errors import ConflictError, invalid_input
from flowfabric.core.ids import ExecutionId, derived_uuid, validate_text, validate_uuid
from flowfabric.core.partition import PartitionCounts, flow_partition

MAX_NODES = 1000
MAX_EDGES = 5000
_is_input_name = re.compile(r"[A-Za-z0-9_]{1,64}").fullmatch
SUBFLOW = "subflow"
"""The kind of members that own a flow; no worker runs them."""
KINDS = {"success_only": "s", "terminal": "t", "failure_only": "f"}
"""Kinds of dependencies, each with the letter that is stored for it."""


def is_input_name(text: str) -> bool:
    """Whether an input may have this name."""
    return _is_input_name(text) is not None


def subflow_id(
    parent: ExecutionId, counts: PartitionCounts, *, spread: bool = False, run: int = 0
) -> str:
    """The id of a flow that a member owns: in the member's partition, or with `spread` in another.

    The same run of the same member always gives the same id.
    """
    elsewhere = spread and counts.flow > 1
    names = (f"subflow {run} {number}" for number in itertools.count())
    ids = (derived_uuid(parent.uuid, name) for name in names)
    return next(
        each for each in ids if (flow_partition(each, counts) != parent.partition) == elsewhere
    )


def node_id(flow_id: str, tag: str, key: str) -> ExecutionId:
    """The id of a node: the same key of the same flow gives the same id."""
    return ExecutionId.trusted(f"{tag}:{derived_uuid(flow_id, key)}")


def edge_id(flow_id: str, edge: GraphEdge) -> str:
    """The edge's own id, or one derived from what makes the edge unique in its flow."""
    if edge.edge_id:
        return edge.edge_id
    return derived_uuid(flow_id, f"{edge.frm}\x1f{edge.to}\x1f{edge.input_name}")


def check_passing(edge: GraphEdge | Dependency, field: str = "edges") -> None:
    """Raise an error if the kind, input name, reference or id of an edge is malformed."""
    if edge.kind not in KINDS:
        raise invalid_input(f"{field}.kind", f"must be one of {', '.join(KINDS)}")
    if edge.input_name and _is_input_name(edge.input_name) is None:
        raise invalid_input(f"{field}.input_name", "must be 1 to 64 letters, digits or underscores")
    validate_text(edge.data_passing_ref, f"{field}.data_passing_ref")
    if edge.edge_id:
        validate_uuid(edge.edge_id, f"{field}.edge_id")


def dependency_id(flow_id: str, child: ExecutionId, given: Dependency) -> str:
    """The edge's own id, or one derived from what makes the edge unique in its flow."""
    if given.edge_id:
        return given.edge_id
    name = f"{given.upstream.uuid}\x1f{child.uuid}\x1f{given.input_name}"
    return derived_uuid(flow_id, name)


def _check_joins(nodes: Iterable[GraphNode], inbound: Mapping[str, list[GraphEdge]]) -> None:
    for node in nodes:
        join, edges = node.join, inbound.get(node.key, [])
        if isinstance(join, JoinAll):
            continue
        k = join.k if isinstance(join, Quorum) else 1
        if type(k) is not int or not 1 <= k <= max(1, len(edges)) or not edges:
            raise invalid_input(
                "groups", f"node {node.key!r}: k is {k}, but {len(edges)} edges lead to it"
            )


def _check_inputs(inbound: Mapping[str, list[GraphEdge]]) -> None:
    for key, edges in inbound.items():
        names = [edge.input_name for edge in edges if edge.input_name]
        if len(set(names)) < len(names):
            raise invalid_input("edges.input_name", f"is used twice for node {key!r}")
        if sum(1 for edge in edges if edge.data_passing_ref) > 1:
            raise invalid_input(
                "edges.data_passing_ref", f"only one edge may replace the payload of node {key!r}"
            )


def _conflict(code: str, *details: str) -> ConflictError:
    return ConflictError(code, *details)


def check_graph(
    nodes: Sequence[GraphNode], edges: Sequence[GraphEdge], known: Iterable[str] = ()
) -> dict[str, list[GraphEdge]]:
    """The inbound edges of each node; raises an error if the graph cannot be submitted.

    `known`: keys of nodes that the flow already has.
    """
    if len(nodes) > MAX_NODES:
        raise invalid_input("nodes", f"got {len(nodes)}; the limit of one call is {MAX_NODES}")
    if len(edges) > MAX_EDGES:
        raise invalid_input("edges", f"got {len(edges)}; the limit of one call is {MAX_EDGES}")
    keys: set[str] = set()
    for node in nodes:
        validate_text(node.key, "nodes.key", limit=256, required=True)
        if node.key in keys:
            raise invalid_input("nodes.key", f"{node.key!r} is used twice")
        keys.add(node.key)
    keys.update(known)
    pairs: set[tuple[str, str, str]] = set()
    inbound: dict[str, list[GraphEdge]] = {}
    for edge in edges:
        check_passing(edge)
        for end, key in (("from", edge.frm), ("to", edge.to)):
            if key not in keys:
                raise invalid_input(f"edges.{end}", f"no node has the key {key!r}")
    for edge in edges:
        if edge.frm == edge.to:
            raise _conflict("self_referencing_edge", edge.frm)
    for edge in edges:
        pair = (edge.frm, edge.to, edge.input_name)
        if pair in pairs:
            raise _conflict("dependency_already_exists", f"{edge.frm} → {edge.to}")
        pairs.add(pair)
        inbound.setdefault(edge.to, []).append(edge)
    _check_inputs(inbound)
    _check_joins(nodes, inbound)
    return inbound


def ordered(nodes: Sequence[GraphNode], inbound: Mapping[str, list[GraphEdge]]) -> list[GraphNode]:
    """The nodes with every upstream before its children; raises `cycle_detected`."""
    by_key = {node.key: node for node in nodes}
    open_edges = {
        key: sum(1 for edge in inbound.get(key, ()) if edge.frm in by_key) for key in by_key
    }
    children: dict[str, list[str]] = {}
    for edges in inbound.values():
        for edge in edges:
            children.setdefault(edge.frm, []).append(edge.to)
    ready = deque(key for key, count in open_edges.items() if count == 0)
    result: list[GraphNode] = []
    while ready:
        key = ready.popleft()
        result.append(by_key[key])
        for child in children.get(key, ()):
            if child in open_edges:
                open_edges[child] -= 1
                if open_edges[child] == 0:
                    ready.append(child)
    if len(result) < len(nodes):
        left = {key for key, count in open_edges.items() if count > 0}
        raise _conflict("cycle_detected", " → ".join(_cycle(left, inbound)))
    return result


def _cycle(left: set[str], inbound: Mapping[str, list[GraphEdge]]) -> list[str]:
    """The keys of one cycle. Every node in `left` has an upstream in `left`."""
    path: list[str] = []
    seen: dict[str, int] = {}
    key = min(left)
    while key not in seen:
        seen[key] = len(path)
        path.append(key)
        key = next(edge.frm for edge in inbound[key] if edge.frm in left)
    cycle = [*path[seen[key] :], key]
    cycle.reverse()
    return cycle
