"""Lane settings in each partition: versions, crashed fan-outs, new scores (04 S8, S12)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from flowfabric.core.contracts.executions import Created, Duplicate
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.placements import Placements
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.scanners.base import ScanResult
from tests.conformance.test_lane_placement import LANE, create, keyed, moves, spread
from tests.support.engine import Engine
from tests.support.leases import mark
from tests.support.scanning import idle
from tests.support.storage import indexes


async def copy(engine: Engine, tag: str, *args: Any) -> None:
    await engine.backend.calls.fcall("ff_set_lane", tag, args, op="test")


async def stored(engine: Engine, tag: str, name: str, lane: str = "default") -> dict[bytes, bytes]:
    found: Any = await engine.backend.transport.call("HGETALL", keys.lane(tag, lane, name))
    return found


async def test_an_older_copy_replaces_nothing(engine: Engine) -> None:
    """Two operators at once: the slower fan-out of the older change must not win."""
    tag = engine.new_id().tag
    await engine.backend.lanes.set_lane_state("default", "paused")
    await engine.backend.lanes.set_lane_state("default", "draining")
    await copy(engine, tag, "default", "1", "1", "state", "paused")
    assert (await stored(engine, tag, "config"))[b"state"] == b"draining"
    await copy(engine, tag, "default", "2", "1", "state", "draining")
    assert (await stored(engine, tag, "config"))[b"state"] == b"draining"


async def test_a_lane_with_default_settings_costs_claims_nothing(engine: Engine) -> None:
    tag = engine.new_id().tag
    await engine.backend.lanes.set_lane_state("default", "paused", "why")
    assert (await stored(engine, tag, "config"))[b"reason"] == b"why"
    await engine.backend.lanes.set_lane_state("default", "active")
    assert await stored(engine, tag, "config") == {}
    await engine.backend.lanes.set_lane_config("default", placement="spread", shards=4)
    assert await stored(engine, tag, "config") == {}
    assert (await stored(engine, tag, "placed"))[b"spread_over"] == b"4"


async def test_a_submitter_tells_a_partition_that_missed_the_change(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that changed the placement died before it reached the partition."""
    key = moves(engine, 1, 8)
    first = await create(engine, keyed(engine, key, 1))
    calls = engine.backend.calls
    fcall = calls.fcall

    async def dies(function: str, *args: Any, **options: Any) -> Any:
        if function == "ff_set_lane":
            raise TransportError("transport", "gone")
        return await fcall(function, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "fcall", dies)
        with pytest.raises(TransportError):
            await spread(engine, 8)
    await cast("ValkeyPlaces", engine.backend.places).read_placements([LANE])
    home, now = first.execution_id.tag, keyed(engine, key, 8)
    assert await create(engine, now) == Duplicate(first.execution_id)
    other = next(
        k
        for k in (f"new-{n}" for n in range(1000))
        if keyed(engine, k, 8).execution_id.tag not in (home, now.execution_id.tag)
    )
    fresh = keyed(engine, other, 8)
    created = await create(engine, fresh)
    assert created == Created(fresh.execution_id, created.public_state)
    # Who still believes in one partition finds it, because the old one was sealed by the search.
    assert await create(engine, keyed(engine, other, 1)) == Duplicate(fresh.execution_id)
    # Running it again converges.
    await spread(engine, 8)
    assert (await stored(engine, home, "placed", LANE))[b"spread_over"] == b"8"


async def test_a_search_seals_the_old_partition(engine: Engine) -> None:
    """Even if the change itself never reaches it."""
    key = moves(engine, 1, 8)
    home = keyed(engine, key, 1).execution_id.tag
    await spread(engine, 8)
    await engine.backend.transport.call("DEL", keys.lane(home, LANE, "placed"))
    created = await create(engine, keyed(engine, key, 8))
    assert isinstance(created, Created)
    assert await create(engine, keyed(engine, key, 1)) == Duplicate(created.execution_id)


async def test_only_the_last_placements_are_remembered(engine: Engine) -> None:
    for shards in range(2, 14):
        await spread(engine, shards)
    key = f"ff:idx:{keys.LANES_TAG}:placements"
    placement: Any = await engine.backend.transport.call("HGET", key, LANE)
    version, now, *earlier = placement.decode().split()
    assert (version, now) == ("12", "13")
    assert [each.split(":")[0] for each in earlier] == [str(n) for n in range(12, 4, -1)]


