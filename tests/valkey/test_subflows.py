"""Subflows under faults: damaged parents, little room per call, messages that arrive twice."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.subflows import child, drained, parent


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


async def test_a_message_that_cannot_be_delivered_stays(engine: Engine) -> None:
    flow = await parent(engine, "s t", "s")
    sub = await child(flow, "x", spread=True)
    await drained(engine, flow, sub)
    core = keys.core(flow.tag, flow.nodes["s"])
    call = engine.backend.transport.call
    await call("HSET", core, "priority", "high")
    await sub.end("x", result=b"1")
    for _ in range(3):
        await drained(engine, flow, sub)
        assert await outbox(engine, sub.tag)
    await call("HDEL", core, "priority")
    await drained(engine, flow, sub)
    assert (await flow.state("s")).value == "completed"
    assert not await outbox(engine, sub.tag)
