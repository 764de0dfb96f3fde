"""Leases whose time is over, live or already offered for reclaim (03 D7, 04 §9)."""

from __future__ import annotations

import pytest

from flowfabric.engine.valkey import keys
from tests.conformance.test_reads_expired_leases import leased, listed
from tests.support.engine import LANE, Engine


@pytest.mark.corrupts
async def test_an_entry_without_a_lease_is_dropped(engine: Engine) -> None:
    waiting = await engine.create()
    gone = engine.new_id()
    key = keys.lane(waiting.tag, LANE, "active")
    await engine.backend.transport.call("ZADD", key, 5, waiting, 6, gone, key=key)
    assert await listed(engine) == []


async def test_leases_of_one_moment_are_paged_by_id(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    handles = [await leased(engine, "alpha", 1000) for _ in range(5)]
    moment = await engine.now() + 1000
    ids = sorted(handle.execution_id for handle in handles)
    first = await engine.backend.leases.list_expired_leases(moment, limit=2)
    assert first.cursor == (moment, ids[1])
    rest = await listed(engine, moment, after=first.cursor)
    assert [entry.execution_id for entry in rest] == ids[2:]
