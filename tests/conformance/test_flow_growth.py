"""Flows grow: late edges, extensions, children that a running member spawns, replays."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric.core.contracts.flows import (
    AlreadyExtended,
    AnyOf,
    CascadeCounts,
    EdgeApplied,
    GraphEdge,
    GraphNode,
    Submitted,
)
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, graph, submitted


def node(key: str) -> GraphNode:
    return GraphNode(key=key, execution_kind="job")


async def test_an_extension_adds_nodes_behind_existing_ones(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    flows = engine.backend.flows
    extended = await flows.extend_flow(
        flow.flow_id,
        [node("c"), node("d")],
        [GraphEdge(frm="b", to="c"), GraphEdge(frm="d", to="b")],
    )
    assert extended.kind == "extended"
    flow.nodes.update(extended.nodes)
    again = await flows.extend_flow(
        flow.flow_id,
        [node("c"), node("d")],
        [GraphEdge(frm="b", to="c"), GraphEdge(frm="d", to="b")],
    )
    assert again.kind == "already_extended"
    assert await flow.claim() == ["a", "d"]
    await flow.end("a")
    assert await flow.state("b") == "waiting_children"
    await flow.end("d")
    assert await flow.claim() == ["b"]
    await flow.end("b")
    assert await flow.claim() == ["c"]


async def test_an_extension_cannot_close_a_cycle(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    before = await engine.dump()
    await refused(
        engine.backend.flows.extend_flow(
            flow.flow_id,
            [node("c"), node("d")],
            [GraphEdge(frm="b", to="c"), GraphEdge(frm="c", to="d"), GraphEdge(frm="d", to="a")],
        ),
        "cycle_detected",
    )
    assert await engine.dump() == before


async def test_an_extension_cannot_use_the_name_of_an_input_twice(engine: Engine) -> None:
    flow = await submitted(engine, "a>z", input_name="text")
    new, edge = [node("b")], GraphEdge(frm="b", to="z")
    flows = engine.backend.flows
    named = msgspec.structs.replace(edge, input_name="text")
    await refused(flows.extend_flow(flow.flow_id, new, [named]), "invalid_input")
    assert (await flow.snapshot()).node_count == 2
    other = msgspec.structs.replace(edge, input_name="more")
    await flows.extend_flow(flow.flow_id, new, [edge, other])
    repeat = await flows.extend_flow(flow.flow_id, new, [edge, other])
    assert isinstance(repeat, AlreadyExtended)


async def test_a_child_cannot_take_the_name_of_an_input(engine: Engine) -> None:
    flow = await submitted(engine, "a>z", input_name="text")
    await flow.end("a")
    await flow.claim()
    spawn = engine.backend.flows.spawn_children
    handle = flow.claims["z"].handle
    await refused(spawn(handle, [node("text")]), "invalid_input")
    assert (await flow.snapshot()).node_count == 2


async def test_a_late_edge_blocks_a_waiting_child(engine: Engine) -> None:
    flow = await submitted(engine, "a b")
    applied = await engine.backend.flows.add_dependency(
        flow.flow_id, flow.nodes["a"], flow.nodes["b"]
    )
    assert isinstance(applied, EdgeApplied)
    assert (applied.unsatisfied_count, applied.resolution) == (1, "")
    assert await flow.claim() == ["a"]
    await flow.end("a")
    assert await flow.claim() == ["b"]


async def test_an_edge_from_an_ended_upstream_decides_at_once(engine: Engine) -> None:
    flow = await submitted(engine, "a b c")
    await flow.end("a")
    applied = await engine.backend.flows.add_dependency(
        flow.flow_id, flow.nodes["a"], flow.nodes["b"]
    )
    assert applied == EdgeApplied(0, "satisfied", 4, CascadeCounts(resolved=1))
    applied = await engine.backend.flows.add_dependency(
        flow.flow_id, flow.nodes["a"], flow.nodes["c"], dependency_kind="failure_only"
    )
    assert isinstance(applied, EdgeApplied)
    assert applied.resolution == "impossible"


async def test_a_member_waits_for_children_that_it_spawned(engine: Engine) -> None:
    flow = await submitted(engine, "a>z")
    assert await flow.claim() == ["a"]
    handle = flow.claims["a"].handle
    spawned = await engine.backend.flows.spawn_children(handle, [node("x"), node("y")], wait=True)
    assert spawned.parked
    flow.nodes.update(spawned.nodes)
    assert await flow.state("a") == "waiting_children"
    assert await flow.claim() == ["x", "y"]
    await flow.end("x", result=b"1")
    await flow.end("y", "failed")
    assert await flow.claim() == ["a"]
    assert flow.claims["a"].handle.kind == "resumed"
    inputs = flow.claims["a"].inputs.inputs
    assert {key: value.outcome for key, value in inputs.items()} == {"x": "success", "y": "failed"}
    await flow.end("a")
    assert await flow.claim() == ["z"]


async def test_a_skipped_member_waits_for_a_new_run_of_its_upstream(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c")
    await flow.end("a", "failed")
    assert await flow.states() == {"a": "failed", "b": "skipped", "c": "skipped"}
    executions = engine.backend.executions
    await refused(executions.replay_execution(flow.nodes["b"], strict=True), "deps_not_satisfied")
    replayed = await executions.replay_execution(flow.nodes["b"])
    assert replayed.public_state == "waiting_children"
    replayed = await executions.replay_execution(flow.nodes["a"])
    assert replayed.public_state == "waiting"
    flow.claims.clear()
    await flow.end("a")
    assert await flow.claim() == ["b"]


async def test_a_replay_reopens_what_was_skipped(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c a>d e>d", {"d": AnyOf("let_run")})
    await flow.end("a", "failed")
    await flow.end("e")
    assert await flow.states() == {
        "a": "failed",
        "b": "skipped",
        "c": "skipped",
        "d": "waiting",
        "e": "completed",
    }
    replayed = await engine.backend.executions.replay_execution(
        flow.nodes["a"], reopen_downstream=True
    )
    assert replayed.reopened == 2
    flow.claims.clear()
    for key in "abc":
        await flow.end(key)
    assert (await flow.snapshot()).members == {"completed": 4, "active": 1}


async def test_every_member_of_a_released_flow_can_run(engine: Engine) -> None:
    """More than one call lets go; the rest follows at once, without a scanner."""
    held = msgspec.structs.replace(graph(" ".join(f"m{n}" for n in range(300))), hold=True)
    outcome = await engine.backend.flows.submit_flow(held)
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    assert await flow.claim() == []
    released = await engine.backend.flows.release_flow(flow.flow_id)
    assert released.pending
    assert 0 < released.eligible < 300
    async with asyncio.timeout(20):
        while len(flow.claims) < 300:
            await flow.claim()
