"""One good call of every operation on flows, to be spoiled like the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flowfabric.core.contracts.flows import AnyOf, GraphEdge, GraphNode
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.flows import FlowFilter
from tests.support.engine import Engine
from tests.support.flows import TestFlow, graph, submitted

Given = dict[str, Any]
Call = Callable[[Engine], Awaitable[Given]]

_NODE = GraphNode(key="new", execution_kind="job")


def of_flow(**given: Any) -> Call:
    """A call about a flow of two members."""

    async def make(engine: Engine) -> Given:
        return {"flow_id": (await submitted(engine, "a>b")).flow_id, **given}

    return make


def of_member(name: str) -> Call:
    async def make(engine: Engine) -> Given:
        flow = await submitted(engine, "a>b")
        return {"flow_id": flow.flow_id, name: flow.nodes["b"]}

    return make


def of_nothing(**given: Any) -> Call:
    async def make(_engine: Engine) -> Given:
        return dict(given)

    return make


def of_members(upstream: str, downstream: str, **given: Any) -> Call:
    """A call about two members without an edge."""

    async def make(engine: Engine) -> Given:
        flow = await submitted(engine, "a b")
        known = {upstream: flow.nodes["a"], downstream: flow.nodes["b"]}
        return {"flow_id": flow.flow_id, **known, **given}

    return make


async def _created(_engine: Engine) -> Given:
    return {"flow_id": new_uuid(), "flow_kind": "dag"}


async def _graph(_engine: Engine) -> Given:
    return {"graph": graph("a>b")}


async def _spawning(engine: Engine) -> Given:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    return {"handle": flow.claims["a"].handle, "nodes": [_NODE], "edges": []}


async def _newcomer(engine: Engine) -> Given:
    flow_id = new_uuid()
    execution_id = await engine.create()
    while TestFlow.tag_of(engine, flow_id) != execution_id.tag:
        flow_id = new_uuid()
    await engine.backend.flows.create_flow(flow_id, "dag")
    return {"flow_id": flow_id, "execution_id": execution_id}


async def _staged(engine: Engine) -> Given:
    flow = await submitted(engine, "a b")
    edge_id = new_uuid()
    await engine.backend.flows.stage_dependency_edge(
        flow.flow_id, flow.nodes["a"], flow.nodes["b"], edge_id=edge_id
    )
    return {"flow_id": flow.flow_id, "edge_id": edge_id}


async def _member(engine: Engine) -> Given:
    return {"execution_id": (await submitted(engine, "a>b")).nodes["b"]}


async def _undecided(engine: Engine) -> Given:
    flow = await submitted(engine, "a b")
    return {
        "flow_id": flow.flow_id,
        "downstream_execution_id": flow.nodes["b"],
        "policy": AnyOf("let_run"),
    }


async def _finished(engine: Engine) -> Given:
    flow = await submitted(engine, "a")
    await flow.end("a")
    return {"flow_id": flow.flow_id, "timeout": 1.0}


async def _ended(engine: Engine) -> Given:
    flow = await submitted(engine, "a")
    await flow.end("a")
    return {"flow_id": flow.flow_id}


async def _ended_member(engine: Engine) -> Given:
    flow = await submitted(engine, "a>b")
    await flow.end("a")
    return {"execution_id": flow.nodes["a"]}


async def _resolved(engine: Engine) -> Given:
    flow = await submitted(engine, "a>b")
    await flow.end("a")
    (edge,) = await engine.backend.flows.list_incoming_edges(flow.nodes["b"])
    return {"flow_id": flow.flow_id, "edge_id": edge.edge_id, "upstream_outcome": "success"}


async def _stuck(engine: Engine) -> Given:
    """An execution that waits for children without any."""
    handle = await engine.running()
    await engine.block(handle.execution_id)
    await engine.backend.executions.wait_children(handle)
    await engine.unblock(handle.execution_id)
    return {"execution_id": handle.execution_id}


FLOW_CALLS: Mapping[str, Call] = {
    "create_flow": _created,
    "submit_flow": _graph,
    "extend_flow": of_flow(nodes=[_NODE], edges=[GraphEdge(frm="a", to="new")]),
    "spawn_children": _spawning,
    "release_flow": of_flow(),
    "add_execution_to_flow": _newcomer,
    "stage_dependency_edge": of_members("upstream_execution_id", "downstream_execution_id"),
    "add_dependency": of_members("upstream_execution_id", "downstream_execution_id"),
    "apply_dependency_to_child": _staged,
    "set_edge_group_policy": _undecided,
    "set_flow_tags": of_flow(tags={"app.x": "y"}),
    "cancel_flow": of_flow(),
    "cancel_flow_header": of_flow(),
    "replay_flow": of_flow(),
    "delete_flow": _ended,
    "flow_ids": of_nothing(partition=0),
    "project_flow_summary": of_flow(),
    "resolve_dependency": _resolved,
    "cascade_completion": _ended_member,
    "promote_blocked_to_eligible": _stuck,
    "ack_cancel_member": of_member("execution_id"),
    "drain_sibling_cancel_group": of_member("downstream_execution_id"),
    "reconcile_sibling_cancel_group": of_member("downstream_execution_id"),
    "describe_flow": of_flow(),
    "list_flows": of_nothing(partition=0, where=FlowFilter()),
    "list_members": of_flow(),
    "list_edges": of_flow(),
    "describe_edge": _staged,
    "set_flow_tag": of_flow(key="app.x", value="y"),
    "get_flow_tag": of_flow(key="app.x"),
    "wait_flow": _finished,
    **dict.fromkeys(
        ("list_outgoing_edges", "list_incoming_edges", "evaluate_flow_eligibility"), _member
    ),
    "drain_flow_cancel": of_flow(),
    **dict.fromkeys(("get_inputs", "resolve_execution_flow_id"), _member),
}
