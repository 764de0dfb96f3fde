"""Children: nodes that a running handler adds to its flow, and waits for."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Unpack

from flowfabric.app.graphs import Graph, NodeOptions, Nodes, checked_options
from flowfabric.app.run import decoded_result
from flowfabric.core.contracts.flows import FlowInput
from flowfabric.core.errors import FlowFabricError, StateError, invalid_input
from flowfabric.core.graph import is_input_name
from flowfabric.sdk.blocking import Caller
from flowfabric.sdk.client import RunError, run_error
from flowfabric.sdk.task import ClaimedTask, Parked

_NAME_CHARS = 40
_SUFFIX_CHARS = 12
_odd = re.compile(r"[^A-Za-z0-9_]+").sub


class ChildrenFailed(FlowFabricError):
    """Raised if some children of a handler did not complete.

    >>> try:
    ...     results = await children.results()
    ... except ChildrenFailed as error:
    ...     results = error.results
    """

    def __init__(self, failures: Mapping[str, RunError], results: Mapping[str, Any]) -> None:
        super().__init__(failures, results)
        self.failures = failures
        """The errors of the children that did not complete, by key."""
        self.results = results
        """The results of the children that completed, by key."""

    def __str__(self) -> str:
        return "; ".join(f"{key}: {error}" for key, error in self.failures.items())


class _ChildGraph(Graph):
    """Makes keys that are unique in the flow and valid as input names."""

    def __init__(self, parent: str) -> None:
        super().__init__(None)
        self._suffix = f"_{parent[-_SUFFIX_CHARS:]}"

    def _new_key(self, name: str, key: str | None) -> str:
        if key is None:
            return super()._new_key(_odd("_", name)[:_NAME_CHARS], None)
        if not is_input_name(key + self._suffix):
            raise invalid_input("key", "must be at most 51 letters, digits and underscores")
        return super()._new_key(name, key + self._suffix)

    def _numbered(self, name: str, number: int) -> str:
        return f"{name}_{number}{self._suffix}"

    def local(self, key: str) -> str:
        """The key without the suffix, as the handler uses it."""
        return key.removesuffix(self._suffix)


class Children(Nodes):
    """Nodes that a handler adds to its own flow: what `ctx.spawn()` returns.

    >>> children = ctx.spawn()
    >>> children.map(resize, [100, 300, 900], photo)
    >>> results = await children.results()
    """

    def __init__(self, task: ClaimedTask) -> None:
        self._task = task
        self._children = _ChildGraph(task.execution_id.uuid)
        super().__init__(self._children, {})

    def options(self, **options: Unpack[NodeOptions]) -> Nodes:
        """Set the key of a child, or the children it waits for; see `FlowBuilder.options`."""
        return Nodes(self._graph, checked_options(options))

    async def results(self) -> dict[str, Any]:
        """Wait for the results of all children, by key: `resize_1`, `resize_2`, …, or your own.

        The first call stores the children and frees the worker. When all of them have ended, the
        handler starts again from the beginning, and this call returns. Raises `ChildrenFailed` if
        some children did not complete.
        """
        graph, task = self._children, self._task
        if task.claim.flow_id is None:
            problem = "spawn() adds nodes to this execution's flow. Submit the task with app.flow()"
            raise StateError("execution_not_in_flow", problem)
        if not graph.nodes:
            return {}
        edges = [edge for own in graph.edges.values() for edge in own]
        spawned = await task.spawn_children(list(graph.nodes.values()), edges, wait=True)
        if spawned.parked:
            raise Parked
        given = (await task.backend.flows.get_inputs(task.execution_id)).inputs
        missing = [key for key in graph.nodes if key not in given]
        if missing:
            problem = "a node that takes an any_of() or quorum() cannot wait for children"
            raise StateError("not_runnable", problem)
        failed = [key for key in graph.nodes if given[key].outcome != "success"]
        results = {
            graph.local(key): self._result(key, given[key])
            for key in graph.nodes
            if key not in failed
        }
        if failed:
            read = task.backend.reads.read_execution_info
            infos = await asyncio.gather(*(read(given[key].execution_id) for key in failed))
            errors = zip(map(graph.local, failed), map(run_error, infos), strict=True)
            raise ChildrenFailed(dict(errors), results)
        return results

    def _result(self, key: str, given: FlowInput) -> Any:
        kind, returns = self._children.nodes[key].execution_kind, self._children.returns[key]
        return decoded_result(kind, given.execution_id, given.result, given.encoding, returns)


class SyncChildren(Nodes):
    """`Children` without `await`, for `def` handlers."""

    def __init__(self, target: Children, caller: Caller) -> None:
        super().__init__(target._graph, {})  # noqa: SLF001 - its twin
        self._target = target
        self._caller = caller

    def options(self, **options: Unpack[NodeOptions]) -> Nodes:
        """Set the key of a child, or the children it waits for; see `FlowBuilder.options`."""
        return self._target.options(**options)

    def results(self) -> dict[str, Any]:
        """Wait for the results of all children, by key; see `Children.results`."""
        return self._caller.call(self._target.results)