async def test_other_settings_leave_the_placements_alone(engine: Engine) -> None:
    key = f"ff:idx:{keys.LANES_TAG}:placements"
    await engine.backend.lanes.set_lane_state(LANE, "paused")
    assert not await engine.backend.transport.call("EXISTS", key)
    await spread(engine, 8)
    for weight in range(1, 10):
        await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=weight)
    placement: Any = await engine.backend.transport.call("HGET", key, LANE)
    version, now, *earlier = placement.decode().split()
    assert (version, now) == ("11", "8")
    assert [each.split(":")[0] for each in earlier] == ["1"]


async def test_a_key_is_not_sought_after_its_window(engine: Engine) -> None:
    now, new = await engine.now(), keyed(engine, moves(engine, 1, 8), 8)
    known = Placements(engine.backend.counts)
    day = 86_400_000
    for ago, tags in ((day - 60_000, 1), (day + 60_000, 0)):
        known.learn([LANE], now, [LANE.encode(), f"2 8 1:{now - ago}".encode()])
        assert len(known.earlier_tags(new)) == tags


# --- new scores ----------------------------------------------------------------------


async def order(engine: Engine) -> list[ExecutionId]:
    tag = engine.new_id().tag
    return await engine.backend.claims.scan_eligible_executions("default", tag, 1000)


GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


async def test_another_weight_changes_the_order_of_what_waits(engine: Engine) -> None:
    start = await engine.now()
    await engine.freeze(start)
    old = [await engine.create(), await engine.create(policy=GPU)]
    handle = await engine.running(priority=3)
    await engine.freeze(start + 10 * 60_000)
    await mark(engine, [handle.execution_id])
    urgent = [await engine.create(priority=5), await engine.create(priority=5, policy=GPU)]
    assert set((await order(engine))[:2]) == set(urgent)
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=60_000)
    scanner = idle(engine)
    assert await scanner.scan_once("lane_rescore") == ScanResult(processed=8)
    assert set((await order(engine))[:2]) == set(old)
    lost = (await indexes(engine, handle.execution_id))["lane:default:reclaimable"]
    assert lost == start - 3 * 60_000
    assert await scanner.scan_once("lane_rescore") == ScanResult()
    # What is created, and scored, from now on agrees.
    await engine.freeze(start + 6 * 60_000)
    late = await engine.create(priority=5)
    assert (await order(engine)).index(late) < (await order(engine)).index(urgent[0])


async def test_a_long_lane_is_scored_in_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.valkey.upkeep._RESCORED", 50)
    ids = [await engine.create(priority=n % 7) for n in range(300)]
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=1)
    tag, steps, more = ids[0].tag, 0, True
    while more:
        done, more = await engine.backend.upkeep.rescore(tag)
        assert done < 200
        steps += 1
        # A claim, a new execution and another process's step in between harm nothing.
        if steps == 2:
            await engine.claim_all(5)
            await engine.create(priority=9)
    assert steps > 3
    scores: Any = await engine.backend.transport.call(
        "ZRANGE", keys.eligible(tag, "default"), 0, -1, "WITHSCORES"
    )
    now = await engine.now()
    assert len(scores) == 296
    assert all(now - 600_000 < score < now + 1000 for _, score in scores)
    verdicts = await engine.backend.upkeep.reconcile_execution_index(tag, ids, "check")
    assert set(verdicts) == {"consistent"}


async def test_only_a_new_weight_marks_the_lane(engine: Engine) -> None:
    tag = (await engine.create(priority=1)).tag
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=5)
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert await engine.backend.upkeep.rescore(tag) == (0, False)


@pytest.mark.corrupts
async def test_damage_stops_no_step(engine: Engine) -> None:
    tag, call = engine.new_id().tag, engine.backend.transport.call
    right, broken = await engine.create(priority=2), await engine.create(priority=2)
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=1)
    await call("HSET", keys.core(tag, broken), "created_at", "x")
    await call("ZADD", keys.eligible(tag, "default"), 1, "no-id")
    await call("SET", "ff:odd", "x")
    await call("HSET", keys.index(tag, "rescore"), "ff:odd", "0", "ff:none", "0")
    assert (await engine.backend.upkeep.rescore(tag))[1] is False
    created = int((await engine.backend.reads.read_execution_info(right)).created_at)
    assert (await indexes(engine, right))["lane:default:eligible"] == created - 2
    await call("DEL", "ff:odd")


# --- a full registry ------------------------------------------------------------------


async def test_a_full_registry_refuses_only_lanes_that_it_does_not_know(engine: Engine) -> None:
    await engine.create(lane=LANE)
    known: Any = await engine.backend.transport.call("SCARD", keys.LANES)
    args = (known, "1", LANE, "1", "new", "*", LANE)
    reply = await engine.backend.calls.fcall("ff_register_places", keys.LANES_TAG, args, op="test")
    assert reply[2] == [b"new"]
    assert await engine.backend.transport.call("SISMEMBER", keys.LANES, "new") == 0
