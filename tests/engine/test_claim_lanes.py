"""Lanes: registry, states, settings, and what waits in them (04 §1, §3, S8, S9, S12)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.engine.probes import freeze, mark, placed, refused, running, untouched
from tests.support.engine import TTL, Engine

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu"]}}


async def rings(engine: Engine, lane: str) -> list[bytes]:
    """The partitions whose doorbell rang since the bell was last emptied."""
    rung: Any = await engine.backend.transport.call("ZRANGE", keys.wake(lane), 0, -1)
    await engine.backend.transport.call("DEL", keys.wake(lane))
    return rung


# --- registry ------------------------------------------------------------------------


async def test_a_first_submission_registers_its_lane(engine: Engine) -> None:
    assert (await engine.backend.lanes.list_lanes())[0] == ["default"]
    await refused("lane_not_found", engine.backend.lanes.get_lane("new lane"))
    await engine.create(lane="new lane")
    assert (await engine.backend.lanes.list_lanes())[0] == ["default", "new lane"]
    settings = await engine.backend.lanes.get_lane("new lane")
    assert (settings.state, settings.reason) == ("active", "")
    assert (settings.priority_weight_ms, settings.reclaim_grace_ms) == (10**12, 0)
    assert settings.emit_renewals is False


async def test_lanes_are_listed_by_name_in_pages(engine: Engine) -> None:
    for lane in ("b", "a", "c", "d"):
        await engine.backend.lanes.set_lane_state(lane, "active")
    backend = engine.backend
    assert await backend.lanes.list_lanes(limit=2) == (["a", "b"], "b")
    assert await backend.lanes.list_lanes("b", 2) == (["c", "d"], "d")
    assert await backend.lanes.list_lanes("d", 2) == (["default"], None)
    assert await backend.lanes.list_lanes("default", 2) == ([], None)
    assert await backend.lanes.list_lanes(limit=5) == (["a", "b", "c", "d", "default"], None)
    assert await backend.lanes.list_lanes(limit=0) == ([], None)


async def test_a_broken_stored_name_hides_no_lane(engine: Engine) -> None:
    await engine.create(lane="good")
    await engine.backend.transport.call("SADD", keys.LANES, b"bad\x01")
    assert await engine.backend.lanes.list_lanes() == (["default", "good"], None)


@pytest.mark.parametrize("lane", ["", "x" * 65, "tab\t", "ü"])
async def test_lane_names_are_checked_everywhere(engine: Engine, lane: str) -> None:
    backend = engine.backend
    async with untouched(engine):
        await refused("invalid_input", backend.lanes.get_lane(lane))
        await refused("invalid_input", backend.lanes.set_lane_state(lane, "paused"))
        await refused("invalid_input", backend.lanes.set_lane_config(lane, reclaim_grace_ms=1))
        await refused("invalid_input", backend.claims.scan_eligible_executions(lane, "{fp:0}", 1))


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


@pytest.mark.parametrize("state", ["", "Active", "closed"])
async def test_an_unknown_state_is_refused(engine: Engine, state: str) -> None:
    async with untouched(engine):
        await refused("invalid_input", engine.backend.lanes.set_lane_state("default", state))


@pytest.mark.parametrize("state", ["draining", "disabled"])
async def test_a_lane_that_takes_nothing_names_its_state(engine: Engine, state: str) -> None:
    await engine.create()  # so that lane and partition are registered
    await engine.backend.lanes.set_lane_state("default", state)
    async with untouched(engine):
        error = await refused("lane_not_accepting", engine.create())
    assert error.detail == state


async def test_a_paused_lane_accepts_and_goes_on_where_it_stood(engine: Engine) -> None:
    running_one = await running(engine)
    await engine.backend.lanes.set_lane_state("default", "paused")
    waiting = await engine.create()
    assert await engine.claim_all() == []
    await engine.backend.leases.renew(running_one)
    await engine.backend.executions.complete(running_one)
    await rings(engine, "default")
    await engine.backend.lanes.set_lane_state("default", "active")
    # Resuming rings, so that nobody has to poll.
    assert str(waiting.partition).encode() in await rings(engine, "default")
    assert [claim.execution_id for claim in await engine.claim_all()] == [waiting]


# --- settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"priority_weight_ms": 0},
        {"priority_weight_ms": 10**12 + 1},
        {"priority_weight_ms": True},
        {"reclaim_grace_ms": -1},
        {"reclaim_grace_ms": 10**12 + 1},
        {"priority_weight_ms": 1.5},
        {"reclaim_grace_ms": "5"},
        {"emit_renewals": "no"},
    ],
)
async def test_settings_out_of_range_are_refused(engine: Engine, bad: dict[str, Any]) -> None:
    async with untouched(engine):
        await refused("invalid_input", engine.backend.lanes.set_lane_config("default", **bad))


async def test_a_reason_is_text(engine: Engine) -> None:
    number: Any = 5
    async with untouched(engine):
        await refused(
            "invalid_input", engine.backend.lanes.set_lane_state("mails", "paused", number)
        )
    assert (
        await engine.backend.lanes.set_lane_state("mails", "paused", "odd \ud800 one") == "active"
    )
    assert await engine.backend.lanes.set_lane_state("mails", "draining", "x" * 5000) == "paused"
    assert len((await engine.backend.lanes.get_lane("mails")).reason) == 4096


@pytest.mark.corrupts
async def test_damaged_settings_are_named(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=1)
    await engine.backend.transport.call(
        "HSET", keys.lane_config("default"), "reclaim_grace_ms", "x"
    )
    with pytest.raises(CorruptionError, match="lane default"):
        await engine.backend.lanes.get_lane("default")


async def test_settings_are_kept_one_by_one(engine: Engine) -> None:
    backend = engine.backend
    await backend.lanes.set_lane_config("default", priority_weight_ms=60_000)
    await backend.lanes.set_lane_config("default", reclaim_grace_ms=5, emit_renewals=True)
    await backend.lanes.set_lane_state("default", "paused")
    settings = await backend.lanes.get_lane("default")
    assert (settings.priority_weight_ms, settings.reclaim_grace_ms) == (60_000, 5)
    assert (settings.emit_renewals, settings.state) == (True, "paused")


async def test_a_smaller_weight_lets_age_win(engine: Engine) -> None:
    """With a minute a point, five points are worth five minutes of waiting."""
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=60_000)
    start = await engine.now()
    await freeze(engine, start)
    old = await engine.create()
    await freeze(engine, start + 4 * 60_000)
    urgent = await engine.create(priority=5)
    await freeze(engine, start + 6 * 60_000)
    late = await engine.create(priority=5)
    claims = await engine.claim_all()
    assert [claim.execution_id for claim in claims] == [urgent, old, late]


async def test_the_weight_counts_for_lost_work_too(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=1000)
    handle = await running(engine, priority=7)
    await engine.advance(TTL + 1)
    await mark(engine, [handle.execution_id])
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    score = (await placed(engine, handle.execution_id))["lane:default:reclaimable"]
    assert score == int(info.created_at) - 7000


# --- what waits ------------------------------------------------------------------------


async def test_scanning_shows_what_waits_in_order_and_reserves_nothing(engine: Engine) -> None:
    made: list[ExecutionId] = []
    for policy in (None, GPU, None, GPU):
        made.append(await engine.create(policy=policy))
        await engine.advance(2)
    urgent = await engine.create(priority=1)
    await engine.create(delay_until=await engine.now() + 60_000)
    tag, backend = urgent.tag, engine.backend
    async with untouched(engine):
        assert await backend.claims.scan_eligible_executions("default", tag, 10) == [urgent, *made]
        assert await backend.claims.scan_eligible_executions("default", tag, 3) == [
            urgent,
            *made[:2],
        ]
        assert await backend.claims.scan_eligible_executions("default", tag, 0) == []
        assert await backend.claims.scan_eligible_executions("elsewhere", tag, 10) == []


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
