"""Listings over damaged indexes and registries: typed errors, and no victim that is not damaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowfabric.core.errors import CorruptionError
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.engine import LANE, TTL, Engine
from tests.support.suspension import Waits

pytestmark = pytest.mark.corrupts

MALFORMED = [b"\xff\xfe", b"not-an-id", b"{fp:86}:\xff", b""]


@pytest.mark.parametrize("bad", MALFORMED)
async def test_a_malformed_member_is_left_out(engine: Engine, bad: bytes) -> None:
    execution_id, other = await engine.create(), await engine.create()
    backend, both = engine.backend, sorted([execution_id, other])
    listed = keys.index(execution_id.tag, "all_executions")
    await backend.transport.call("ZADD", listed, 0, bad)
    for partition in (None, execution_id.partition):
        for limit in (1, 2, 50):
            rows: list[str] = []
            cursor: str | None = ""
            damaged: set[str] = set()
            while cursor is not None:
                page = await backend.listings.list_executions(
                    partition=partition, cursor=cursor, limit=limit
                )
                rows += [row.execution_id for row in page.executions]
                damaged |= set(page.damaged)
                cursor = page.next_cursor
            assert rows == both
            (problem,) = damaged
            assert problem.startswith("list_executions: member: ")
            assert problem.isprintable()
    await backend.transport.call("ZREM", listed, bad)
    await backend.transport.call("ZADD", keys.eligible(execution_id.tag, LANE), 1, bad)
    page = await backend.listings.list_lane(LANE, "eligible", partition=execution_id.partition)
    assert sorted(row.execution_id for row in page.executions) == both
    assert len(page.damaged) == 1
    found = await backend.claims.scan_eligible_executions(LANE, execution_id.tag, 3)
    assert sorted(found) == both


async def test_a_page_of_malformed_members(engine: Engine) -> None:
    """More than one look into the index finds nothing but damage."""
    execution_id = await engine.create()
    listed = keys.index(execution_id.tag, "all_executions")
    scores = [part for n in range(450) for part in (0, b"\xfe%d" % n)]
    early = [part for n in range(450) for part in (0, b"{fp:%d" % n)]
    await engine.backend.transport.call("ZADD", listed, *scores, *early)
    for limit in (1, 50):
        page = await engine.backend.listings.list_executions(limit=limit)
        assert [row.execution_id for row in page.executions] == [execution_id]
        assert page.next_cursor is None
        assert len(page.damaged) == 900


@pytest.mark.parametrize("bad", MALFORMED)
async def test_a_malformed_lease_is_left_out(engine: Engine, bad: bytes) -> None:
    held = (await engine.running()).execution_id
    await engine.advance(TTL)
    call, name = engine.backend.transport.call, keys.lane(held.tag, LANE, "active")
    await call("ZADD", name, "-inf", bad)
    page = await engine.backend.leases.list_expired_leases()
    assert [lease.execution_id for lease in page.entries] == [held]
    assert len(page.damaged) == 1
    await call("ZREM", name, bad)
    assert (await engine.backend.leases.list_expired_leases()).damaged == ()


async def test_a_malformed_signature_hides_nothing(engine: Engine) -> None:
    execution_id = await engine.create()
    sigs = keys.lane(execution_id.tag, LANE, "sigs")
    await engine.backend.transport.call("SADD", sigs, b"\xff")
    page = await engine.backend.listings.list_lane(
        LANE, "eligible", partition=execution_id.partition
    )
    assert [row.execution_id for row in page.executions] == [execution_id]


async def test_what_is_malformed_has_no_short_form(engine: Engine) -> None:
    execution_id = await engine.create()
    short = execution_id.uuid[:8]
    listed = keys.index(execution_id.tag, "all_executions")
    bad = f"{execution_id.tag}:{short}".encode()
    await engine.backend.transport.call("ZADD", listed, 0, bad + b"0\xff", 0, bad)
    assert await engine.backend.listings.find_executions(short) == [execution_id]


async def test_malformed_registries_hide_nothing(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = (await waits.park()).handle.execution_id
    held = (await engine.running()).execution_id
    await engine.advance(TTL)
    backend, call = engine.backend, engine.backend.transport.call
    await call("SADD", keys.LANES, b"bad\x01lane", b"\xff")
    await call("SADD", keys.PARTITIONS, b"zz", b"\xff", b"-3")
    assert [row.execution_id for row in (await backend.suspensions.list_suspended()).entries] == [
        parked
    ]
    assert len((await backend.listings.list_executions()).executions) == 2
    leases = await backend.leases.list_expired_leases()
    assert [lease.execution_id for lease in leases.entries] == [held]
    assert await backend.listings.find_executions(held.uuid[:8]) == [held]
    assert await backend.lanes.list_lanes() == ([LANE], None)


async def test_an_answer_about_damage_spoils_no_other(engine: Engine) -> None:
    due = await engine.now() + 60_000
    healthy, broken = [await engine.create(delay_until=due) for _ in range(2)]
    core = keys.core(broken.tag, broken)
    await engine.backend.transport.call("HSET", core, "state", b"\xff")
    await engine.advance(60_010)
    verdicts = await engine.backend.upkeep.promote_delayed(healthy.tag, LANE, [broken, healthy])
    assert verdicts == [f"error:{broken}: state: '\\xff' is not a state code", "promoted"]


async def test_what_is_damaged_is_quoted_printably(engine: Engine) -> None:
    execution_id = await engine.create()
    core = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HSET", core, "state", b"\xff")
    with pytest.raises(CorruptionError) as caught:
        await engine.backend.executions.cancel_execution(execution_id)
    assert "state: '\\xff' is not a state code" in caught.value.detail


@pytest.mark.parametrize("name", [keys.waitpoint, lua_keys.waitpoint_signals])
async def test_a_waitpoint_of_the_wrong_type_is_left_out_and_named(
    engine: Engine, caplog: pytest.LogCaptureFixture, name: Callable[[str, str], str]
) -> None:
    await Waits.open(engine)
    handle, waitpoints = await engine.running(), engine.backend.waitpoints
    bad, good = [await waitpoints.create_waitpoint(handle, key, 10**6) for key in ("bad", "k")]
    broken = name(handle.execution_id.tag, bad.waitpoint_id)
    await engine.backend.transport.call("DEL", broken)
    await engine.backend.transport.call("SET", broken, "text")
    found = await waitpoints.read_waits(handle.execution_id, "k")
    assert [wait.waitpoint_id for wait in found] == [good.waitpoint_id]
    assert f"{handle.execution_id}: waitpoint {bad.waitpoint_id}: has a key of the" in caplog.text
