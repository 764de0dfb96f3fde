"""Every join against a pure model: n upstreams that end in every way, in every order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
    DependencyKind,
    FlowGraph,
    FlowMember,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
    Quorum,
    Submitted,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import ExpireReason
from tests.model.flow_model import Edge, FlowModel
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow
from tests.support.sdk import seeded

ENDS = ("success", "failed", "cancelled", "expired", "skipped")
KINDS: tuple[DependencyKind, ...] = ("success_only", "failure_only", "terminal")
_IN_MS = 20
# No worker serves this lane: children stay where their joins put them.
_LANE = "children"


def joins(n: int) -> list[JoinPolicy]:
    quorums = [Quorum(k, "let_run") for k in range(1, n + 1)]
    return [JoinAll(), AnyOf("let_run"), *quorums]


def all_orders(n: int) -> Iterable[tuple[str, ...]]:
    return itertools.product(ENDS, repeat=n)


class Algebra:
    """One flow with a child per policy, all after the same upstreams, and its model."""

    def __init__(self, engine: Engine, ends: Sequence[str], kinds: Sequence[DependencyKind]):
        self.engine = engine
        self.ends = ends
        self.kinds = kinds or ("success_only",) * len(ends)
        self.policies = joins(len(ends))
        self.children = [f"child{j}" for j in range(len(self.policies))]
        self.model = FlowModel()

    async def submit(self, upstreams: Iterable[int]) -> None:
        """The flow, with edges from these upstreams; joins may need more than there are."""
        due = await self.engine.now() + _IN_MS
        nodes, edges = list[GraphNode](), list[GraphEdge]()
        for i, end in enumerate(self.ends):
            deadline = due if end == "expired" else None
            nodes.append(
                GraphNode(key=f"u{i}", execution_kind="job", execution_deadline_at=deadline)
            )
            if end == "skipped":
                nodes.append(GraphNode(key=f"s{i}", execution_kind="job"))
                edges.append(GraphEdge(frm=f"s{i}", to=f"u{i}"))
            self.model.add(f"u{i}")
        initial = list(upstreams)
        whole = len(initial) == len(self.ends)
        for key, join in zip(self.children, self.policies, strict=True):
            at_once = join if whole else JoinAll()
            nodes.append(GraphNode(key=key, execution_kind="job", lane_id=_LANE, join=at_once))
            self.model.add(key, join)
        if whole:
            edges += self.edges(initial)
        graph = FlowGraph(
            flow_id=new_uuid(), flow_kind="algebra", nodes=tuple(nodes), edges=tuple(edges)
        )
        outcome = await self.engine.backend.flows.submit_flow(graph)
        assert isinstance(outcome, Submitted)
        self.flow = TestFlow(self.engine, outcome)
        if not whole:
            for key, join in zip(self.children, self.policies, strict=True):
                await self.flow.backend.flows.set_edge_group_policy(
                    self.flow.flow_id, self.flow.nodes[key], join
                )
            if initial:
                await self.flow.backend.flows.extend_flow(
                    self.flow.flow_id, edges=self.edges(initial)
                )
        self._add(initial, self.children)

    def edges(self, upstreams: Iterable[int], children: Sequence[str] = ()) -> list[GraphEdge]:
        return [
            GraphEdge(frm=f"u{i}", to=child, kind=self.kinds[i])
            for child in children or self.children
            for i in upstreams
        ]

    def _add(self, upstreams: Iterable[int], children: Sequence[str]) -> None:
        for edge in self.edges(upstreams, children):
            answer = self.model.depend(
                Edge(f"{edge.frm} {edge.to}", edge.frm, edge.to, str(edge.kind))
            )
            assert answer == "applied"

    async def add_late(self, i: int) -> None:
        """An edge from this upstream into every child; one that has ended refuses it."""
        open_children = [key for key in self.children if not self.model.members[key].ended]
        for key in set(self.children) - set(open_children):
            add = self.flow.backend.flows.add_dependency(
                self.flow.flow_id, self.flow.nodes[f"u{i}"], self.flow.nodes[key]
            )
            await refused(add, "terminal")
        if open_children:
            await self.flow.backend.flows.extend_flow(
                self.flow.flow_id, edges=self.edges([i], open_children)
            )
            self._add([i], open_children)

    async def end(self, i: int) -> None:
        how, flow = self.ends[i], self.flow
        if how == "skipped":
            await flow.end(f"s{i}", "cancelled")
        elif how == "expired":
            await self.engine.advance(_IN_MS)
            expire = flow.backend.upkeep.expire_execution
            answers = await expire(flow.tag, ExpireReason.EXECUTION_DEADLINE, [flow.nodes[f"u{i}"]])
            assert answers == ["expired"]
        else:
            await flow.end(f"u{i}", how)
        self.model.end(f"u{i}", {"success": "completed"}.get(how, how))

    async def compare(self) -> None:
        """Every child, and its counters, are where its join puts them."""
        page = await self.flow.backend.flows.list_members(self.flow.flow_id)
        found: dict[str, FlowMember] = {member.node: member for member in page.entries}
        for key in self.children:
            member, join = self.model.members[key], found[key].join
            n, good, _ = self.model.counted(key)
            resolved = [
                self.model.members[edge.frm].state
                for edge in self.model.inbound(key)
                if edge.state == "impossible"
            ]
            skipped = resolved.count("skipped")
            assert found[key].public_state.value == member.state, (key, self.ends, self.kinds)
            if n:
                assert join is not None
                assert join.group_state == member.group
                assert (join.total_deps, join.satisfied_count) == (n, good)
                assert (join.failed_count, join.skipped_count) == (len(resolved) - skipped, skipped)


async def check(
    engine: Engine,
    ends: Sequence[str],
    kinds: Sequence[DependencyKind] = (),
    late: tuple[int, int] | None = None,
) -> None:
    """Upstreams end one after the other. `late`: which one's edges come before which end."""
    upstreams = range(len(ends))
    each = Algebra(engine, ends, kinds)
    await each.submit(i for i in upstreams if late is None or i != late[0])
    for i in upstreams:
        if late and late[1] == i:
            await each.add_late(late[0])
            await each.compare()
        await each.end(i)
        await each.compare()
    if late and late[1] == len(ends):
        await each.add_late(late[0])
        await each.compare()
    # Flows that end up in the same partition must not see each other's members.
    await engine.backend.flows.cancel_flow(each.flow.flow_id)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_every_order_of_every_end(engine: Engine, n: int) -> None:
    for ends in all_orders(n):
        await check(engine, ends)


