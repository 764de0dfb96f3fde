"""Calls about flows, to be made with and without their reply."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import AnyOf, Dependency, FlowGraph, GraphEdge, GraphNode
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import Engine
from tests.support.flows import TestFlow, graph, set_counters, set_units, without_followups
from tests.valkey.lost_reply_case import Case, no_answer, nothing

FLOW = "00000000-0000-4000-8000-0000000000f1"
EDGE = "00000000-0000-4000-8000-0000000000e1"
_NODE = GraphNode(key="new", execution_kind="job")
Members = dict[str, ExecutionId]


def text(names: str, joins: Any = None, **more: Any) -> FlowGraph:
    made = graph(names, joins, FLOW)
    return FlowGraph(flow_id=FLOW, flow_kind="test", nodes=made.nodes, edges=made.edges, **more)


async def made(engine: Engine, names: str = "a>b", joins: Any = None, **more: Any) -> TestFlow:
    outcome: Any = await engine.backend.flows.submit_flow(text(names, joins, **more))
    return TestFlow(engine, outcome)


async def a_flow(engine: Engine) -> Members:
    return (await made(engine)).nodes


async def a_held_flow(engine: Engine) -> Members:
    return (await made(engine, hold=True)).nodes


async def apart(engine: Engine) -> Members:
    return (await made(engine, "a b")).nodes


async def staged(engine: Engine) -> Members:
    nodes = await apart(engine)
    await stage(engine.backend, nodes)
    return nodes


async def an_ended_flow(engine: Engine) -> Members:
    flow = await made(engine)
    await flow.end("a", "failed")
    return flow.nodes


async def a_loner(engine: Engine) -> ExecutionId:
    await engine.backend.flows.create_flow(FLOW, "dag")
    alone = ExecutionId.parse(
        f"{TestFlow.tag_of(engine, FLOW)}:00000000-0000-4000-8000-000000000001"
    )
    await engine.backend.executions.create_execution(
        NewExecution(execution_id=alone, execution_kind="job")
    )
    return alone


async def running_member(engine: Engine) -> Any:
    flow = await made(engine)
    await flow.claim()
    return flow.claims["a"].handle


async def running_race(engine: Engine) -> Any:
    """A member whose end decides a join, cancels a sibling and skips others."""
    flow = await made(engine, "a>c b>c a>d>e", {"c": AnyOf("cancel_remaining")})
    await flow.claim()
    return flow.claims["a"].handle


async def ended_children(engine: Engine) -> Members:
    flow = await made(engine, "a>b>c a>c")
    await flow.end("a", "failed")
    return flow.nodes


def complete_and_claim(backend: ValkeyBackend, handle: Any) -> Any:
    request = ClaimRequest("default", "w", "w-1")
    items = [Completion(handle, b"r")]
    return backend.claims.complete_and_claim(handle.execution_id.tag, items, request, 5)


def join_by_creation(backend: ValkeyBackend, nodes: Members) -> Any:
    new = ExecutionId.parse(f"{nodes['a'].tag}:00000000-0000-4000-8000-000000000002")
    upstreams = (Dependency(upstream=nodes["a"]), Dependency(upstream=nodes["b"]))
    return backend.executions.create_execution(
        NewExecution(execution_id=new, execution_kind="job", flow_id=FLOW, depends_on=upstreams)
    )


async def left_over(engine: Engine) -> Members:
    """A cascade and a cancellation of siblings that one call could not finish."""
    flow = await made(engine, "a>c b>c a>d", {"c": AnyOf("cancel_remaining")})
    await set_units(engine, 1)
    # Without the client's own drain.
    await without_followups(engine)
    await flow.claim()
    await flow.end("a")
    await set_units(engine)
    return flow.nodes


async def lost_marker(engine: Engine) -> Members:
    """A member whose upstream ended, and nobody told it."""
    nodes = await left_over(engine)
    await engine.backend.transport.call("DEL", keys.index(nodes["a"].tag, "cascade_backlog"))
    return nodes


async def half_cancelled(engine: Engine) -> Members:
    flow = await made(engine, "a b c")
    await set_units(engine, 1)
    await without_followups(engine)
    await engine.backend.flows.cancel_flow(FLOW, "x")
    await set_units(engine)
    return flow.nodes


async def drifted(engine: Engine) -> Members:
    nodes = await a_flow(engine)
    await set_counters(engine, FLOW, members_waiting=7)
    return nodes


async def with_a_far_subflow(engine: Engine) -> int:
    """A subflow in another partition whose parent does not know it yet; its partition."""
    owner = GraphNode(key="s", execution_kind="subflow")
    flow = FlowGraph(flow_id=FLOW, flow_kind="test", nodes=(owner,))
    parent = (await engine.backend.flows.submit_flow(flow)).nodes["s"]
    await without_followups(engine)
    far: Any = await engine.backend.flows.submit_flow(
        FlowGraph(flow_id="", flow_kind="test", nodes=(_NODE,)),
        parent_execution_id=parent,
        spread=True,
    )
    return far.nodes["new"].partition


async def with_an_ended_far_subflow(engine: Engine) -> int:
    partition = await with_a_far_subflow(engine)
    await engine.backend.flows.drain_cascade(partition)
    want = engine.want()
    got = await engine.backend.claims.claim_many(want, f"{{fp:{partition}}}", 1)
    await engine.backend.executions.complete(got.claims[0].handle, b"r")
    return partition


def drain(backend: ValkeyBackend, partition: int) -> Any:
    return backend.flows.drain_cascade(partition)


def stage(backend: ValkeyBackend, nodes: Members) -> Any:
    return backend.flows.stage_dependency_edge(FLOW, nodes["a"], nodes["b"], edge_id=EDGE)


def ids_of(outcome: Any) -> Any:
    """A repeat says that it found all there; the ids are the same."""
    return outcome.nodes


FLOW_CASES: dict[str, Case] = {
    "subflow_ask": Case("ff_ask_parent", with_a_far_subflow, drain, no_answer),
    "subflow_start": Case("ff_start_subflow", with_a_far_subflow, drain, no_answer),
    "subflow_ack": Case("ff_ack_message", with_a_far_subflow, drain, no_answer),
    "subflow_end": Case("ff_end_subflow", with_an_ended_far_subflow, drain, no_answer),
    "flow_create": Case(
        "ff_create_flow",
        nothing,
        lambda b, _: b.flows.create_flow(FLOW, "dag"),
        lambda outcome: outcome.flow_id,
    ),
    "flow_submit": Case(
        "ff_submit_flow", nothing, lambda b, _: b.flows.submit_flow(text("a>b a>c")), ids_of
    ),
    "flow_extend": Case(
        "ff_extend_flow",
        a_flow,
        lambda b, _: b.flows.extend_flow(FLOW, [_NODE], [GraphEdge(frm="new", to="b")]),
        ids_of,
    ),
    "flow_spawn": Case(
        "ff_spawn", running_member, lambda b, h: b.flows.spawn_children(h, [_NODE]), ids_of
    ),
    "flow_spawn_and_wait": Case(
        "ff_spawn", running_member, lambda b, h: b.flows.spawn_children(h, [_NODE], wait=True)
    ),
    "member_create": Case("ff_create", a_flow, join_by_creation, lambda o: o.execution_id),
    "member_complete": Case(
        "ff_complete", running_race, lambda b, h: b.executions.complete(h, b"r"), no_answer
    ),
    "member_complete_and_claim": Case(
        "ff_complete", running_race, complete_and_claim, lambda told: len(told[1].claims)
    ),
    "member_fail": Case(
        "ff_fail", running_race, lambda b, h: b.executions.fail(h, "x", "permanent"), no_answer
    ),
    "member_cancel": Case(
        "ff_cancel", running_race, lambda b, h: b.executions.cancel(h, "x"), no_answer
    ),
    "member_wait": Case(
        "ff_wait_children", running_race, lambda b, h: b.executions.wait_children(h)
    ),
    "member_replay": Case(
        "ff_replay",
        ended_children,
        lambda b, n: b.executions.replay_execution(n["a"], reopen_downstream=True),
    ),
    "flow_submit_in_parts": Case(
        "ff_submit_flow",
        nothing,
        lambda b, _: b.flows.submit_flow(text(" ".join(f"a>n{n}" for n in range(150)))),
        ids_of,
    ),
    "flow_extend_in_parts": Case(
        "ff_extend_flow",
        a_flow,
        lambda b, _: b.flows.extend_flow(
            FLOW, [GraphNode(key=f"n{n}", execution_kind="job") for n in range(110)]
        ),
        ids_of,
    ),
    "flow_cancel_some": Case(
        "ff_cancel_flow",
        running_member,
        lambda b, _: b.flows.cancel_flow(FLOW, "x", cancellation_policy="cancel_pending"),
    ),
    "flow_release": Case(
        "ff_release_flow", a_held_flow, lambda b, _: b.flows.release_flow(FLOW), no_answer
    ),
    "flow_add": Case(
        "ff_add_to_flow",
        a_loner,
        lambda b, eid: b.flows.add_execution_to_flow(FLOW, eid),
        lambda outcome: outcome.execution_id,
    ),
    "flow_stage": Case("ff_stage_edge", apart, stage, lambda outcome: outcome.edge_id),
    "flow_depend": Case(
        "ff_stage_edge",
        apart,
        lambda b, n: b.flows.add_dependency(FLOW, n["a"], n["b"], edge_id=EDGE),
        no_answer,
    ),
    "flow_apply": Case(
        "ff_apply_edge",
        staged,
        lambda b, _: b.flows.apply_dependency_to_child(FLOW, EDGE),
        no_answer,
    ),
    "flow_join": Case(
        "ff_set_join",
        apart,
        lambda b, n: b.flows.set_edge_group_policy(FLOW, n["b"], AnyOf("let_run")),
        no_answer,
    ),
    "flow_tags": Case(
        "ff_set_flow_tags", a_flow, lambda b, _: b.flows.set_flow_tag(FLOW, "a.b", "c")
    ),
    "flow_cancel": Case("ff_cancel_flow", a_flow, lambda b, _: b.flows.cancel_flow(FLOW, "x")),
    "flow_cancel_drain": Case(
        "ff_drain_flow_cancel",
        half_cancelled,
        lambda b, _: b.flows.drain_flow_cancel(FLOW),
        no_answer,
    ),
    "flow_cancel_ack": Case(
        "ff_ack_cancel", half_cancelled, lambda b, n: b.flows.ack_cancel_member(FLOW, n["a"])
    ),
    "flow_drain": Case(
        "ff_drain_cascade",
        left_over,
        lambda b, n: b.flows.drain_cascade(n["a"].partition),
        no_answer,
    ),
    "flow_siblings": Case(
        "ff_sibling_group",
        left_over,
        lambda b, n: b.flows.drain_sibling_cancel_group(FLOW, n["c"]),
        no_answer,
    ),
    "flow_resolve": Case(
        "ff_cascade_ended",
        left_over,
        lambda b, n: b.flows.cascade_completion(n["a"]),
        no_answer,
    ),
    "flow_audit_dependencies": Case(
        "ff_audit_deps",
        lost_marker,
        lambda b, n: b.upkeep.audit_dependencies(n["a"].tag, [(n["d"], "0")]),
        no_answer,
    ),
    "flow_replay": Case("ff_replay_flow", an_ended_flow, lambda b, _: b.flows.replay_flow(FLOW)),
    "flow_delete": Case("ff_delete_flow", an_ended_flow, lambda b, _: b.flows.delete_flow(FLOW)),
    "flow_audit": Case(
        "ff_audit_flow",
        drifted,
        lambda b, _: b.flows.project_flow_summary(FLOW),
        no_answer,
    ),
    "flow_list": Case("ff_list_flows", a_flow, lambda b, _: b.flows.list_flows()),
}
