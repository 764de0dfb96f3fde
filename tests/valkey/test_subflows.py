"""Subflows under faults: damaged parents, little room per call, messages that arrive twice."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.flows import without_followups
from tests.support.scanning import idle
from tests.support.subflows import NEVER_CLAIMED, child, drained, parent


async def units(engine: Engine, count: int) -> None:
    await engine.backend.calls.fcall("ff_test_units", "{fp:0}", (count,), op="test")


async def outbox(engine: Engine, tag: str) -> dict[bytes, bytes]:
    found: Any = await engine.backend.transport.call("HGETALL", keys.index(tag, "subflow_outbox"))
    return found


async def test_a_damaged_parent_does_not_keep_the_last_member_from_ending(engine: Engine) -> None:
    flow = await parent(engine, "s>z")
    sub = await child(flow, "x")
    await flow.claim()
    core = keys.core(flow.tag, flow.nodes["s"])
    call = engine.backend.transport.call
    await call("HSET", core, "priority", "high")
    await flow.end("x", result=b"kept")
    assert await flow.state("x") == "completed"
    assert (await sub.snapshot()).finished_at is not None
    await call("HDEL", core, "priority")
    await engine.backend.flows.drain_cascade(flow.nodes["s"].partition)
    assert await flow.state("s") == "completed"
    assert await engine.backend.reads.get_execution_result(flow.nodes["s"]) == b"kept"
    assert await flow.state("z") == "waiting"


@pytest.mark.parametrize("count", [1, 2, 7])
async def test_little_room_per_call_changes_no_end(engine: Engine, count: int) -> None:
    await units(engine, count)
    try:
        flow = await parent(engine, "a>s s>y s>z")
        await child(flow, "u>v u>w")
        await flow.end("a")
        await drained(engine, flow)
        for key in "uvw":
            await flow.end(key)
            await drained(engine, flow)
        assert await flow.state("s") == "completed"
        await flow.end("y")
        await engine.backend.flows.cancel_flow(flow.flow_id, grace_ms=0)
        await drained(engine, flow)
        assert (await flow.state("z")).value == "cancelled"

        flow = await parent(engine, "s z")
        sub = await child(flow, "u>v u>w")
        await drained(engine, flow)
        await engine.backend.flows.cancel_flow(flow.flow_id, "why", grace_ms=0)
        await drained(engine, flow)
        assert set((await flow.states()).values()) == {"cancelled"}
        assert (await sub.snapshot()).members == {"cancelled": 3}
    finally:
        await units(engine, 128)


async def test_messages_that_arrive_twice_change_nothing(engine: Engine) -> None:
    flow = await parent(engine)
    sub = await child(flow, "x", spread=True)
    call = engine.backend.transport.call
    seen: dict[str, dict[bytes, bytes]] = {flow.tag: {}, sub.tag: {}}

    async def twice() -> None:
        for tag, known in seen.items():
            known.update(await outbox(engine, tag))
        await drained(engine, flow, sub)
        before = (await flow.states(), await sub.states())
        for tag, known in seen.items():
            for name, message in known.items():
                await call("HSET", keys.index(tag, "subflow_outbox"), name, message)
        await drained(engine, flow, sub)
        assert (await flow.states(), await sub.states()) == before
        assert not await outbox(engine, flow.tag)
        assert not await outbox(engine, sub.tag)

    await twice()
    await flow.end("a")
    await twice()
    await sub.end("x")
    await twice()
    assert (await flow.state("s")).value == "completed"
    assert {name[:1] for known in seen.values() for name in known} <= {b"h", b"s", b"f"}


async def test_a_message_that_cannot_be_delivered_is_set_aside(engine: Engine) -> None:
    """After five retries an operator is told; when the damage is repaired, it can be sent again."""
    flow = await parent(engine, "s t", "s")
    sub = await child(flow, "x", spread=True)
    await drained(engine, flow, sub)
    backend = engine.backend
    partition = next(iter(sub.nodes.values())).partition
    core = keys.core(flow.tag, flow.nodes["s"])
    await backend.transport.call("HSET", core, "priority", "high")
    await sub.end("x", result=b"1")
    await backend.drains.aclose()
    while await outbox(engine, sub.tag):
        assert not await backend.upkeep.parked_units(sub.tag)
        await backend.flows.drain_cascade(partition)
    ((unit, why),) = (await backend.upkeep.parked_units(sub.tag)).items()
    assert unit == f"m|{sub.flow_id}|f"
    assert "priority" in why
    await backend.transport.call("HDEL", core, "priority")
    await drained(engine, flow, sub)
    assert (await flow.state("s")).value == "waiting_children"
    await backend.flows.drain_cascade(partition, parked=True)
    assert (await flow.state("s")).value == "completed"
    assert await backend.reads.get_execution_result(flow.nodes["s"]) == b"1"
    assert not await backend.upkeep.parked_units(sub.tag)
    assert not await outbox(engine, sub.tag)


async def test_a_partition_that_is_away_costs_no_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = await parent(engine, "s t", "s")
    sub = await child(flow, "x", spread=True)
    await drained(engine, flow, sub)
    await engine.backend.drains.aclose()
    await sub.end("x", result=b"1")
    partition = next(iter(sub.nodes.values())).partition
    fcall = engine.backend.calls.fcall

    async def away(function: str, tag: str, *args: Any, **options: Any) -> Any:
        if tag == flow.tag:
            raise TransportError("transport", "away")
        return await fcall(function, tag, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.calls, "fcall", away)
        for _ in range(10):
            await engine.backend.flows.drain_cascade(partition)
    assert await outbox(engine, sub.tag)
    await drained(engine, flow, sub)
    assert (await flow.state("s")).value == "completed"


@pytest.mark.parametrize("spread", [False, True])
async def test_a_deleted_flow_takes_its_subflows_with_it(engine: Engine, spread: bool) -> None:
    flow = await parent(engine, "a>s")
    sub = await child(flow, "x>y", spread=spread)
    await flow.end("a")
    await drained(engine, flow, sub)
    for key in "xy":
        await sub.end(key)
    await drained(engine, flow, sub)
    await engine.backend.flows.delete_flow(flow.flow_id)
    await drained(engine, flow, sub)
    await idle(engine).scan_once("flow_projector")
    assert await engine.backend.flows.describe_flow(sub.flow_id) is None
    assert (await engine.backend.listings.list_executions()).executions == ()


async def test_a_subflow_without_a_cancellation_ends_with_its_deleted_parent(
    engine: Engine,
) -> None:
    """The message that should have cancelled it was lost."""
    flow = await parent(engine, "s", "s")
    sub = await child(flow, "x>y", spread=True)
    await drained(engine, flow, sub)
    await engine.backend.drains.aclose()
    await engine.backend.executions.cancel_execution(flow.nodes["s"])
    await engine.backend.transport.call("DEL", keys.index(flow.tag, "subflow_outbox"))
    await engine.backend.flows.delete_flow(flow.flow_id)
    await drained(engine, flow, sub)
    assert await sub.states() == {"x": "cancelled", "y": "cancelled"}
    await idle(engine).scan_once("flow_projector")
    assert await engine.backend.flows.describe_flow(sub.flow_id) is None


async def test_an_end_that_arrives_after_the_replay_changes_nothing(engine: Engine) -> None:
    await without_followups(engine)
    flow = await parent(engine, "s")
    sub = await child(flow, "x", spread=True)
    await drained(engine, flow, sub)
    executions, flows = engine.backend.executions, engine.backend.flows
    await executions.cancel_execution(flow.nodes["s"])
    await flows.drain_cascade(flow.nodes["s"].partition)
    assert await sub.state("x") == "cancelled"
    await executions.replay_execution(flow.nodes["s"])
    await flows.drain_cascade(sub.nodes["x"].partition)
    assert await flow.state("s") == NEVER_CLAIMED
    await drained(engine, flow, sub)
    await sub.end("x")
    await drained(engine, flow, sub)
    assert await flow.state("s") == "completed"


async def test_a_subflow_whose_cancellation_never_arrived_continues(engine: Engine) -> None:
    await without_followups(engine)
    flow = await parent(engine, "s")
    sub = await child(flow, "x", spread=True)
    await drained(engine, flow, sub)
    await sub.claim()
    executions = engine.backend.executions
    await executions.cancel_execution(flow.nodes["s"])
    await executions.replay_execution(flow.nodes["s"])
    await drained(engine, flow, sub)
    assert await sub.state("x") == "active"
    await executions.cancel_execution(flow.nodes["s"])
    await executions.replay_execution(flow.nodes["s"])
    await executions.cancel_execution(flow.nodes["s"])
    await drained(engine, flow, sub)
    assert (await flow.states(), await sub.states()) == ({"s": "cancelled"}, {"x": "cancelled"})