async def test_a_sample_of_the_orders_of_five(engine: Engine) -> None:
    for ends in seeded("a sample of the orders of five").sample(list(all_orders(5)), 200):
        await check(engine, ends)


@pytest.mark.chaos
async def test_every_order_of_five(engine: Engine) -> None:
    for ends in all_orders(5):
        await check(engine, ends)


@pytest.mark.parametrize("n", [1, 2])
async def test_every_kind_with_every_end(engine: Engine, n: int) -> None:
    """08 B6"""
    for ends in all_orders(n):
        for kinds in itertools.product(KINDS, repeat=n):
            await check(engine, ends, kinds)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_edge_that_comes_late_at_every_moment(engine: Engine, n: int) -> None:
    """08 B5: before and after each end, from an upstream that runs or has ended."""
    for ends in all_orders(n):
        for late in itertools.product(range(n), range(n + 1)):
            await check(engine, ends, late=late)


@pytest.mark.parametrize("n", [3, 4])
async def test_a_sample_of_late_edges_of_every_kind(engine: Engine, n: int) -> None:
    rng = seeded("a sample of late edges of every kind")
    for _ in range(60):
        late = (rng.randrange(n), rng.randrange(n + 1))
        await check(engine, rng.choices(ENDS, k=n), rng.choices(KINDS, k=n), late)


@pytest.mark.chaos
async def test_late_edges_at_every_moment_of_three(engine: Engine) -> None:
    for ends in all_orders(3):
        for late in itertools.product(range(3), range(4)):
            await check(engine, ends, late=late)
