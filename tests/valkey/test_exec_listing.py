"""Listings: pages without gaps or repeats, filters, cursors."""

from __future__ import annotations

import pytest

from flowfabric.engine.api.reads import Filter
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey import listings as listing
from tests.conformance.test_exec_listing import ids, many, walk
from tests.support.engine import LANE, Engine


async def test_a_filtered_page_may_be_short(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_MAX_EXAMINED", 10)
    created = await many(engine, 25)
    wanted = max(created)
    await engine.backend.executions.set_execution_tag(wanted, "app.a", "1")
    pages = await walk(engine, 5, where=Filter(tags={"app.a": "1"}))
    assert pages == [[], [], [wanted]]


@pytest.mark.corrupts
async def test_corrupt_members(engine: Engine) -> None:
    execution_id = await engine.create()
    key = keys.index(execution_id.tag, "all_executions")
    await engine.backend.transport.call("ZADD", key, 0, "rubbish")
    page = await engine.backend.listings.list_executions()
    assert ids(page) == [execution_id]
    assert page.damaged == ("list_executions: member: 'rubbish' is not an execution id",)


@pytest.mark.corrupts
async def test_ids_without_a_record_are_skipped(engine: Engine) -> None:
    execution_id = await engine.create()
    ghost = engine.new_id()
    call = engine.backend.transport.call
    await call("ZADD", keys.index(ghost.tag, "all_executions"), 0, ghost)
    await call("ZADD", keys.eligible(ghost.tag, LANE), 0, ghost)
    assert ids(await engine.backend.listings.list_executions()) == [execution_id]
    page = await engine.backend.listings.list_lane(LANE, "eligible", partition=ghost.partition)
    assert ids(page) == [execution_id]
