"""Scenarios of flows that only a removed guard would spoil."""

from __future__ import annotations

from flowfabric.core.contracts.flows import Quorum
from flowfabric.engine.api.executions import Completion
from tests.conformance import test_flow_upkeep
from tests.support.engine import Engine, refused
from tests.support.flows import set_units, submitted


async def finishes_once(engine: Engine) -> None:
    """A member that is deleted later does not finish the flow again."""
    flow = await submitted(engine, "a b")
    await flow.end("a")
    await flow.end("b")
    finished = (await flow.snapshot()).finished_at
    await engine.advance(2 * test_flow_upkeep.DAY)
    await test_flow_upkeep.trim(engine, flow, "a")
    assert (await flow.snapshot()).finished_at == finished


async def staged_edges_count_nothing(engine: Engine) -> None:
    """The end of an upstream decides no edge that nobody applied."""
    flow = await submitted(engine, "a b")
    await engine.backend.flows.stage_dependency_edge(flow.flow_id, flow.nodes["a"], flow.nodes["b"])
    await flow.end("a", "failed")
    (edge,) = await engine.backend.flows.list_incoming_edges(flow.nodes["b"])
    await refused(
        engine.backend.flows.resolve_dependency(flow.flow_id, edge.edge_id, "failed"),
        "invalid_dependency",
    )
    assert (await flow.snapshot()).edge_groups == ()


async def goes_on_after_completing_and_claiming(engine: Engine) -> None:
    await set_units(engine, 1)
    flow = await submitted(engine, "a>b a>c")
    await flow.claim()
    items = [Completion(flow.claims["a"].handle)]
    await engine.backend.claims.complete_and_claim(flow.tag, items, engine.want(), 1)
    assert flow.tag in engine.backend.drains._tasks
    await set_units(engine)


async def counts_an_edge_once(engine: Engine) -> None:
    flow = await submitted(engine, "a>z b>z", {"z": Quorum(2, "let_run")})
    await flow.end("a")
    await engine.backend.executions.replay_execution(flow.nodes["a"])
    flow.claims.clear()
    await flow.end("a")
    assert await flow.state("z") == "waiting_children"
