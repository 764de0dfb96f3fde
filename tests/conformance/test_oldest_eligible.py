"""How long the longest-waiting execution of a lane has been claimable."""

from __future__ import annotations

import pytest

from tests.support.engine import LANE, Engine

MINUTE = 60_000


async def age(engine: Engine, lane: str = LANE) -> int:
    """The age that the engine reports, in whole minutes: the clock runs on."""
    return (await engine.backend.listings.oldest_eligible([lane]))[lane] // MINUTE


async def test_a_lane_without_work(engine: Engine) -> None:
    await engine.running()
    await engine.advance(MINUTE)
    listings = engine.backend.listings
    assert await listings.oldest_eligible([LANE, "nowhere"]) == {LANE: 0, "nowhere": 0}
    assert await listings.oldest_eligible([]) == {}


async def test_a_low_priority_starves_behind_many_others(engine: Engine) -> None:
    await engine.create()
    await engine.advance(5 * MINUTE)
    for priority in (9000, 9, 5, 1):
        for _ in range(20):
            await engine.create(priority=priority)
    assert await age(engine) == 5


@pytest.mark.parametrize("starving", [0, 1, 40, 79, 80])
async def test_any_of_many_priorities(engine: Engine, starving: int) -> None:
    await engine.create(priority=starving)
    await engine.advance(MINUTE)
    for priority in range(81):
        await engine.create(priority=priority)
    assert await age(engine) == 1


async def test_what_starves_for_another_namespace_or_capability(engine: Engine) -> None:
    await engine.create(namespace="acme")
    await engine.advance(MINUTE)
    for _ in range(3):
        await engine.create(priority=5)
        await engine.create(priority=5, namespace="acme")
    assert await age(engine) == 1


async def test_what_no_worker_can_take_does_not_count(engine: Engine) -> None:
    await engine.create(policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    await engine.advance(MINUTE)
    assert await age(engine) == 0
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=[LANE], capabilities=["gpu"]
    )
    assert await age(engine) == 1


async def test_waiting_begins_when_an_execution_becomes_claimable(engine: Engine) -> None:
    delayed = [await engine.create(delay_ms=60 * MINUTE) for _ in range(40)]
    await engine.advance(55 * MINUTE)
    await engine.create()
    await engine.advance(6 * MINUTE)
    await engine.backend.upkeep.promote_delayed(delayed[0].tag, LANE, delayed)
    await engine.advance(MINUTE)
    # The delayed ones were created first, and are ahead in line.
    assert await age(engine) == 7


async def test_a_change_of_priority_does_not_restart_it(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.advance(MINUTE)
    await engine.backend.executions.change_priority(execution_id, 7)
    assert await age(engine) == 1


async def test_lanes_whose_priorities_overlap(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=10 * MINUTE)
    await engine.create()
    await engine.advance(25 * MINUTE)
    await engine.create(priority=1)
    await engine.create(priority=9)
    assert await age(engine) == 25


async def test_lanes_whose_priorities_weigh_nothing(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=1)
    await engine.create()
    await engine.advance(MINUTE)
    await engine.create(priority=9)
    assert await age(engine) == 1
