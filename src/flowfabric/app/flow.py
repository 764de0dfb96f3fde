"""Build and submit a flow; read its results, states and changes."""

import asyncio
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar, Unpack, overload

from flowfabric.app.flow_views import (
    FlowFailed,
    GraphEdgeView,
    GraphNodeView,
    GraphView,
    NodeChange,
)
from flowfabric.app.graphs import Graph, NodeOptions, Nodes, checked_options
from flowfabric.app.handles import Node
from flowfabric.app.run import Run, SyncRun, decoded_result
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.flows import (
    AlreadySubmitted,
    CancelFlowOutcome,
    CancellationPolicy,
    FlowGraph,
    FlowReplayed,
    FlowSnapshot,
)
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import CorruptionError, NotFoundError, TimeoutError_, invalid_input
from flowfabric.core.ids import (
    ExecutionId,
    derived_uuid,
    new_uuid,
    validate_namespace,
    validate_text,
    validate_uuid,
)
from flowfabric.core.partition import flow_partition
from flowfabric.core.state import PublicState
from flowfabric.engine.api.events import Event, EventFilter
from flowfabric.engine.lookup import IdStart
from flowfabric.engine.paging import read_every
from flowfabric.sdk.blocking import Caller, SyncTwin, blocking
from flowfabric.sdk.client import Client, run_error

if typing.TYPE_CHECKING:
    from flowfabric.app.fabric import Fabric

E = TypeVar("E")
R = TypeVar("R")

_AT_ONCE = 200
_PAGE = 1000
_STATE_AFTER = {
    **{each.value: each for each in PublicState},
    "success": PublicState.COMPLETED,
    "acquired": PublicState.ACTIVE,
    "reclaimed": PublicState.ACTIVE,
}
_ENDED = frozenset({"completed", "failed", "cancelled", "expired", "skipped"})


