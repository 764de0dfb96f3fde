"""Every join against a pure model: n upstreams that end in every way, in every order."""

from __future__ import annotations

import itertools
import random

import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
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
from tests.support.engine import Engine
from tests.support.flows import TestFlow

ENDS = ("success", "failed", "cancelled", "expired", "skipped")
_IN_MS = 20


def joins(n: int) -> list[JoinPolicy]:
    quorums = [Quorum(k, "let_run") for k in range(1, n + 1)]
    return [JoinAll(), AnyOf("let_run"), *quorums]


def decided(join: JoinPolicy, ends: tuple[str, ...], n: int) -> list[str]:
    """The child's state after each end, by the rules alone."""
    k = n if isinstance(join, JoinAll) else 1 if isinstance(join, AnyOf) else join.k
    states, state, good, bad = list[str](), "waiting_children", 0, 0
    for end in ends:
        good, bad = good + (end == "success"), bad + (end != "success")
        if state == "waiting_children":
            state = "waiting" if good >= k else "skipped" if bad > n - k else state
        states.append(state)
    return states


async def submit(engine: Engine, ends: tuple[str, ...], policies: list[JoinPolicy]) -> TestFlow:
    """One graph with a child per policy; all have the same upstreams."""
    due = await engine.now() + _IN_MS
    nodes, edges = list[GraphNode](), list[GraphEdge]()
    for i, end in enumerate(ends):
        deadline = due if end == "expired" else None
        nodes.append(GraphNode(key=f"u{i}", execution_kind="job", execution_deadline_at=deadline))
        if end == "skipped":
            nodes.append(GraphNode(key=f"s{i}", execution_kind="job"))
            edges.append(GraphEdge(frm=f"s{i}", to=f"u{i}"))
    for j, join in enumerate(policies):
        nodes.append(GraphNode(key=f"child{j}", execution_kind="job", join=join))
        edges += [GraphEdge(frm=f"u{i}", to=f"child{j}") for i in range(len(ends))]
    graph = FlowGraph(
        flow_id=new_uuid(), flow_kind="algebra", nodes=tuple(nodes), edges=tuple(edges)
    )
    outcome = await engine.backend.flows.submit_flow(graph)
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)


async def end(flow: TestFlow, i: int, how: str) -> None:
    if how == "skipped":
        await flow.end(f"s{i}", "cancelled")
    elif how == "expired":
        await flow.engine.advance(_IN_MS)
        expire = flow.backend.upkeep.expire_execution
        answers = await expire(flow.tag, ExpireReason.EXECUTION_DEADLINE, [flow.nodes[f"u{i}"]])
        assert answers == ["expired"]
    else:
        await flow.end(f"u{i}", how)


async def check(engine: Engine, ends: tuple[str, ...]) -> None:
    """Upstreams end one after the other; every child is where its join puts it."""
    policies = joins(len(ends))
    flow = await submit(engine, ends, policies)
    wanted = [decided(join, ends, len(ends)) for join in policies]
    for i, how in enumerate(ends):
        await end(flow, i, how)
        told = {m.node: m.public_state.value for m in await members(flow)}
        found = [told[f"child{j}"].replace("active", "waiting") for j in range(len(policies))]
        assert found == [states[i] for states in wanted], (ends, i)
    good, skipped = ends.count("success"), ends.count("skipped")
    counted = (good, len(ends) - good - skipped, skipped)
    children = [flow.nodes[f"child{j}"] for j in range(len(policies))]
    groups = {g.downstream_execution_id: g for g in (await flow.snapshot()).edge_groups}
    for child in children:
        group = groups[child]
        assert (group.satisfied_count, group.failed_count, group.skipped_count) == counted
    # Flows that end up in the same partition must not see each other's members.
    await flow.backend.flows.cancel_flow(flow.flow_id)


async def members(flow: TestFlow) -> tuple[FlowMember, ...]:
    return (await flow.backend.flows.list_members(flow.flow_id)).entries


@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_every_order_of_every_end(engine: Engine, n: int) -> None:
    for ends in itertools.product(ENDS, repeat=n):
        await check(engine, ends)


async def test_a_sample_of_the_orders_of_five(engine: Engine) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    for ends in rng.sample(list(itertools.product(ENDS, repeat=5)), 300):
        await check(engine, ends)
