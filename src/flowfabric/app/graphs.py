"""Build a graph: nodes, the results that they pass on, and the edges between them."""

import itertools
import typing
from collections.abc import Iterable, Iterator
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    overload,
)

from flowfabric.app import codec
from flowfabric.app.handles import FutureValue, Node, ValueSource, listed
from flowfabric.app.inputs import REFERRING, Reference, encode_referring, replaced
from flowfabric.app.tasks import Task, as_task
from flowfabric.core.contracts.flows import (
    DependencyKind,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
)
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.graph import MAX_EDGES, MAX_NODES, SUBFLOW, is_input_name
from flowfabric.core.ids import validate_text

if typing.TYPE_CHECKING:
    from flowfabric.app.fabric import Fabric

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")


class NodeOptions(TypedDict, total=False):
    """The options of a node besides its task and arguments."""

    key: str | None
    """Its name in the flow; by default the task's name and a number."""
    after: FutureValue[Any] | Iterable[FutureValue[Any]]
    """The nodes that it waits for without taking their results."""
    kind: DependencyKind
    """Which outcome of these nodes lets it run; `terminal` means any."""


def checked_options(options: NodeOptions) -> NodeOptions:
    """The options; raises `TypeError` for one that does not exist."""
    for name in options:
        if name not in NodeOptions.__annotations__:
            known = ", ".join(NodeOptions.__annotations__)
            raise TypeError(f"There is no option {name!r}. The options are: {known}.")
    return options


