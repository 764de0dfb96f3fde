"""Build a graph: nodes, the results that they pass on, and the edges between them."""

import itertools
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    overload,
)

import msgspec

from flowfabric.app import codec
from flowfabric.app.inputs import REFERRING, Reference, encode_referring, replaced
from flowfabric.app.tasks import Task, as_task
from flowfabric.core.annotations import Unencodable
from flowfabric.core.contracts.flows import (
    AnyOf,
    DependencyKind,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
    OnSatisfied,
    Quorum,
)
from flowfabric.core.errors import invalid_input
from flowfabric.core.graph import MAX_EDGES, MAX_NODES, SUBFLOW, is_input_name
from flowfabric.core.ids import validate_text

if typing.TYPE_CHECKING:
    from flowfabric.app.fabric import Fabric

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class ValueSource(msgspec.Struct, frozen=True):
    """Where the value of a handle comes from."""

    sources: Sequence["FutureValue[Any]"]
    how: Literal["one", "any", "some", "list"]
    kind: DependencyKind = "success_only"
    join: JoinPolicy | None = None


class FutureValue(Unencodable, Generic[T_co]):
    """A handle on a value of type `T` that a flow computes. Pass it as an argument of a node."""

    __slots__ = ("plan",)

    explanation = (
        "a node has no value before its flow runs. Pass it to flow.add() as an argument, or inside "
        "a list or dict, but not inside another object, as a dict key, or to task.submit()"
    )

    def __init__(self, plan: ValueSource) -> None:
        self.plan = plan

    def __bool__(self) -> bool:
        raise TypeError("A node has no value before its flow runs. Add a task that tests it.")

    def __format__(self, spec: str) -> str:
        raise TypeError("A node has no value before its flow runs. Add a task that formats it.")

    @property
    def value(self) -> T_co:
        """The handle itself, typed as the value, for example to pass it by name.

        >>> flow.add(resize, image=photo.value, width=300)
        """
        return cast("T_co", self)


class Node(FutureValue[T_co], Generic[T_co]):
    """One node of a flow that is being built, and a handle on its future result."""

    __slots__ = ("graph", "key")

    def __init__(self, graph: "Graph", key: str) -> None:
        super().__init__(ValueSource((self,), "one"))
        self.graph = graph
        self.key = key
        """Its name in the flow."""

    @property
    def or_none(self) -> FutureValue[T_co | None]:
        """The result, or None if the node did not complete; the node that takes it runs anyway.

        >>> flow.add(report, download.or_none)
        """
        return FutureValue(ValueSource((self,), "one", "terminal"))

    def __repr__(self) -> str:
        return f"Node({self.key!r})"


def gather(handles: Iterable[FutureValue[R]]) -> FutureValue[list[R]]:
    """All results as a list, in the order of the handles.

    >>> flow.add(total, gather(flow.map(count_words, pages)))
    """
    sources = tuple(_listed(handles, "handles"))
    for each in sources:
        if not isinstance(each, FutureValue):
            raise invalid_input("handles", f"must be nodes; one item is a {type(each).__name__}")
    return FutureValue(ValueSource(sources, "list"))


def any_of(*nodes: Node[R], on_satisfied: OnSatisfied = "let_run") -> FutureValue[R]:
    """The result of the first node that completes.

    `on_satisfied="cancel_remaining"` then cancels the others; `"let_run"` lets them finish.

    >>> flow.add(show, any_of(fast, cheap, on_satisfied="cancel_remaining"))
    """
    return _joined(nodes, "any", AnyOf(_checked(on_satisfied)))


def quorum(k: int, *nodes: Node[R], on_satisfied: OnSatisfied = "let_run") -> FutureValue[list[R]]:
    """A list of results, as soon as `k` of the nodes have completed.

    The list is in the order of the nodes and may contain more than `k` results.

    >>> flow.add(decide, quorum(2, *votes))
    """
    if type(k) is not int or not 1 <= k <= len(nodes):
        raise invalid_input("k", f"must be 1 to {len(nodes)}, the number of nodes, got {k!r}")
    return _joined(nodes, "some", Quorum(k, _checked(on_satisfied)))


def _listed(items: Any, field: str) -> list[Any]:
    if isinstance(items, FutureValue):
        problem = "must be a list, but a node has no value before its flow runs. To add one node "
        raise invalid_input(field, problem + "per item of a result, use ctx.spawn() in a handler.")
    if not isinstance(items, Iterable):
        raise invalid_input(field, f"must be a list, got {type(items).__name__}")
    return list(cast("Iterable[Any]", items))


def _checked(on_satisfied: OnSatisfied) -> OnSatisfied:
    if on_satisfied not in get_args(OnSatisfied):
        raise invalid_input("on_satisfied", "must be cancel_remaining or let_run")
    return on_satisfied


def _joined(
    nodes: Sequence[Any], how: Literal["any", "some"], join: JoinPolicy
) -> FutureValue[Any]:
    if not nodes or not all(isinstance(node, Node) for node in nodes):
        advice = " Unpack a list: any_of(*nodes)." if nodes and isinstance(nodes[0], list) else ""
        raise invalid_input("nodes", f"must be one or more nodes of the flow.{advice}")
    if len(set(nodes)) < len(nodes):
        raise invalid_input("nodes", "must be different; one of them is passed twice")
    return FutureValue(ValueSource(tuple(nodes), how, join=join))


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
        items = _listed(items, "items")
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
        arguments, by_name = task.bind(args, kwargs)
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
                f"node {self._key!r} cannot depend on others besides its any_of() or quorum(). "
                "Pass the any_of() or quorum() to a node of its own, and pass that node here.",
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
