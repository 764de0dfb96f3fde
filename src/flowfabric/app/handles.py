"""Handles on results that a flow computes, alone and joined."""

import typing
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import msgspec

from flowfabric.core.annotations import Unencodable
from flowfabric.core.contracts.flows import AnyOf, DependencyKind, JoinPolicy, OnSatisfied, Quorum
from flowfabric.core.errors import invalid_input

if typing.TYPE_CHECKING:
    from flowfabric.app.graphs import Graph

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

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            problem = f"A node has no value before its flow runs, so it has no {name!r}. "
            advice = (
                "After the submission, read its result with: await submitted.run(node).result()"
            )
            raise AttributeError(problem + advice)

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
    sources = tuple(listed(handles, "handles"))
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
        problem = f"must be 1 to {len(nodes)}, the number of nodes, got {k!r}. "
        raise invalid_input("k", problem + "Pass k first, then the nodes: quorum(2, *nodes).")
    return _joined(nodes, "some", Quorum(k, _checked(on_satisfied)))


def listed(items: Any, field: str) -> list[Any]:
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
        advice = "Pass what flow.add() returned, one or more of them."
        if nodes and isinstance(nodes[0], list):
            advice = "Unpack a list: any_of(*nodes)."
        raise invalid_input("nodes", f"must be nodes of the flow. {advice}")
    if len(set(nodes)) < len(nodes):
        raise invalid_input("nodes", "must be different; one of them is passed twice")
    return FutureValue(ValueSource(tuple(nodes), how, join=join))