class Flow:
    """A handle on a submitted flow.

    To come back to it later, store `flow.id`; `app.get_flow(id)` returns a new handle.

    >>> flow = await graph.submit()
    >>> print(await flow.result(timeout="5m"))
    """

    def __init__(
        self,
        app: "Fabric",
        flow_id: str,
        graph: Graph | None = None,
        ids: Mapping[str, ExecutionId] | None = None,
        *,
        duplicate: bool = False,
    ) -> None:
        self._app = app
        self._graph = graph
        self._ids = ids or {}
        self.id = validate_uuid(flow_id, "flow_id")
        """The flow's id, a UUID."""
        self.duplicate = duplicate
        """Whether the same flow had been submitted before."""

    @overload
    def run(self, node: Node[R]) -> Run[R]: ...

    @overload
    def run(self, node: str) -> Run[Any]: ...

    def run(self, node: Node[Any] | str) -> Run[Any]:
        """The run of one node; pass the node or its key.

        >>> print(await flow.run("resize-1").state())
        """
        if isinstance(node, Node) and self._graph not in (None, node.graph):
            raise invalid_input("node", f"{node.key!r} is a node of another flow")
        key = node.key if isinstance(node, Node) else node
        uuid = derived_uuid(self.id, key)
        # The error about an unknown id names the key.
        shown = f"{uuid}, node {key} of flow {self.id}"
        name = self._ids.get(key) or IdStart(shown, None, uuid)
        stored = None if self._graph is None else self._graph.nodes.get(key)
        kind = "" if stored is None else stored.execution_kind
        return Run(self._app.client, name, self._returns(kind), kind)

    def _returns(self, kind: str) -> Any:
        task = self._app.tasks.get(kind)
        return Any if task is None else task.returns

    async def result(self, timeout: Duration | None = None) -> Any:
        """Wait for the result: that of the last node, whose result no other node needs.

        If there are several such nodes, returns a dict of their results by key. Raises
        `FlowFailed` if a failure left one of them without a result. After `timeout`, raises
        `TimeoutError`; the flow continues.
        """
        client = await self._app.client()
        await client.wait_flow(self.id, timeout)
        exits = await self._exits(client)
        outcomes = dict(zip(exits, await _each(exits.values(), self._outcome(client)), strict=True))
        done = {key: value for key, (info, value) in outcomes.items() if _completed(info)}
        if len(done) < len(outcomes):
            await self._check(client)
        if len(exits) == 1 and done:
            return next(iter(done.values()))
        return done

    async def _exits(self, client: Client) -> dict[str, ExecutionId]:
        """The nodes that make up the result."""
        if self._graph is not None:
            return {key: self._ids[key] for key in self._graph.exits()}
        graph = await self._view(client)
        return {key: graph.nodes[key].execution_id for key in graph.exits}

    def _outcome(self, client: Client) -> Callable[[ExecutionId], Any]:
        async def read(execution_id: ExecutionId) -> tuple[ExecutionInfo, Any]:
            info, stored = await client.backend.reads.read_outcome(execution_id)
            kind = info.execution_kind
            about = kind, execution_id, stored, info.result_encoding, self._returns(kind)
            return info, decoded_result(*about)

        return read

    async def _check(self, client: Client) -> None:
        """Raise `FlowFailed` if a failure is why an exit has no result."""
        graph = await self._view(client)
        culprits = graph.culprits()
        if not culprits:
            return
        ids = [graph.nodes[key].execution_id for key in culprits]
        infos = await _each(ids, client.backend.reads.read_execution_info)
        errors = {key: run_error(info) for key, info in zip(culprits, infos, strict=True)}
        reason = (await self._snapshot(client)).cancel_reason
        raise FlowFailed(graph, errors, reason or "")

    async def results(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait until the flow has ended; returns the results of all completed nodes by key."""
        client = await self._app.client()
        await client.wait_flow(self.id, timeout)
        nodes = await self._nodes(client)
        done = [node for node in nodes if node.state is PublicState.COMPLETED]
        found = await _each((node.execution_id for node in done), self._outcome(client))
        return {node.key: value for node, (_, value) in zip(done, found, strict=True)}

    async def cancel(
        self,
        reason: str = "",
        policy: CancellationPolicy = "cancel_all",
        timeout: Duration | None = None,
    ) -> CancelFlowOutcome:
        """Cancel the flow and its nodes.

        `cancel_pending` lets running nodes finish; `flow_only` lets all nodes finish and only
        refuses new ones. The engine cancels the last nodes of a large flow in the background. With
        `timeout`, at most 5 minutes, this call waits until they have ended.
        """
        if policy not in typing.get_args(CancellationPolicy):
            named = ", ".join(typing.get_args(CancellationPolicy))
            raise invalid_input("policy", f"must be one of {named}")
        client = await self._app.client()
        wait_ms = 0 if timeout is None else to_ms(timeout, "timeout")
        try:
            return await client.cancel_flow(
                self.id, reason, cancellation_policy=policy, wait_timeout_ms=wait_ms
            )
        except TimeoutError_ as error:
            problem = f"Some nodes of flow {self.id} did not end within the timeout."
            raise TimeoutError(f"{problem} The engine continues to cancel them.") from error

    async def replay(self, *, cancelled: bool = False) -> FlowReplayed:
        """Rerun the nodes that failed or expired.

        Nodes that were skipped because of them wait again. `cancelled=True` also reruns cancelled
        nodes. A cancelled flow cannot be replayed.
        """
        client = await self._app.client()
        return await client.replay_flow(self.id, failed_only=not cancelled)

    async def graph(self) -> GraphView:
        """All nodes with their states, and all edges."""
        return await self._view(await self._app.client())

    async def _view(self, client: Client) -> GraphView:
        flow = await self._snapshot(client)
        nodes = {node.key: node for node in await self._nodes(client)}
        key_of = {node.execution_id: node.key for node in nodes.values()}
        flows = client.backend.flows
        found = await read_every(
            lambda cursor: flows.list_edges(self.id, cursor=cursor, limit=_PAGE)
        )
        edges = [
            GraphEdgeView(
                frm=key_of[edge.upstream_execution_id],
                to=key_of[edge.downstream_execution_id],
                kind=edge.dependency_kind,
                state=edge.edge_state,
                input_name=edge.input_name,
            )
            for edge in found
            if edge.upstream_execution_id in key_of and edge.downstream_execution_id in key_of
        ]
        return GraphView(
            flow_id=self.id,
            kind=flow.flow_kind,
            state=flow.derived_state,
            cancelled=flow.public_flow_state == "cancelled",
            nodes=nodes,
            edges=edges,
        )

    async def _snapshot(self, client: Client) -> FlowSnapshot:
        flow = await client.describe_flow(self.id, edge_groups=False)
        if flow is None:
            raise NotFoundError("flow_not_found", self.id)
        return flow

    async def _nodes(self, client: Client) -> list[GraphNodeView]:
        """All nodes in the order in which they were added."""
        flows = client.backend.flows
        members = await read_every(
            lambda cursor: flows.list_members(self.id, cursor=cursor, limit=_PAGE)
        )
        members.sort(key=lambda member: member.number)
        return [
            GraphNodeView(
                key=member.node or member.execution_id.compact,
                execution_id=member.execution_id,
                task=member.execution_kind,
                state=member.public_state,
                subflow_id=member.subflow_id,
            )
            for member in members
        ]

    async def watch(self) -> AsyncIterator[NodeChange]:
        """Yield the state of each node, then every change, until the flow has ended.

        >>> async for change in flow.watch():
        ...     print(change.key, change.state.value)
        """
        client = await self._app.client()
        where = EventFilter(flow_id=self.id)
        partition = flow_partition(self.id, client.backend.counts)
        # Subscribe before reading the states, so that no change is missed.
        feed = await client.subscribe(
            ["completion", "lease", "signal", "operator", "flow"],
            where=where,
            partitions=[partition],
        )
        async with feed:
            finished = (await self._snapshot(client)).finished_at is not None
            known: dict[str, NodeChange] = {}
            for node in await self._nodes(client):
                change = NodeChange(node.key, node.state, node.execution_id)
                known[node.execution_id] = change
                yield change
            if finished:
                return
            async for event in feed:
                if isinstance(event, CorruptionError):
                    continue
                for change in await self._changes(client, event, known):
                    known[change.execution_id] = change
                    yield change
                if event.type == "flow_finished":
                    return

    async def _changes(
        self, client: Client, event: Event, known: Mapping[str, NodeChange]
    ) -> list[NodeChange]:
        """The changes that an event reports; reads nodes that were added since."""
        execution_id = event.execution_id
        if execution_id is None:
            return []
        before = known.get(execution_id)
        if before is None:
            found = await self._nodes(client)
            new = [node for node in found if node.execution_id not in known]
            return [NodeChange(node.key, node.state, node.execution_id) for node in new]
        state = _STATE_AFTER.get(event.get("outcome") or event.type)
        if state is None or (before.state in _ENDED and state not in _ENDED):
            # The event may be older than the known state.
            state = await client.backend.reads.read_execution_state(before.execution_id)
        if state is before.state:
            return []
        return [NodeChange(before.key, state, before.execution_id)]

    def __repr__(self) -> str:
        return f"Flow({self.id})"

    def __reduce__(self) -> str:
        raise TypeError(
            "A flow cannot be pickled. Send `flow.id`; `app.get_flow(id)` makes a new handle."
        )


def _completed(info: ExecutionInfo) -> bool:
    return info.public_state is PublicState.COMPLETED


async def _each(items: typing.Iterable[Any], read: Callable[[Any], Any]) -> list[Any]:
    """Read all items, many at a time."""
    listed = list(items)
    found: list[Any] = []
    for start in range(0, len(listed), _AT_ONCE):
        found += await asyncio.gather(*map(read, listed[start : start + _AT_ONCE]))
    return found


class _Builder(Nodes):
    """A graph to submit."""

    def __init__(
        self,
        app: "Fabric",
        kind: str,
        tags: Mapping[str, str] | None,
        namespace: str | None,
        flow_id: str | None,
    ) -> None:
        super().__init__(Graph(app), {})
        self._app = app
        self._kind = validate_text(kind, "kind", limit=256, required=True)
        self._tags = dict(tags or {})
        self._namespace = app.namespace if namespace is None else validate_namespace(namespace)
        self.id = new_uuid() if flow_id is None else validate_uuid(flow_id, "flow_id")
        """The flow's id. A subflow gets its final id when it is submitted."""
        self._subflows: dict[str, _Builder] = {}
        self._is_subflow = False

    def options(self, **options: Unpack[NodeOptions]) -> Nodes:
        """Set the key of a node, or the nodes that it waits for without taking their results.

        >>> flow.options(key="cleanup", after=[upload], kind="terminal").add(remove, "tmp")
        """
        return Nodes(self._graph, checked_options(options))

    def subflow(self, flow: "_Builder", **options: Unpack[NodeOptions]) -> Node[Any]:
        """Add a node that runs another flow and returns its result; takes what `options` takes.

        The other flow is submitted together with this one. It starts when the nodes in `after` have
        completed, or ended as `kind` says. Its nodes cannot take nodes of this flow as arguments.

        >>> report = app.flow("report")
        >>> report.add(summarize, "2026")
        >>> flow.add(publish, flow.subflow(report, after=[imported]))
        """
        if not isinstance(flow, _Builder) or flow is self:
            raise invalid_input("flow", "must be another flow that app.flow() returned")
        if flow._is_subflow or flow._graph.submitted:  # noqa: SLF001 - its own kind
            raise invalid_input("flow", "was already submitted, or is already a subflow")
        node = self._graph.add_subflow(checked_options(options))
        flow._is_subflow = True  # noqa: SLF001
        self._subflows[node.key] = flow
        return node

    async def _submit(self, app: "Fabric", parent: ExecutionId | None = None) -> Flow:
        client = await app.client()
        if self._is_subflow and parent is None:
            raise invalid_input("flow", "is a subflow. Submit the flow that contains it.")
        parts = list(self._graph.parts())
        if not parts:
            raise invalid_input("nodes", "The flow has no nodes. Add some with flow.add().")
        nodes, edges = parts[0]
        held = len(parts) > 1 or bool(self._subflows)
        outcome = await client.submit_flow(
            FlowGraph(
                # The engine derives the id of a subflow from its parent.
                flow_id="" if self._is_subflow else self.id,
                flow_kind=self._kind,
                namespace=self._namespace,
                tags=self._tags,
                nodes=tuple(nodes),
                edges=tuple(edges),
                hold=held,
            ),
            parent_execution_id=parent,
        )
        self.id = outcome.flow_id
        ids = dict(outcome.nodes)
        # Nothing runs until the whole graph is stored.
        for nodes, edges in parts[1:]:
            ids |= (await client.extend_flow(self.id, nodes, edges)).nodes
        for key, flow in self._subflows.items():
            await flow._submit(app, ids[key])  # noqa: SLF001 - its own kind
        if held:
            await client.release_flow(self.id)
        self._graph.submitted = True
        known = isinstance(outcome, AlreadySubmitted)
        return Flow(app, self.id, self._graph, ids, duplicate=known)


class FlowBuilder(_Builder):
    """A graph of tasks to submit as one flow: what `app.flow()` returns.

    >>> flow = app.flow("thumbnails")
    >>> photo = flow.add(fetch, "https://example.org/cat.png")
    >>> small = flow.map(resize, [100, 300], photo.value)
    >>> submitted = await flow.submit()
    """

    async def submit(self) -> Flow:
        """Store the whole graph and return a handle on the flow.

        Nothing runs before the whole graph is stored. If the connection breaks, call this again:
        the same flow is never stored twice. You cannot add nodes to a submitted flow.
        """
        return await self._submit(self._app)


class SyncFlow(SyncTwin[Flow]):
    """`Flow` without `await`."""

    __slots__ = ()

    @property
    def id(self) -> str:
        """The flow's id, a UUID."""
        return self._target.id

    @property
    def duplicate(self) -> bool:
        """Whether the same flow had been submitted before."""
        return self._target.duplicate

    @overload
    def run(self, node: Node[R]) -> SyncRun[R]: ...

    @overload
    def run(self, node: str) -> SyncRun[Any]: ...

    def run(self, node: Any) -> SyncRun[Any]:
        """The run of one node; pass the node or its key."""
        return SyncRun(self._target.run(node), self._caller)

    result = blocking(Flow.result)
    results = blocking(Flow.results)
    cancel = blocking(Flow.cancel)
    replay = blocking(Flow.replay)
    graph = blocking(Flow.graph)
    watch = blocking(Flow.watch)

    def __repr__(self) -> str:
        return f"Sync{self._target!r}"

    def __reduce__(self) -> str:
        return self._target.__reduce__()


class SyncFlowBuilder(_Builder):
    """`FlowBuilder` without `await`."""

    def __init__(self, app: "Fabric", caller: Caller, *args: Any) -> None:
        super().__init__(app, *args)
        self._caller = caller

    def submit(self) -> SyncFlow:
        """Store the whole graph and return a handle on the flow."""
        return SyncFlow(self._caller.call(lambda: self._submit(self._app)), self._caller)
