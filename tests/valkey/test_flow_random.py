"""Random graphs end as a small model says, however little each call may do."""

from __future__ import annotations

import random

import pytest

from flowfabric.core.contracts.flows import (
    AnyOf,
    FlowGraph,
    GraphEdge,
    GraphNode,
    JoinAll,
    JoinPolicy,
    Quorum,
    Submitted,
)
from flowfabric.core.ids import new_uuid
from tests.model.flow_model import ENDED, Edge, FlowModel
from tests.support.engine import Engine
from tests.support.flows import TestFlow
from tests.support.sdk import seeded


def model_of(graph: FlowGraph) -> FlowModel:
    """The graph by its rules, without storage; upstreams come before their children."""
    model = FlowModel()
    for node in graph.nodes:
        edges = (
            Edge(f"{edge.frm} {edge.to}", edge.frm, edge.to, edge.kind)
            for edge in graph.edges
            if edge.to == node.key
        )
        model.add(node.key, node.join, edges)
    return model


def random_graph(rng: random.Random) -> FlowGraph:
    size = rng.randint(2, 14)
    keys = [f"n{i}" for i in range(size)]
    edges = [
        GraphEdge(
            frm=a, to=b, kind=rng.choice(("success_only",) * 4 + ("terminal", "failure_only"))
        )
        for j, b in enumerate(keys)
        for a in keys[:j]
        if rng.random() < 0.3
    ]
    inbound = {key: sum(1 for edge in edges if edge.to == key) for key in keys}

    def join(key: str) -> JoinPolicy:
        if not inbound[key]:
            return JoinAll()
        k = rng.randint(1, inbound[key])
        return rng.choice((JoinAll(), JoinAll(), AnyOf("let_run"), Quorum(k, "let_run")))

    nodes = tuple(GraphNode(key=key, execution_kind="job", join=join(key)) for key in keys)
    return FlowGraph(flow_id=new_uuid(), flow_kind="random", nodes=nodes, edges=tuple(edges))


@pytest.mark.parametrize("units", [1, 2, 3, 7, 128])
async def test_random_graphs(engine: Engine, units: int) -> None:
    rng = seeded("random graphs")
    await engine.backend.calls.fcall("ff_test_units", "{fp:0}", (units,), op="test")
    for _ in range(25):
        graph = random_graph(rng)
        model = model_of(graph)
        outcome = await engine.backend.flows.submit_flow(graph)
        assert isinstance(outcome, Submitted)
        flow = TestFlow(engine, outcome)
        partition = flow.nodes["n0"].partition

        async def drain(flow: TestFlow = flow, partition: int = partition) -> None:
            for _ in range(10_000):
                if not (await engine.backend.flows.drain_cascade(partition)).pending:
                    return
            raise AssertionError("the backlog never empties")

        await drain()
        while left := [key for key, state in model.states.items() if state not in ENDED]:
            key = rng.choice(left)
            how = rng.choice(("success", "success", "failed", "cancelled"))
            if model.states[key] == "waiting_children":
                how = "cancelled"
                if rng.random() < 0.8:
                    continue
            await flow.end(key, how)
            model.end(key, {"success": "completed"}.get(how, how))
            await drain()
            states = {k: s.replace("active", "waiting") for k, s in (await flow.states()).items()}
            assert states == model.states
        snapshot = await flow.snapshot()
        assert snapshot.finished_at is not None
        assert snapshot.members == await flow.recount()
    await engine.backend.calls.fcall("ff_test_units", "{fp:0}", (128,), op="test")
