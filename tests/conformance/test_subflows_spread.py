"""A subflow in another partition and its parent learn of each other by messages."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine, refused
from tests.support.flows import TestFlow, graph
from tests.support.subflows import child, drained, parent


async def test_a_spread_subflow_starts_and_ends_by_messages(engine: Engine) -> None:
    flow = await parent(engine)
    sub = await child(flow, "x>y", spread=True)
    assert sub.tag != flow.tag
    await drained(engine, flow, sub)
    assert await sub.claim() == []
    await flow.end("a")
    await drained(engine, flow, sub)
    await sub.end("x")
    await sub.end("y", result=b"\xff\n far away")
    await drained(engine, flow, sub)
    assert await flow.state("s") == "completed"
    assert await flow.claim() == ["z"]
    assert flow.claims["z"].inputs.inputs["before"].result == b"\xff\n far away"


async def test_a_spread_subflow_of_a_parent_that_waits_runs_at_once(engine: Engine) -> None:
    flow = await parent(engine, "s")
    sub = await child(flow, "x", spread=True)
    await drained(engine, flow, sub)
    await sub.end("x", "failed")
    await drained(engine, flow, sub)
    assert await flow.state("s") == "failed"
    await engine.backend.executions.replay_execution(flow.nodes["s"])
    await drained(engine, flow, sub)
    sub.claims.clear()
    await sub.end("x")
    await drained(engine, flow, sub)
    assert await flow.state("s") == "completed"


@pytest.mark.parametrize("policy", ["cancel_all", "cancel_pending"])
async def test_cancelling_the_parent_flow_reaches_another_partition(
    engine: Engine, policy: str
) -> None:
    flow = await parent(engine, "s")
    sub = await child(flow, "x>y", spread=True)
    await drained(engine, flow, sub)
    await sub.claim()
    await engine.backend.flows.cancel_flow(flow.flow_id, "why", cancellation_policy=policy)
    await drained(engine, flow, sub)
    assert (await sub.snapshot()).cancel_reason == "why"
    if policy == "cancel_pending":
        assert await sub.states() == {"x": "active", "y": "cancelled"}
        await sub.end("x")
        await drained(engine, flow, sub)
    else:
        assert await sub.states() == {"x": "cancelled", "y": "cancelled"}
    assert await flow.state("s") == "cancelled"


async def test_a_spread_subflow_whose_parent_has_ended_is_cancelled(engine: Engine) -> None:
    flow = await parent(engine, "a>s")
    sub = await child(flow, "x", spread=True)
    await engine.backend.executions.cancel_execution(flow.nodes["s"])
    await drained(engine, flow, sub)
    assert await sub.states() == {"x": "cancelled"}


async def test_of_two_spread_subflows_the_parent_owns_one(engine: Engine) -> None:
    flow = await parent(engine, "s")
    first = await child(flow, "x", spread=True)
    await drained(engine, flow, first)
    elsewhere = next(
        each for each in iter(new_uuid, "") if TestFlow.tag_of(engine, each) != flow.tag
    )
    await refused(
        engine.backend.flows.submit_flow(
            graph("y", flow_id=elsewhere), parent_execution_id=flow.nodes["s"], spread=True
        ),
        "flow_submission_conflict",
    )
    await first.end("x")
    await drained(engine, flow, first)
    assert await flow.state("s") == "completed"
