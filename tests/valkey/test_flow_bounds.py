"""Calls about flows stay short at their limits."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.core.contracts.flows import AnyOf, FlowGraph, GraphEdge, GraphNode, Submitted
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.api.flows import FlowFilter
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.flows import TestFlow, without_followups
from tests.support.server_time import assert_short, command

PAYLOAD = b"x" * 1000


def node(key: str, **more: Any) -> GraphNode:
    return GraphNode(key=key, execution_kind="job", input_payload=PAYLOAD, **more)


def fan(width: int, **join: Any) -> FlowGraph:
    """One root, `width` members after it, and one that waits for all of them."""
    middle = [f"m{n}" for n in range(width)]
    edges = [GraphEdge(frm="root", to=key) for key in middle]
    edges += (GraphEdge(frm=key, to="end", input_name=f"i{key}") for key in middle)
    nodes = (node("root"), *map(node, middle), node("end", **join))
    return FlowGraph(flow_id=new_uuid(), flow_kind="fan", nodes=nodes, edges=tuple(edges))


async def submitted(engine: Engine, graph: FlowGraph) -> TestFlow:
    outcome = await engine.backend.flows.submit_flow(graph)
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)


async def test_a_graph_of_a_thousand_nodes(engine: Engine) -> None:
    keys_ = [f"n{n}" for n in range(1000)]
    edges = tuple(
        GraphEdge(frm=keys_[n - back], to=keys_[n])
        for n in range(1000)
        for back in range(1, 6)
        if n >= back
    )

    async def submit() -> None:
        graph = FlowGraph(
            flow_id=new_uuid(), flow_kind="dag", nodes=tuple(map(node, keys_)), edges=edges
        )
        await engine.backend.flows.submit_flow(graph)

    await assert_short(engine, "ff_submit_flow", submit)


async def test_growing_a_flow(engine: Engine) -> None:
    flow = await submitted(engine, fan(5))
    flows = engine.backend.flows
    count = 0

    async def extend() -> None:
        nonlocal count
        count += 1
        names = [f"x{count}.{n}" for n in range(500)]
        edges = [GraphEdge(frm="root", to=name) for name in names]
        await flows.extend_flow(flow.flow_id, [node(name) for name in names], edges)

    async def spawn() -> None:
        nonlocal count
        count += 1
        handle = flow.claims["root"].handle
        await flows.spawn_children(handle, [node(f"s{count}.{n}") for n in range(100)])

    async def hang_on() -> None:
        nonlocal count
        count += 1
        alone = await engine.create(execution_id=flow.new_member_id())
        await flows.add_execution_to_flow(flow.flow_id, alone)
        await flows.add_dependency(flow.flow_id, flow.nodes["root"], alone)

    async def apply() -> None:
        alone = await engine.create(execution_id=flow.new_member_id())
        await flows.add_execution_to_flow(flow.flow_id, alone)
        edge = new_uuid()
        await flows.stage_dependency_edge(flow.flow_id, flow.nodes["root"], alone, edge_id=edge)
        await flows.apply_dependency_to_child(flow.flow_id, edge)

    await flow.claim()
    await assert_short(engine, "ff_extend_flow", extend)
    await assert_short(engine, "ff_spawn", spawn)
    await assert_short(engine, "ff_stage_edge", hang_on)
    await assert_short(engine, "ff_apply_edge", apply)


async def test_what_an_end_leaves(engine: Engine) -> None:
    flows = engine.backend.flows
    flow = await submitted(engine, fan(1))

    async def end_root() -> None:
        nonlocal flow
        flow = await submitted(engine, fan(900))
        await without_followups(engine)
        await flow.end("root", "failed")

    async def drain() -> None:
        while (await flows.drain_cascade(flow.nodes["root"].partition)).pending:
            pass

    await assert_short(engine, "ff_drain_cascade", drain, end_root)
    assert await flow.state("end") == "skipped"

    async def cascade() -> None:
        await flows.cascade_completion(flow.nodes["root"])

    async def resolve() -> None:
        (edge, *_) = await flows.list_outgoing_edges(flow.nodes["root"])
        await flows.resolve_dependency(flow.flow_id, edge.edge_id, "failed")

    await assert_short(engine, "ff_cascade_ended", cascade, end_root)
    await assert_short(engine, "ff_resolve_edge", resolve)

    async def replay() -> None:
        await flows.replay_flow(flow.flow_id)

    await drain()
    await assert_short(engine, "ff_replay_flow", replay)

    async def audit() -> None:
        members = [(flow.nodes[f"m{n}"], "0") for n in range(50)]
        await engine.backend.upkeep.audit_dependencies(flow.tag, members)

    await assert_short(engine, "ff_audit_deps", audit)


async def test_siblings_of_a_wide_join(engine: Engine) -> None:
    flows = engine.backend.flows
    flow = await submitted(engine, fan(1))

    async def decide() -> None:
        nonlocal flow
        flow = await submitted(engine, fan(900, join=AnyOf("cancel_remaining")))
        await without_followups(engine)
        await flow.end("root")
        while (await flows.drain_cascade(flow.nodes["root"].partition)).pending:
            pass
        await flow.end("m0")

    async def drain() -> None:
        while await flows.drain_sibling_cancel_group(flow.flow_id, flow.nodes["end"]) == "pending":
            pass

    await assert_short(engine, "ff_sibling_group", drain, decide)
    assert await flow.state("m899") == "cancelled"


async def test_ending_a_wide_flow(engine: Engine) -> None:
    flows = engine.backend.flows
    flow = await submitted(engine, fan(1))

    async def submit() -> None:
        nonlocal flow
        flow = await submitted(engine, fan(900))
        await without_followups(engine)

    async def cancel() -> None:
        await flows.cancel_flow(flow.flow_id)

    async def drain() -> None:
        while (await flows.drain_flow_cancel(flow.flow_id))[2]:
            pass

    async def audit() -> None:
        assert (await flows.project_flow_summary(flow.flow_id)).outcome == "consistent"

    async def delete() -> None:
        await drain()
        await flows.delete_flow(flow.flow_id)

    async def cancelled() -> None:
        await submit()
        await cancel()

    await assert_short(engine, "ff_cancel_flow", cancel, submit)
    await assert_short(engine, "ff_drain_flow_cancel", drain, cancelled)
    await assert_short(engine, "ff_audit_flow", audit)
    await assert_short(engine, "ff_delete_flow", delete, cancelled)


async def test_releasing_a_held_flow(engine: Engine) -> None:
    flow_id = ""

    async def hold() -> None:
        nonlocal flow_id
        flow_id = new_uuid()
        nodes = tuple(node(f"n{n}") for n in range(900))
        graph = FlowGraph(flow_id=flow_id, flow_kind="wide", nodes=nodes, hold=True)
        await engine.backend.flows.submit_flow(graph)

    async def release() -> None:
        await engine.backend.flows.release_flow(flow_id)

    await assert_short(engine, "ff_release_flow", release, hold)


async def test_reading_a_wide_flow(engine: Engine) -> None:
    flow = await submitted(engine, fan(900))
    flows = engine.backend.flows
    await flow.end("root")

    async def members() -> None:
        await flows.list_members(flow.flow_id, limit=1000)

    async def edges() -> None:
        await flows.list_edges(flow.flow_id, limit=1000)

    async def inputs() -> None:
        await flows.get_inputs(flow.nodes["end"])

    async def tag() -> None:
        await flows.set_flow_tags(flow.flow_id, {f"app.t{n}": "x" * 4096 for n in range(128)})

    await assert_short(engine, "ff_flow_members", members)
    await assert_short(engine, "ff_flow_edges", edges)
    await assert_short(engine, "ff_get_inputs", inputs)
    await assert_short(engine, "ff_set_flow_tags", tag)


async def test_a_page_of_flows(engine: Engine) -> None:
    flow = await submitted(engine, fan(1))
    stored, tag = keys.flow(flow.tag, flow.flow_id), flow.tag
    names = [new_uuid() for _ in range(2000)]
    for name in names:
        await command(engine, "COPY", stored, keys.flow(tag, name))
    index = keys.index(tag, "flow_index")
    await command(engine, "ZADD", index, *(part for name in names for part in ("0", name)))
    partition = flow.nodes["root"].partition

    async def page() -> None:
        where = FlowFilter(tags={"app.a": "1", "app.b": "2"})
        await engine.backend.flows.list_flows(partition=partition, limit=1000, where=where)

    await assert_short(engine, "ff_list_flows", page)
    for name in names:
        await command(engine, "DEL", keys.flow(tag, name))
        await command(engine, "ZREM", index, name)


async def test_a_wide_subflow_in_another_partition(engine: Engine) -> None:
    """900 members that start at once, results of 3 MB, and 900 members that wait for them."""
    flows = engine.backend.flows
    await without_followups(engine)

    async def far() -> tuple[TestFlow, TestFlow]:
        after = tuple(node(f"m{n}") for n in range(900))
        owner = GraphNode(key="s", execution_kind="subflow")
        edges = tuple(GraphEdge(frm="s", to=each.key) for each in after)
        graph = FlowGraph(flow_id=new_uuid(), flow_kind="dag", nodes=(owner, *after), edges=edges)
        outcome: Any = await flows.submit_flow(graph)
        flow = TestFlow(engine, outcome)
        wide = FlowGraph(
            flow_id="", flow_kind="dag", nodes=tuple(node(f"x{n}") for n in range(900))
        )
        outcome = await flows.submit_flow(wide, parent_execution_id=flow.nodes["s"], spread=True)
        return flow, TestFlow(engine, outcome)

    started: list[tuple[TestFlow, TestFlow]] = []

    async def deliver() -> None:
        started.append(await far())
        while (await flows.drain_cascade(started[-1][1].nodes["x0"].partition)).pending:
            pass

    await assert_short(engine, "ff_start_subflow", deliver)
    flow, sub = started[-1]

    async def end(result: str) -> None:
        while got := (await engine.backend.claims.claim_many(engine.want(), sub.tag, 100)).claims:
            await engine.backend.executions.complete_many(
                [Completion(claim.handle, result.encode() * 3300) for claim in got]
            )

    await end("r")
    assert await flow.state("s") == "waiting_children"
    stored = await command(engine, "HGETALL", keys.index(sub.tag, "subflow_outbox"))
    (name,) = stored

    async def tell() -> None:
        await command(engine, "HSET", keys.index(sub.tag, "subflow_outbox"), name, stored[name])
        await flows.drain_cascade(sub.nodes["x0"].partition)

    await assert_short(engine, "ff_end_subflow", tell)
    await assert_short(engine, "ff_ack_message", tell)
    result = await engine.backend.reads.get_execution_result(flow.nodes["s"])
    assert result is not None
    assert len(msgspec.msgpack.decode(result)) == 900
