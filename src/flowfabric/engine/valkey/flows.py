"""Flows on Valkey: all keys of a flow and its members share one slot."""

import contextlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from flowfabric.core import graph as graphs
from flowfabric.core.contracts import flows
from flowfabric.core.contracts.flows import FlowGraph, GraphEdge, GraphNode, JoinPolicy
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import (
    EngineError,
    NotFoundError,
    StateError,
    TransportError,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId, validate_namespace, validate_text, validate_uuid
from flowfabric.core.tags import TRACE_TAG, validate_tags
from flowfabric.engine.api import check
from flowfabric.engine.api import flows as api
from flowfabric.engine.api.executions import check_new
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import proof, text
from flowfabric.engine.valkey.flow_parts import (
    Edge,
    FlowPart,
    Item,
    flow_parts,
    item_args,
    join_text,
    new_member,
    part_args,
)
from flowfabric.engine.valkey.flow_upkeep import FlowUpkeep

# The order of tags does not matter.
_digest = msgspec.msgpack.Encoder(order="deterministic").encode
_pack = msgspec.msgpack.Encoder().encode


class ValkeyFlows(FlowUpkeep, api.Flows):
    """`Flows` on Valkey."""

    async def create_flow(
        self, flow_id: str, flow_kind: str, namespace: str = "default"
    ) -> flows.FlowCreated | flows.FlowExists:
        tag = self._tag(flow_id)
        validate_text(flow_kind, "flow_kind", limit=256, required=True)
        validate_namespace(namespace)
        await self._places.register(tag, set())
        reply = await self._calls.fcall(
            "ff_create_flow", tag, (flow_id, flow_kind, namespace), op="create_flow"
        )
        if reply[1] == b"ALREADY_SATISFIED":
            return flows.FlowExists(flow_id)
        return flows.FlowCreated(flow_id)

    async def submit_flow(
        self,
        graph: FlowGraph,
        *,
        parent_execution_id: ExecutionId | None = None,
        spread: bool = False,
    ) -> flows.Submitted | flows.AlreadySubmitted:
        check.instance(graph, FlowGraph, "graph")
        check.flag(spread, "spread")
        header: dict[str, Any] = {}
        if parent_execution_id is not None:
            graph, header = await self._owned(graph, parent_execution_id, spread=spread)
        elif spread:
            raise invalid_input("spread", "needs parent_execution_id: it applies to subflows only")
        tag = self._tag(graph.flow_id)
        api.check_header(graph)
        nodes, edges = api.check_parts(graph.nodes, graph.edges)
        inbound = graphs.check_graph(nodes, edges)
        nodes = graphs.ordered(nodes, inbound)
        items = self._items(graph.flow_id, tag, nodes, inbound)
        await self._places.register(tag, {node.lane_id for node in nodes})
        parent = str(parent_execution_id or "").encode()
        header |= {
            "kind": graph.flow_kind,
            "ns": graph.namespace,
            "digest": sha256(_digest(_untraced(graph)) + parent).hexdigest()[:32],
            "hold": graph.hold,
        }
        if graph.tags:
            header["tags"] = [part for pair in graph.tags.items() for part in pair]
        parts = list(flow_parts(items))
        try:
            reply = await self._submit(tag, graph, header, parts)
        except EngineError as error:
            # The caller may repeat the call after a lost answer, which completes the submission.
            if len(parts) > 1 and not isinstance(error, TransportError):
                with contextlib.suppress(EngineError):
                    await self._delete(tag, graph.flow_id, header["digest"])
            raise
        self._drains.note(tag, reply[4:])
        outcome = flows.Submitted if reply[2] == b"submitted" else flows.AlreadySubmitted
        ids = {node.key: execution_id for node, execution_id, _ in items}
        return outcome(graph.flow_id, int(reply[3]), ids)

    async def _owned(
        self, graph: FlowGraph, parent_execution_id: ExecutionId, *, spread: bool
    ) -> tuple[FlowGraph, dict[str, Any]]:
        """The graph with the id of its subflow, and the arguments that name its parent."""
        parent = self._calls.checked(parent_execution_id, "parent_execution_id")
        if not graph.flow_id:
            place = f"{parent}: record"
            run = await self._calls.read(
                place, "HGET", keys.core(parent.tag, parent), "replay_count"
            )
            flow_id = graphs.subflow_id(
                parent, self._calls.counts, spread=spread, run=int(run or 0)
            )
            graph = msgspec.structs.replace(graph, flow_id=flow_id)
        header: dict[str, Any] = {"parent": str.__str__(parent)}
        if self._tag(graph.flow_id) != parent.tag:
            if not spread:
                api.check_member(self._tag(graph.flow_id), parent)
            args = (parent, graph.flow_id, graph.namespace, "")
            reply = await self._calls.fcall("ff_ask_parent", parent.tag, args, op="submit_flow")
            header["depth"] = int(reply[3])
        return graph, header

    async def _submit(
        self, tag: str, graph: FlowGraph, header: dict[str, Any], parts: list[FlowPart]
    ) -> list[Any]:
        """The reply to the last part."""
        feeding = {edge.frm for edge in graph.edges}
        reply: list[Any] = []
        for number, part in enumerate(parts, 1):
            header |= {"part": number, "last": number == len(parts), "more": part.more}
            args: list[Any] = [graph.flow_id, _pack(header)]
            args += item_args(part.items, graph.namespace, feeding)
            reply = await self._calls.fcall("ff_submit_flow", tag, args, op="submit_flow")
            if reply[2] != b"accepted":
                break
        return reply

    async def extend_flow(
        self,
        flow_id: str,
        nodes: Sequence[GraphNode] = (),
        edges: Sequence[GraphEdge] = (),
    ) -> flows.Extended | flows.AlreadyExtended:
        tag = self._tag(flow_id)
        namespace = await self._namespace(tag, flow_id)
        items, late = self._extension(flow_id, tag, nodes, edges)
        await self._places.register(tag, {node.lane_id for node, _, _ in items})
        added = 0
        reply: list[Any] = []
        for part in part_args(items, late, namespace):
            args = (flow_id, namespace, *part)
            reply = await self._calls.fcall("ff_extend_flow", tag, args, op="extend_flow")
            self._drains.note(tag, reply[5:])
            added += int(reply[4])
        outcome = flows.Extended if added else flows.AlreadyExtended
        return outcome(int(reply[3]), {node.key: execution_id for node, execution_id, _ in items})

    def _extension(
        self, flow_id: str, tag: str, nodes: Sequence[GraphNode], edges: Sequence[GraphEdge]
    ) -> tuple[list[Item], list[Edge]]:
        """The new nodes with their edges, and the edges into nodes of earlier calls."""
        nodes, edges = api.check_parts(nodes, edges)
        if not nodes and not edges:
            raise invalid_input("nodes", "and edges must not both be empty")
        new = {node.key for node in nodes}
        known = {key for edge in edges for key in (edge.frm, edge.to)} - new
        inbound = graphs.check_graph(nodes, edges, known)
        items = self._items(flow_id, tag, graphs.ordered(nodes, inbound), inbound)
        late = [
            [*self._edge(flow_id, tag, edge), graphs.node_id(flow_id, tag, edge.to).uuid]
            for edge in edges
            if edge.to not in new
        ]
        return items, late

    async def spawn_children(
        self,
        handle: Handle,
        nodes: Sequence[GraphNode],
        edges: Sequence[GraphEdge] = (),
        *,
        kind: flows.DependencyKind = "terminal",
        wait: bool = False,
    ) -> flows.Spawned:
        execution_id = check.handle(handle).execution_id
        check.one_of(kind, "kind", graphs.KINDS)
        check.flag(wait, "wait")
        tag = execution_id.tag
        flow_id = await self.resolve_execution_flow_id(execution_id)
        if flow_id is None:
            raise StateError("execution_not_in_flow", execution_id)
        items, late = self._extension(flow_id, tag, nodes, edges)
        for node, child, _ in items:
            own = GraphEdge(frm=node.key, to=f"\x1e{execution_id.uuid}", kind=kind)
            name = node.key if graphs.is_input_name(node.key) else ""
            edge = [graphs.edge_id(flow_id, own), child.uuid, graphs.KINDS[kind], name, ""]
            late.append([*edge, execution_id.uuid])
        await self._places.register(tag, {node.lane_id for node, _, _ in items})
        cascade: flows.CascadeCounts | None = None
        reply: list[Any] = []
        for part in part_args(items, late, ""):
            args = (execution_id, proof(handle), int(wait), *part)
            reply = await self._calls.fcall("ff_spawn", tag, args, op="spawn_children")
            cascade = self._drains.cascade_counts(tag, reply[4:])
            if reply[2] == b"moved":
                break
        ids = {node.key: child for node, child, _ in items}
        return flows.Spawned(int(reply[3]), ids, reply[2] == b"moved", cascade)

    async def _namespace(self, tag: str, flow_id: str) -> str:
        fields = ("flow_kind", "namespace")
        kind, namespace = await self._calls.read(
            f"flow {flow_id}", "HMGET", keys.flow(tag, flow_id), *fields
        )
        if kind is None:
            raise NotFoundError("flow_not_found", flow_id)
        return "default" if namespace is None else text(namespace)

    @staticmethod
    def _edge(flow_id: str, tag: str, edge: GraphEdge) -> list[str]:
        upstream = graphs.node_id(flow_id, tag, edge.frm).uuid
        named = (edge.input_name, edge.data_passing_ref)
        return [graphs.edge_id(flow_id, edge), upstream, graphs.KINDS[edge.kind], *named]

    def _items(
        self,
        flow_id: str,
        tag: str,
        nodes: Sequence[GraphNode],
        inbound: Mapping[str, list[GraphEdge]],
    ) -> list[Item]:
        items: list[Item] = []
        for node in nodes:
            execution_id = graphs.node_id(flow_id, tag, node.key)
            check_new(new_member(node, execution_id, "default"), self._calls.max_payload_bytes)
            deps = [self._edge(flow_id, tag, edge) for edge in inbound.get(node.key, ())]
            items.append((node, execution_id, deps))
        return items

    async def release_flow(self, flow_id: str) -> flows.Released:
        tag = self._tag(flow_id)
        reply = await self._calls.fcall("ff_release_flow", tag, (flow_id,), op="release_flow")
        self._drains.note(tag, reply[4:])
        return flows.Released(int(reply[2]), pending=reply[3] == 1)

    async def add_execution_to_flow(
        self, flow_id: str, execution_id: ExecutionId
    ) -> flows.MemberAdded | flows.AlreadyMember:
        tag = self._tag(flow_id)
        known = self._calls.checked(execution_id)
        api.check_member(tag, known)
        reply = await self._calls.fcall(
            "ff_add_to_flow", tag, (flow_id, known), op="add_execution_to_flow"
        )
        outcome = flows.MemberAdded if reply[2] == b"added" else flows.AlreadyMember
        return outcome(known, int(reply[3]))

    def _edge_args(
        self,
        flow_id: str,
        upstream: ExecutionId,
        downstream: ExecutionId,
        edge_id: str | None,
        kind: str,
        ref: str,
        name: str,
        revision: int | None,
    ) -> tuple[str, list[Any]]:
        tag = self._tag(flow_id)
        ends = [
            self._calls.checked(member, f"{end}_execution_id")
            for member, end in ((upstream, "upstream"), (downstream, "downstream"))
        ]
        edge = check.uuid(edge_id, "edge_id")
        # The engine checks the rest in the order of 08 B4: first of all, whether the edge exists.
        check.text(ref, "data_passing_ref")
        check.text(kind, "dependency_kind")
        check.text(name, "input_name")
        expected = "" if revision is None else check.revision(revision, "expected_graph_revision")
        return tag, [flow_id, edge, *ends, kind, ref, name, expected]

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
        tag, args = self._edge_args(
            *(flow_id, upstream_execution_id, downstream_execution_id, edge_id, dependency_kind),
            *(data_passing_ref, input_name, expected_graph_revision),
        )
        reply = await self._calls.fcall(
            "ff_stage_edge", tag, (*args, 0), op="stage_dependency_edge"
        )
        outcome = flows.Staged if reply[2] == b"staged" else flows.AlreadyStaged
        return outcome(args[1], int(reply[3]))

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
        args = [flow_id, validate_uuid(edge_id, "edge_id")]
        for member, end in (
            (upstream_execution_id, "upstream"),
            (downstream_execution_id, "downstream"),
        ):
            known = member is not None
            args.append(self._calls.checked(member, f"{end}_execution_id") if known else "")
        if dependency_kind != "":
            check.one_of(dependency_kind, "dependency_kind", graphs.KINDS)
        args.append(dependency_kind)
        args.append(check.text(data_passing_ref, "data_passing_ref"))
        reply = await self._calls.fcall(
            "ff_apply_edge", self._tag(flow_id), args, op="apply_dependency_to_child"
        )
        if reply[2] == b"already_applied":
            return flows.AlreadyApplied()
        cascade = self._drains.cascade_counts(self._tag(flow_id), reply[5:])
        return flows.EdgeApplied(int(reply[3]), text(reply[4]), cascade=cascade)

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
        tag, args = self._edge_args(
            *(flow_id, upstream_execution_id, downstream_execution_id, edge_id, dependency_kind),
            *(data_passing_ref, input_name, expected_graph_revision),
        )
        reply = await self._calls.fcall("ff_stage_edge", tag, (*args, 1), op="add_dependency")
        if reply[2] == b"already_applied":
            return flows.AlreadyApplied()
        cascade = self._drains.cascade_counts(tag, reply[6:])
        return flows.EdgeApplied(int(reply[4]), text(reply[5]), int(reply[3]), cascade)

    async def set_edge_group_policy(
        self, flow_id: str, downstream_execution_id: ExecutionId, policy: JoinPolicy
    ) -> bool:
        tag = self._tag(flow_id)
        stored = join_text(api.check_join(policy))
        child = self._calls.checked(downstream_execution_id, "downstream_execution_id")
        args = (flow_id, child, stored)
        return await self._calls.ask(
            *("ff_set_join", tag, args),
            lambda reply: reply[2] == b"set",
            op="set_edge_group_policy",
        )

    async def set_flow_tags(self, flow_id: str, tags: Mapping[str, str]) -> int:
        if not tags:
            raise invalid_input("tags", "must not be empty")
        validate_tags(tags)
        args = [flow_id, *(part for pair in tags.items() for part in pair)]
        return await self._calls.ask(
            "ff_set_flow_tags", self._tag(flow_id), args, lambda reply: int(reply[2])
        )


def _untraced(graph: FlowGraph) -> FlowGraph:
    """The graph without trace contexts, which differ between submissions."""
    if not graph.nodes or TRACE_TAG not in graph.nodes[0].tags:
        return graph
    nodes = (
        msgspec.structs.replace(node, tags={k: v for k, v in node.tags.items() if k != TRACE_TAG})
        for node in graph.nodes
    )
    return msgspec.structs.replace(graph, nodes=tuple(nodes))
