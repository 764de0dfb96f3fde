"""Lanes: registry, states, settings, and what waits in them (04 §1, §3, S8, S9, S12)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import CorruptionError
from flowfabric.engine.valkey import keys
from tests.support.engine import TTL, Engine
from tests.support.leases import mark, running
from tests.support.storage import indexes


async def rings(engine: Engine, lane: str) -> list[bytes]:
    """The partitions whose doorbell rang since the bell was last emptied."""
    rung: Any = await engine.backend.transport.call("ZRANGE", keys.wake(lane), 0, -1)
    await engine.backend.transport.call("DEL", keys.wake(lane))
    return rung


async def test_a_broken_stored_name_hides_no_lane(engine: Engine) -> None:
    await engine.create(lane="good")
    await engine.backend.transport.call("SADD", keys.LANES, b"bad\x01")
    assert await engine.backend.lanes.list_lanes() == (["default", "good"], None)


# --- states --------------------------------------------------------------------------


async def test_states_are_set_for_every_partition_and_say_what_was_before(engine: Engine) -> None:
    backend = engine.backend
    assert await backend.lanes.set_lane_state("lane", "paused", "maintenance") == "active"
    assert await backend.lanes.set_lane_state("lane", "draining") == "paused"
    assert await backend.lanes.set_lane_state("lane", "disabled", "over") == "draining"
    settings = await backend.lanes.get_lane("lane")
    assert (settings.state, settings.reason) == ("disabled", "over")
    copies: Any = await backend.transport.call("KEYS", "ff:idx:*:lane:lane:config")
    assert len(copies) == backend.counts.flow


async def test_a_paused_lane_accepts_and_goes_on_where_it_stood(engine: Engine) -> None:
    running_one = await running(engine)
    await engine.backend.lanes.set_lane_state("default", "paused")
    waiting = await engine.create()
    assert await engine.claim_all() == []
    await engine.backend.leases.renew(running_one)
    await engine.backend.executions.complete(running_one)
    for state in ("active", "draining"):
        await engine.backend.lanes.set_lane_state("default", "paused")
        await rings(engine, "default")
        await engine.backend.lanes.set_lane_state("default", state)
        # Its work may start, and nobody has to poll.
        assert str(waiting.partition).encode() in await rings(engine, "default")
    assert [claim.execution_id for claim in await engine.claim_all()] == [waiting]


@pytest.mark.corrupts
async def test_damaged_settings_are_named(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=1)
    await engine.backend.transport.call(
        "HSET", keys.lane_config(keys.LANES_TAG, "default"), "reclaim_grace_ms", "x"
    )
    with pytest.raises(CorruptionError, match="lane default"):
        await engine.backend.lanes.get_lane("default")


async def test_the_weight_counts_for_lost_work_too(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=1000)
    handle = await running(engine, priority=7)
    await engine.advance(TTL + 1)
    await mark(engine, [handle.execution_id])
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    score = (await indexes(engine, handle.execution_id))["lane:default:reclaimable"]
    assert score == int(info.created_at) - 7000


async def test_an_unreadable_member_hides_no_execution(engine: Engine) -> None:
    execution_id = await engine.create()
    tag, index = execution_id.tag, keys.eligible(execution_id.tag, "default")
    await engine.backend.transport.call("ZADD", index, 1, "not-an-id")
    assert await engine.backend.claims.scan_eligible_executions("default", tag, 10) == [
        execution_id
    ]
    await engine.backend.transport.call("ZREM", index, "not-an-id")


# --- doorbell --------------------------------------------------------------------------


async def test_whatever_makes_work_claimable_rings(engine: Engine) -> None:
    backend = engine.backend
    execution_id = await engine.create()
    tag = execution_id.tag
    here = [str(execution_id.partition).encode()]
    assert await rings(engine, "default") == here
    handle = (await engine.claim()).handle
    assert await rings(engine, "default") == []
    await backend.executions.delay(handle, 1)
    assert await rings(engine, "default") == here
    handle = (await engine.claim()).handle
    await backend.leases.revoke_lease(execution_id)
    assert await rings(engine, "default") == here
    handle = (await engine.claim()).handle
    await engine.advance(TTL + 1)
    await mark(engine, [execution_id])
    assert await rings(engine, "default") == here
    handle = (await engine.claim()).handle
    await backend.executions.delay(handle, await engine.now() + 1000)
    assert await rings(engine, "default") == []
    await engine.advance(1001)
    await backend.upkeep.promote_delayed(tag, "default", [execution_id])
    assert await rings(engine, "default") == here
    handle = (await engine.claim()).handle
    await backend.executions.complete(handle)
    assert await rings(engine, "default") == []
    await backend.executions.replay_execution(execution_id)
    assert await rings(engine, "default") == here


async def test_a_claim_that_leaves_work_rings_for_the_next(engine: Engine) -> None:
    for _ in range(3):
        await engine.create()
    await rings(engine, "default")
    await engine.claim_all(2)
    assert len(await rings(engine, "default")) == 1
    await engine.claim_all(2)
    assert await rings(engine, "default") == []