class Nodes:
    """Adds nodes to a graph, all with the same options."""

    def __init__(self, graph: "Graph", options: NodeOptions) -> None:
        self._graph = graph
        self._options = options

    @overload
    def add(self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Node[R]: ...

    @overload
    def add(
        self,
        task: Task[Concatenate[A, P], R],
        a: FutureValue[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Node[R]: ...

    @overload
    def add(
        self,
        task: Task[Concatenate[A, B, P], R],
        a: A,
        b: FutureValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Node[R]: ...

    @overload
    def add(
        self,
        task: Task[Concatenate[A, B, P], R],
        a: FutureValue[A],
        b: FutureValue[B],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Node[R]: ...

    @overload
    def add(
        self,
        task: Task[Concatenate[A, B, C, P], R],
        a: FutureValue[A],
        b: FutureValue[B],
        c: FutureValue[C],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Node[R]: ...

    @overload
    def add(self, task: str, /, *args: Any, **kwargs: Any) -> Node[Any]: ...

    def add(self, task: Any, /, *args: Any, **kwargs: Any) -> Node[Any]:
        """Add one call of a task; returns a handle on its future result.

        An argument may be another node, or a list or dict that contains nodes. The new node waits
        for them and gets their results. Type checkers accept nodes among the first three arguments;
        `node.value` is accepted everywhere.

        >>> photo = flow.add(fetch, "https://example.org/cat.png")
        >>> small = flow.add(resize, photo, width=300)
        """
        return self._graph.add(task, args, kwargs, self._options)

    @overload
    def map(
        self,
        task: Task[Concatenate[A, P], R],
        items: Iterable[FutureValue[A]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Node[R]]: ...

    @overload
    def map(
        self,
        task: Task[Concatenate[A, P], R],
        items: Iterable[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Node[R]]: ...

    @overload
    def map(
        self, task: str, items: Iterable[Any], /, *args: Any, **kwargs: Any
    ) -> list[Node[Any]]: ...

    def map(self, task: Any, items: Any, /, *args: Any, **kwargs: Any) -> list[Node[Any]]:
        """Add one node per item. The item is the first argument; the others are the same for all.

        >>> pages = flow.map(fetch, urls)
        >>> counts = flow.map(count_words, pages, language="en")
        """
        items = listed(items, "items")
        if self._options.get("key") and len(items) > 1:
            raise invalid_input("key", "names one node, but map() adds several. Leave it out.")
        return [self.add(task, item, *args, **kwargs) for item in items]


class Graph:
    """The nodes and edges of a flow that is being built."""

    def __init__(self, app: "Fabric | None") -> None:
        self._app = app
        self._numbers: dict[str, Iterator[int]] = {}
        self.nodes: dict[str, GraphNode] = {}
        self.returns: dict[str, Any] = {}
        """The type of each node's result."""
        self.edges: dict[str, list[GraphEdge]] = {}
        """The inbound edges of each node."""
        self.submitted = False

    def as_task(self, task: object) -> Task[..., Any]:
        """The task of a new node."""
        if self._app is not None:
            return as_task(self._app, task)
        if isinstance(task, Task):
            return cast("Task[..., Any]", task)
        raise invalid_input("task", f"must be a task, got {task!r}")

    def add(
        self,
        given: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: NodeOptions,
    ) -> Node[Any]:
        """Add one node and the edges that lead to it."""
        if self.submitted:
            problem = "was submitted. Build another one, or add nodes in a handler: ctx.spawn()."
            raise invalid_input("flow", problem)
        task = self.as_task(given)
        if task.key:
            problem = "A flow is never stored twice, so its nodes need no idempotency key."
            raise invalid_input("idempotency_key", problem)
        arguments, by_name = _bound(task, args, kwargs)
        key = self._new_key(task.name, options.get("key"))
        waits = _Waits(self, key)
        written = [(name, waits.written(name, value)) for name, value in arguments]
        waits.add_order(options.get("after", ()), options.get("kind", "success_only"))
        body: Any = dict(written) if by_name else [value for _, value in written]
        if waits.takes_results:
            payload, encoding = encode_referring(body), REFERRING
        else:
            payload, encoding = codec.encode(body, "arguments")[0] if body else b"", codec.JSON
        shared = task.shared
        self.nodes[key] = GraphNode(
            key=key,
            execution_kind=task.name,
            input_payload=payload,
            payload_encoding=encoding,
            lane_id=task.lane,
            priority=shared.priority,
            tags=shared.tags,
            policy=shared.policy,
            delay_until=shared.delay_until,
            delay_ms=shared.delay_ms,
            join=waits.join,
        )
        self.edges[key] = waits.edges
        self.returns[key] = task.returns
        return Node(self, key)

    def add_subflow(self, options: NodeOptions) -> Node[Any]:
        """Add one node that owns a flow."""
        key = self._new_key(SUBFLOW, options.get("key"))
        waits = _Waits(self, key)
        waits.add_order(options.get("after", ()), options.get("kind", "success_only"))
        self.nodes[key] = GraphNode(key=key, execution_kind=SUBFLOW, join=waits.join)
        self.edges[key] = waits.edges
        return Node(self, key)

    def _new_key(self, name: str, key: str | None) -> str:
        if key is not None:
            validate_text(key, "key", limit=256, required=True)
            if key in self.nodes:
                raise invalid_input("key", f"{key!r} already names another node")
            return key
        numbers = self._numbers.setdefault(name, itertools.count(1))
        return next(key for n in numbers if (key := self._numbered(name, n)) not in self.nodes)

    def _numbered(self, name: str, number: int) -> str:
        return f"{name}-{number}"

    def exits(self) -> list[str]:
        """The nodes whose result or success no other node needs."""
        edges = (edge for own in self.edges.values() for edge in own)
        needed = {edge.frm for edge in edges if edge.input_name or edge.kind == "success_only"}
        return [key for key in self.nodes if key not in needed]

    def parts(self) -> Iterator[tuple[list[GraphNode], list[GraphEdge]]]:
        """The nodes and edges for each call of the engine; upstreams come first."""
        nodes: list[GraphNode] = []
        edges: list[GraphEdge] = []
        for key, node in self.nodes.items():
            own = self.edges[key]
            if len(nodes) == MAX_NODES or (nodes and len(edges) + len(own) > MAX_EDGES):
                yield nodes, edges
                nodes, edges = [], []
            nodes.append(node)
            edges += own[:MAX_EDGES]
            for start in range(MAX_EDGES, len(own), MAX_EDGES):
                yield nodes, edges
                nodes, edges = [], own[start : start + MAX_EDGES]
        if nodes or edges:
            yield nodes, edges


class _Waits:
    """The edges that lead to one node, and the name of each result that it takes."""

    def __init__(self, graph: Graph, key: str) -> None:
        self._graph = graph
        self._key = key
        self._names: dict[tuple[str, DependencyKind], str] = {}
        self._joins: dict[int, ValueSource] = {}
        self.edges: list[GraphEdge] = []

    @property
    def takes_results(self) -> bool:
        """Whether results of other nodes are among its arguments."""
        return bool(self._names)

    @property
    def join(self) -> JoinPolicy:
        """The policy that decides when it can run."""
        plans = list(self._joins.values())
        if not plans or plans[0].join is None:
            return JoinAll()
        if len(plans) > 1 or len(self.edges) > len(plans[0].sources):
            raise invalid_input(
                "arguments",
                f"node {self._key!r} has an any_of() or quorum() and cannot depend on other nodes. "
                "Pass the any_of() or quorum() to a separate node, and pass that node here.",
            )
        return plans[0].join

    def written(self, name: str, value: Any) -> Any:
        """An argument with references in place of handles."""
        if isinstance(value, FutureValue) and cast("FutureValue[Any]", value).plan.how == "one":
            return self._reference(cast("FutureValue[Any]", value), itertools.repeat(name))
        names = (f"{name}_{number}" for number in itertools.count(1))
        return replaced(value, _is_future, lambda part: self._reference(part, names))

    def _reference(self, handle: FutureValue[Any], names: Iterator[str]) -> Any:
        plan = handle.plan
        if plan.how == "list":
            return [self._reference(each, names) for each in plan.sources]
        if plan.join is not None:
            self._joins[id(plan)] = plan
        inputs = [self._input(self._own(node), plan.kind, names) for node in plan.sources]
        return Reference(tuple(inputs), plan.how)

    def _input(self, upstream: str, kind: DependencyKind, names: Iterator[str]) -> str:
        """The name under which the result arrives; one for all uses of the same result."""
        known = self._names.get((upstream, kind))
        if known is not None:
            return known
        name = next(names)
        if not is_input_name(name) or name in self._names.values():
            name = f"input_{len(self._names) + 1}"
        self._names[upstream, kind] = name
        self.edges.append(GraphEdge(frm=upstream, to=self._key, kind=kind, input_name=name))
        return name

    def add_order(self, after: Any, kind: DependencyKind) -> None:
        """Wait for these nodes without taking their results."""
        if kind not in get_args(DependencyKind):
            raise invalid_input("kind", f"must be one of {', '.join(get_args(DependencyKind))}")
        ordered: dict[str, DependencyKind] = {}
        for plan in _sources_of(after):
            if plan.join is not None:
                self._joins[id(plan)] = plan
            own = kind if plan.kind == "success_only" else plan.kind
            ordered |= {self._own(node): own for node in plan.sources}
        self.edges += (GraphEdge(frm=each, to=self._key, kind=k) for each, k in ordered.items())

    def _own(self, node: object) -> str:
        """The key of a node of the same flow."""
        if not isinstance(node, Node):
            raise invalid_input("arguments", f"must be nodes; one is a {type(node).__name__}")
        if node.graph is not self._graph:
            problem = f"{node.key!r} is a node of another flow. Pass its result as a value."
            raise invalid_input("arguments", problem)
        return node.key


def _bound(
    task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, Any]], bool]:
    """The arguments of a call; says where options of the node belong."""
    try:
        return task.bind(args, kwargs)
    except ValidationError as error:
        for name in NodeOptions.__annotations__:
            if name in kwargs and f"no parameter {name!r}" in str(error):
                problem = f"{task.name}() has no parameter {name!r}. To set this option of a node, "
                problem += f"write flow.options({name}=…).add({task.name}, …)."
                raise invalid_input("arguments", problem) from error
        raise


def _is_future(value: Any) -> bool:
    return isinstance(value, FutureValue)


def _sources_of(after: Any) -> Iterator[ValueSource]:
    given: Any = [after] if _is_future(after) else after
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise invalid_input("after", f"must be a list of nodes, got {type(given).__name__}")
    for handle in cast("Iterable[object]", given):
        if not isinstance(handle, FutureValue):
            problem = f"must be a list of nodes; one item is a {type(handle).__name__}"
            raise invalid_input("after", problem)
        plan = cast("FutureValue[Any]", handle).plan
        if plan.how == "list":
            yield from _sources_of(plan.sources)
        else:
            yield plan
