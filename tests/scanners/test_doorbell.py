from __future__ import annotations

import pytest

from flowfabric.core.errors import CorruptionError
from flowfabric.engine.valkey import keys
from tests.support.engine import TTL, Engine
from tests.support.scanning import idle, rings


async def test_a_lost_ring_is_rung_again(engine: Engine) -> None:
    waiting = await engine.create()
    await engine.backend.transport.call("DEL", keys.wake("default"))
    await idle(engine).scan_once("doorbell")
    assert await rings(engine) == [str(waiting.partition).encode()]


async def test_for_work_with_requirements_and_for_reclaims(engine: Engine) -> None:
    await engine.create(
        lane="gpu", policy={"routing_requirements": {"required_capabilities": ["gpu"]}}
    )
    lost = await engine.running()
    await engine.advance(TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        lost.execution_id.tag, [lost.execution_id]
    )
    bells = (keys.bell("gpu", "gpu"), "default")
    await engine.backend.transport.call("DEL", *map(keys.wake, bells))
    await idle(engine).scan_once("doorbell")
    assert [len(await rings(engine, bell)) for bell in bells] == [1, 1]
    assert await rings(engine, "gpu") == []


async def test_for_work_that_waits_for_a_worker_with_its_task(engine: Engine) -> None:
    """Only the bell of the task rings."""
    waiting = await engine.create(execution_kind="new")
    await engine.claim_all(tasks=["old"])
    bell, call = keys.bell("default", "task:new"), engine.backend.transport.call
    await call("DEL", keys.wake("default"), keys.wake(bell))
    await idle(engine).scan_once("doorbell")
    assert await rings(engine, bell) == [str(waiting.partition).encode()]
    assert await rings(engine) == []


async def test_silent_without_claimable_work(engine: Engine) -> None:
    await engine.running()
    await engine.create(delay_until=await engine.now() + 1000)
    await engine.backend.transport.call("DEL", keys.wake("default"))
    await idle(engine).scan_once("doorbell")
    assert await rings(engine) == []
    # Workers that pass a ring on want to know it.
    assert await engine.backend.wakeups.ring_waiting({engine.new_id().tag: ["default"]}) == 0


@pytest.mark.corrupts
async def test_damage_in_one_lane_silences_no_other(engine: Engine) -> None:
    waiting, call = await engine.create(), engine.backend.transport.call
    await call("SET", keys.lane(waiting.tag, "bad", "sigs"), "x")
    await call("DEL", keys.wake("default"))
    with pytest.raises(CorruptionError) as caught:
        await engine.backend.wakeups.ring_waiting({waiting.tag: ["bad", "default"]})
    assert await rings(engine) == [str(waiting.partition).encode()]
    assert "lane bad" in str(caught.value)


async def test_silent_for_a_paused_lane(engine: Engine) -> None:
    await engine.create()
    await engine.backend.lanes.set_lane_state("default", "paused")
    await engine.backend.transport.call("DEL", keys.wake("default"))
    supervisor = idle(engine)
    await supervisor.scan_once("doorbell")
    assert await rings(engine) == []
    await engine.backend.lanes.set_lane_state("default", "active")
    await engine.backend.transport.call("DEL", keys.wake("default"))
    await supervisor.scan_once("doorbell")
    assert len(await rings(engine)) == 1
