"""Splits a graph into short calls, and encodes its nodes as arguments."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from flowfabric.core.contracts import flows
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import GraphNode, JoinAll, JoinPolicy
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey.creation import creation_options
from flowfabric.engine.valkey.pages import chunks

# How much one call writes, so that it blocks the server for only a few milliseconds.
_NODES_AT_ONCE = 100
_EDGES_AT_ONCE = 120
_LATE_AT_ONCE = 60
_BYTES_AT_ONCE = 2_097_152
_pack = msgspec.msgpack.Encoder().encode

Edge = list[str]
Item = tuple[GraphNode, ExecutionId, list[Edge]]


def join_text(policy: JoinPolicy) -> str:
    """A policy as stored: letter, k, whether the others are cancelled, whether shared ones stay."""
    if isinstance(policy, JoinAll):
        return ""
    k = policy.k if isinstance(policy, flows.Quorum) else 1
    letter = "q" if isinstance(policy, flows.Quorum) else "a"
    ends = "c" if policy.on_satisfied == "cancel_remaining" else "l"
    return f"{letter} {k} {ends} {int(policy.spare_shared)}"


def new_member(node: GraphNode, execution_id: ExecutionId, namespace: str) -> NewExecution:
    """The execution of a node."""
    return NewExecution(
        execution_id=execution_id,
        execution_kind=node.execution_kind,
        input_payload=node.input_payload,
        payload_encoding=node.payload_encoding,
        namespace=namespace,
        lane_id=node.lane_id,
        priority=node.priority,
        creator_identity=node.creator_identity,
        tags=node.tags,
        policy=node.policy,
        delay_until=node.delay_until,
        delay_ms=node.delay_ms,
        execution_deadline_at=node.execution_deadline_at,
    )


def _member_options(node: GraphNode, deps: list[Edge]) -> dict[str, Any]:
    options: dict[str, Any] = {"node": node.key}
    if deps:
        options["deps"] = deps[:_EDGES_AT_ONCE]
        if len(deps) > _EDGES_AT_ONCE:
            options["inbound"] = len(deps)
        if any(name for *_, name, _ref in deps):
            options["named"] = True
    if join := join_text(node.join):
        options["join"] = join
    return options


class FlowPart:
    """The additions of one call to a flow: edges of earlier nodes, nodes with their first edges."""

    def __init__(self, more: Sequence[Edge] = (), late: Sequence[Edge] = ()) -> None:
        self.more = more
        """Further edges of a node that an earlier part creates."""
        self.items: list[Item] = []
        self.late = list(late)
        """Edges into nodes that the flow had before."""
        self._edges = len(more)
        self._size = 0

    def takes(self, item: Item, late: Sequence[Edge]) -> bool:
        """Whether the call stays short with this node and these late edges."""
        node, _, deps = item
        return (
            len(self.items) < _NODES_AT_ONCE
            and self._edges + min(len(deps), _EDGES_AT_ONCE) <= _EDGES_AT_ONCE
            and self._size + len(node.input_payload) <= _BYTES_AT_ONCE
            and len(self.late) + len(late) <= _LATE_AT_ONCE
        )

    def add(self, item: Item, late: Sequence[Edge]) -> None:
        """Add a node and edges that leave it."""
        node, _, deps = item
        self.items.append(item)
        self.late += late
        self._edges += len(deps)
        self._size += len(node.input_payload)


def flow_parts(items: Sequence[Item], late: Sequence[Edge] = ()) -> Iterator[FlowPart]:
    """The additions, split into short calls. A late edge comes with its upstream if possible."""
    leading: dict[str, list[Edge]] = {}
    for edge in late:
        leading.setdefault(edge[1], []).append(edge)
    left: list[Edge] = []
    part = FlowPart()
    for item in items:
        _, execution_id, deps = item
        own = leading.pop(execution_id.uuid, [])
        left += own[_LATE_AT_ONCE:]
        if (part.items or part.more) and not part.takes(item, own[:_LATE_AT_ONCE]):
            yield part
            part = FlowPart()
        part.add(item, own[:_LATE_AT_ONCE])
        for chunk in chunks(deps[_EDGES_AT_ONCE:], _EDGES_AT_ONCE):
            yield part
            part = FlowPart(more=[[*edge, execution_id.uuid] for edge in chunk])
    for edges in leading.values():
        left += edges
    # What fits in one call is stored or refused as a whole.
    for chunk in chunks(left, _LATE_AT_ONCE):
        if len(part.late) + len(chunk) > _LATE_AT_ONCE:
            yield part
            part = FlowPart()
        part.late += chunk
    yield part


def item_args(items: Sequence[Item], namespace: str, feeding: Collection[str] = ()) -> list[Any]:
    """Items as ff_create expects them. `feeding`: keys of nodes that others wait for."""
    args: list[Any] = []
    for node, execution_id, deps in items:
        options = creation_options(new_member(node, execution_id, namespace or "default"))
        if not namespace:
            options.pop("ns", None)
        options |= _member_options(node, deps)
        if node.key in feeding:
            options["out"] = True
        args += (execution_id, node.execution_kind, node.input_payload)
        args += (node.payload_encoding, _pack(options))
    return args


def part_args(items: Sequence[Item], late: Sequence[Edge], namespace: str) -> Iterator[list[Any]]:
    """The arguments of the calls that add these nodes and edges, one after the other."""
    parts = list(flow_parts(items, late))
    for number, part in enumerate(parts, 1):
        yield [
            *(number, int(number == len(parts)), len(part.items)),
            *item_args(part.items, namespace),
            *(_pack(part.late), _pack(part.more)),
        ]
