"""update_progress, change_priority and tags."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import PriorityChanged
from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, Engine, refused, unchanged
from tests.support.executions import CODES, RUNNABLE, Case, promote
from tests.support.storage import indexes, raw, record

# --- progress -----------------------------------------------------------------------------------


async def test_progress_writes_only_what_is_given(engine: Engine) -> None:
    handle = await engine.running()
    before = await record(engine, handle.execution_id)
    await engine.advance(5)
    await engine.backend.executions.progress(handle, 10, "ten")
    await engine.backend.executions.progress(handle, pct=20)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.progress_pct, info.progress_message) == (20, "ten")
    await engine.backend.executions.progress(handle, message="still twenty")
    await engine.backend.executions.progress(handle)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.progress_pct, info.progress_message) == (20, "still twenty")
    after = await record(engine, handle.execution_id)
    added = {
        *("progress_pct", "progress_message", "progress_updated_at", "last_mutation_at"),
    }
    assert {**before} == {name: after[name] for name in before}
    assert set(after) - set(before) == added
    assert after["progress_updated_at"] == after["last_mutation_at"]
    assert [event.type for event in await engine.events(handle.execution_id)] == ["acquired"]


async def test_progress_may_go_back_and_be_cleared(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.progress(handle, 100, "all")
    await engine.backend.executions.progress(handle, 0, "")
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.progress_pct, info.progress_message) == (0, None)
    assert "progress_message" not in await record(engine, handle.execution_id)


# --- priority -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "stored"), [(5, 5), (-5, 0), (10_000, 9000), (10**40, 9000)])
async def test_priority_is_clamped_and_rescored(engine: Engine, given: int, stored: int) -> None:
    execution_id = await engine.create(priority=2)
    outcome = await engine.backend.executions.change_priority(execution_id, given)
    assert outcome == PriorityChanged(execution_id, 2, stored)
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.priority == stored
    assert await indexes(engine, execution_id) == {
        f"lane:{LANE}:eligible": int(info.created_at) - stored * 10**12
    }
    (event,) = await engine.events(execution_id)
    assert event.type == "priority_changed"
    assert (event.get("old_priority"), event.get("new_priority")) == (2, stored)


async def test_priority_with_requirements_and_a_lane_weight(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=1000)
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    execution_id = await engine.create(policy=policy)
    await engine.backend.executions.change_priority(execution_id, 4)
    created = int((await engine.backend.reads.read_execution_info(execution_id)).created_at)
    assert await indexes(engine, execution_id) == {f"lane:{LANE}:eligible:gpu": created - 4000}


@pytest.mark.parametrize("state", RUNNABLE)
async def test_priority_of_everything_runnable(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    before = await indexes(engine, case.execution_id)
    await case.backend.executions.change_priority(case.execution_id, 8)
    after = await indexes(engine, case.execution_id)
    assert set(after) == set(before)
    if CODES[state][2] != "e":
        assert after == before


async def test_a_delayed_one_uses_it_when_promoted(engine: Engine) -> None:
    execution_id = await engine.create(delay_until=await engine.now() + 1000)
    await engine.backend.executions.change_priority(execution_id, 6)
    await engine.advance(1000)
    await promote(engine, execution_id)
    created = int((await engine.backend.reads.read_execution_info(execution_id)).created_at)
    assert await indexes(engine, execution_id) == {f"lane:{LANE}:eligible": created - 6 * 10**12}


@pytest.mark.corrupts
async def test_priority_never_creates_an_entry(engine: Engine) -> None:
    execution_id = await engine.create()
    key = keys.eligible(execution_id.tag, LANE)
    await engine.backend.transport.call("ZREM", key, execution_id)
    await engine.backend.executions.change_priority(execution_id, 6)
    assert await indexes(engine, execution_id) == {}


async def test_one_request_changes_the_priority_once(engine: Engine) -> None:
    execution_id = await engine.create(priority=2)
    request = new_uuid()

    async def change() -> Any:
        args = (execution_id, 5, request)
        reply = await engine.backend.calls.fcall(
            "ff_change_priority", execution_id.tag, args, op="change_priority"
        )
        return reply[2:4]

    assert await change() == [2, 5]
    assert await unchanged(engine, change) == [2, 5]
    # Even when a worker took it before the repeat arrived.
    await engine.claim()
    assert await unchanged(engine, change) == [2, 5]
    await refused(
        engine.backend.executions.change_priority(execution_id, 6), "execution_not_eligible"
    )


async def test_tags_are_upserted_in_any_phase(engine: Engine) -> None:
    execution_id = await engine.create(tags={"app.a": "1", "Odd Key": "kept"})
    await engine.claim()
    before = await engine.now()
    await engine.advance(5)
    count = await engine.backend.executions.set_execution_tags(
        execution_id, {"app.a": "2", "app.b": "3"}
    )
    assert count == 2
    tags = {"app.a": "2", "app.b": "3", "Odd Key": "kept"}
    assert await engine.backend.reads.get_execution_tags(execution_id) == tags
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.tags == tags
    assert snapshot.last_mutation_at >= before + 5
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.set_execution_tag(execution_id, "app.c", "4")
    assert await engine.backend.reads.get_execution_tag(execution_id, "app.c") == "4"
    assert not any("." in name for name in await record(engine, execution_id))
    assert [e.type for e in await engine.events(execution_id)] == ["acquired", "completion"]


async def test_tags_set_later_reach_the_claim(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.set_execution_tag(execution_id, "app.a", "1")
    claim = await engine.claim()
    assert claim.tags == {"app.a": "1"}
    assert (await raw(engine, keys.tags(execution_id.tag, execution_id))) == {"app.a": "1"}
