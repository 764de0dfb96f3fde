"""Very large flows: every call about them stays short."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flowfabric.core.contracts.flows import AnyOf, FlowGraph, GraphEdge, GraphNode
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.executions import Completion
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, drained, without_followups
from tests.support.server_time import ServerMeter

NODES, EDGES, WIDTH, AT_ONCE = 10_000, 50_000, 100, 800
MOST_COMMANDS = 1500
"""Inside of one call: about 5 ms of a server that has a core for itself."""


def edges_into(number: int) -> list[GraphEdge]:
    """Ten columns of members; each waits for five before it, and the last one for all the rest."""
    row, place = divmod(number, 10)
    before = [(row - WIDTH // 10) * 10 + (place + n) % 10 for n in range(5)]
    before = [] if number < WIDTH else before
    if number == NODES - 1:
        before = list(range(number - (EDGES - 5 * (number - WIDTH)), number))
    return [GraphEdge(frm=f"n{up}", to=f"n{number}") for up in before]


async def built(engine: Engine) -> TestFlow:
    """The flow in the calls that a large graph of an application makes."""
    flows, flow_id = engine.backend.flows, new_uuid()
    flow: TestFlow | None = None
    for start in range(0, NODES, AT_ONCE):
        numbers = range(start, min(NODES, start + AT_ONCE))
        nodes = tuple(GraphNode(key=f"n{n}", execution_kind="job") for n in numbers)
        edges = tuple(edge for n in numbers for edge in edges_into(n))
        if flow is not None:
            flow.nodes |= (await flows.extend_flow(flow_id, nodes, edges)).nodes
            continue
        graph = FlowGraph(flow_id=flow_id, flow_kind="dag", nodes=nodes, edges=edges, hold=True)
        submitted: Any = await flows.submit_flow(graph)
        flow = TestFlow(engine, submitted)
    assert flow is not None
    await flows.release_flow(flow_id)
    await drained(engine, flow.tag)
    return flow


async def run_layer(engine: Engine, flow: TestFlow) -> None:
    claimed = (await engine.backend.claims.claim_many(engine.want(), flow.tag, WIDTH)).claims
    assert len(claimed) == WIDTH
    await engine.backend.executions.complete_many([Completion(each.handle) for each in claimed])
    await drained(engine, flow.tag)


@pytest.mark.timeout(180)
async def test_ten_thousand_members_and_fifty_thousand_edges(engine: Engine) -> None:
    await without_followups(engine)
    flows = engine.backend.flows
    async with ServerMeter(engine) as meter:
        flow = await built(engine)
        snapshot = await flow.snapshot()
        assert (snapshot.node_count, snapshot.edge_count) == (NODES, EDGES)
        for _ in range(10):
            await run_layer(engine, flow)
        await flow.end(f"n{10 * WIDTH}", "failed")
        await drained(engine, flow.tag)
        skipped = (await flow.snapshot()).members["skipped"]
        assert skipped > NODES / WIDTH
        await flows.replay_flow(flow.flow_id)
        await drained(engine, flow.tag)
        assert "skipped" not in (await flow.snapshot()).members
        await flows.cancel_flow(flow.flow_id, wait_timeout_ms=60_000)
        assert (await flow.snapshot()).members["cancelled"] == NODES - 10 * WIDTH
        await flows.delete_flow(flow.flow_id)
    assert {name: most for name, most in meter.most.items() if most > MOST_COMMANDS} == {}


async def test_a_member_that_takes_the_results_of_very_many(engine: Engine) -> None:
    await without_followups(engine)
    names = [f"m{n}" for n in range(900)]
    nodes = tuple(GraphNode(key=key, execution_kind="job") for key in (*names, "end"))
    edges = tuple(GraphEdge(frm=key, to="end", input_name=key) for key in names)
    graph = FlowGraph(flow_id=new_uuid(), flow_kind="reduce", nodes=nodes, edges=edges)
    results = {key: key.encode() for key in names} | dict.fromkeys(names[:5], b"x" * 500_000)
    async with ServerMeter(engine) as meter:
        submitted: Any = await engine.backend.flows.submit_flow(graph)
        flow = TestFlow(engine, submitted)
        await drained(engine, flow.tag)
        await flow.end("m7", "failed")
        await drained(engine, flow.tag)
        assert await flow.state("end") == "skipped"
        await engine.backend.flows.replay_flow(flow.flow_id)
        await drained(engine, flow.tag)
        assert await flow.state("end") == "waiting_children"
        del flow.claims["m7"]
        for key in names:
            await flow.end(key, result=results[key])
        await flow.claim()
    given = flow.claims["end"].inputs.inputs
    assert {name: each.result for name, each in given.items()} == results
    assert {name: most for name, most in meter.most.items() if most > MOST_COMMANDS} == {}


async def test_a_running_flow_gets_a_very_wide_join(engine: Engine) -> None:
    """Its edges come in several calls; what is decided between them changes nothing."""
    await without_followups(engine)
    flows = engine.backend.flows
    roots = [f"r{n}" for n in range(500)]
    nodes = tuple(GraphNode(key=key, execution_kind="job") for key in roots)
    graph = FlowGraph(flow_id=new_uuid(), flow_kind="race", nodes=nodes)
    submitted: Any = await flows.submit_flow(graph)
    flow = TestFlow(engine, submitted)
    await drained(engine, flow.tag)
    for key in roots[:249]:
        await flow.end(key, "cancelled")

    async def join(key: str, upstreams: list[str]) -> None:
        node = GraphNode(key=key, execution_kind="job", join=AnyOf("cancel_remaining"))
        edges = [GraphEdge(frm=each, to=key) for each in upstreams]
        flow.nodes |= (await flows.extend_flow(flow.flow_id, [node], edges)).nodes
        await drained(engine, flow.tag)

    async with ServerMeter(engine) as meter:
        await join("all but one have ended", roots[:250])
        assert await flow.state("all but one have ended") == "waiting_children"
        await flow.claim()
        await flow.end("r249")
        assert await flow.state("all but one have ended") == "waiting"
        await join("one has succeeded", roots[249:])
        assert await flow.state("one has succeeded") == "waiting"
    assert (await flow.recount())["cancelled"] == 249 + 250
    assert max(meter.most.values()) <= MOST_COMMANDS


async def test_a_member_waits_for_very_many_children(engine: Engine) -> None:
    await without_followups(engine)
    flows = engine.backend.flows
    graph = FlowGraph(
        flow_id=new_uuid(),
        flow_kind="spawn",
        nodes=tuple(GraphNode(key=f"n{n}", execution_kind="job") for n in range(500)),
        edges=tuple(GraphEdge(frm=f"n{n}", to=f"n{n + 1}") for n in range(499)),
    )
    submitted: Any = await flows.submit_flow(graph)
    flow = TestFlow(engine, submitted)
    await flow.claim()
    children = [GraphNode(key=f"c{n}", execution_kind="job") for n in range(500)]
    handle = flow.claims.pop("n0").handle
    async with ServerMeter(engine) as meter:
        spawned = await flows.spawn_children(handle, children, wait=True)
        assert spawned.parked
        flow.nodes |= spawned.nodes
        await drained(engine, flow.tag)
        while keys := [key for key in await flow.claim() if key != "n0"]:
            handles = [flow.claims[key].handle for key in keys]
            await engine.backend.executions.complete_many([Completion(each) for each in handles])
            await drained(engine, flow.tag)
        assert set(flow.claims["n0"].inputs.inputs) == {child.key for child in children}
    assert max(meter.most.values()) <= MOST_COMMANDS


async def test_an_edge_to_the_start_of_a_very_long_chain(engine: Engine) -> None:
    flows, length = engine.backend.flows, 1000
    names = [f"n{n}" for n in range(length)]
    graph = FlowGraph(
        flow_id=new_uuid(),
        flow_kind="chain",
        nodes=tuple(GraphNode(key=key, execution_kind="job") for key in names),
        edges=tuple(GraphEdge(frm=a, to=b) for a, b in itertools.pairwise(names)),
    )
    submitted: Any = await flows.submit_flow(graph)
    flow = TestFlow(engine, submitted)
    first = await engine.create(execution_id=flow.new_member_id())
    async with ServerMeter(engine) as meter:
        await flows.add_execution_to_flow(flow.flow_id, first)
        await flows.add_dependency(flow.flow_id, first, flow.nodes["n0"])
        await flows.extend_flow(
            flow.flow_id,
            [GraphNode(key="x", execution_kind="job"), GraphNode(key="y", execution_kind="job")],
            [GraphEdge(frm="x", to="y"), GraphEdge(frm="y", to="n0")],
        )
    assert max(meter.most.values()) <= 60
    for end in ("n0", "n500", "n999"):
        await refused(flows.add_dependency(flow.flow_id, flow.nodes[end], first), "cycle_detected")
