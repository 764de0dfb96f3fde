"""Every way into an eligible or reclaimable index rings the lane's doorbell, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, TTL, Engine
from tests.support.executions import BACKOFF, Case, mark, promote


async def rung(engine: Engine, lane: str = LANE) -> list[int]:
    """Partitions that rang since the last look."""
    call = engine.backend.transport.call
    members: Any = await call("ZRANGE", keys.wake(lane), 0, -1)
    await call("DEL", keys.wake(lane))
    return [int(member) for member in members]


async def test_create(engine: Engine) -> None:
    execution_id = await engine.create()
    assert await rung(engine) == [execution_id.partition]
    await engine.create(delay_until=await engine.now() + 60_000)
    assert await rung(engine) == []
    other = await engine.create(lane="a:b")
    assert await rung(engine, "a:b") == [other.partition]
    assert await rung(engine) == []


@pytest.mark.parametrize("state", ["delayed", "retry_delayed", "paused_delayed"])
async def test_promotion(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await rung(engine)
    assert await promote(engine, case.execution_id) == "not_yet_due"
    assert await rung(engine) == []
    await engine.advance(5000)
    assert await promote(engine, case.execution_id) == "promoted"
    assert await rung(engine) == [case.execution_id.partition]


async def test_giving_back(engine: Engine) -> None:
    handle = await engine.running()
    await rung(engine)
    await engine.backend.executions.delay(handle, 1)
    assert await rung(engine) == [handle.execution_id.partition]
    handle = (await engine.claim()).handle
    await rung(engine)
    await engine.backend.executions.delay(handle, await engine.now() + BACKOFF)
    assert await rung(engine) == []


async def test_lost_leases(engine: Engine) -> None:
    handle = await engine.running()
    await rung(engine)
    await engine.advance(TTL)
    await mark(engine, handle.execution_id)
    assert await rung(engine) == [handle.execution_id.partition]
    await engine.claim()
    await rung(engine)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    assert await rung(engine) == [handle.execution_id.partition]


async def test_replay(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    await rung(engine)
    await engine.backend.executions.replay_execution(case.execution_id)
    assert await rung(engine) == [case.execution_id.partition]


async def test_silence(engine: Engine) -> None:
    handle = await engine.running(policy={"retry_policy": {}})
    await rung(engine)
    await engine.backend.executions.progress(handle, 1)
    await engine.backend.executions.fail(handle, "x", "transient")
    await engine.backend.executions.change_priority(handle.execution_id, 5)
    await engine.backend.executions.cancel_execution(handle.execution_id)
    other = await engine.running()
    await rung(engine)
    await engine.block(other.execution_id)
    await engine.backend.executions.wait_children(other)
    assert await rung(engine) == []
