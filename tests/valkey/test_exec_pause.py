"""Delays, waiting for children, and promotion: the same attempt resumes later."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.executions import Delayed, Moved
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from tests.conformance.test_exec_pause import TIMEOUT
from tests.support.engine import LANE, Engine, refused, unchanged
from tests.support.executions import expire_attempt, promote
from tests.support.storage import indexes, record


async def test_delay_until_a_time(engine: Engine) -> None:
    handle = await engine.running()
    until = await engine.now() + 5000
    outcome = await engine.backend.executions.delay(handle, until)
    assert outcome == Delayed(handle.execution_id, PublicState.DELAYED)
    assert await indexes(engine, handle.execution_id) == {f"lane:{LANE}:delayed": until}
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert attempt.attempt_state == "suspended"
    assert attempt.suspension_id == "worker_delay"
    assert attempt.suspended_at is not None
    assert attempt.ended_at is None
    event = (await engine.events(handle.execution_id))[-1]
    assert (event.type, event.get("reason")) == ("released", "worker_delay")
    assert event.get("delay_until") == until
    snapshot = await engine.backend.reads.describe_execution(handle.execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None
    assert snapshot.current_attempt is not None


@pytest.mark.parametrize("offset", [-(10**6), 0])
async def test_delay_that_is_due_gives_the_lease_back(engine: Engine, offset: int) -> None:
    handle = await engine.running()
    now = await engine.now()
    await engine.freeze(now)
    outcome = await engine.backend.executions.delay(handle, now + offset)
    assert outcome == Delayed(handle.execution_id, PublicState.WAITING)
    assert list(await indexes(engine, handle.execution_id)) == [f"lane:{LANE}:eligible"]
    claim = await engine.claim()
    assert claim.handle.kind == "resumed"


async def test_the_unused_attempt_time_is_kept(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    claimed = await engine.now()
    armed = (await indexes(engine, handle.execution_id))["attempt_timeout"]
    assert armed is not None
    await engine.freeze(claimed + 300)
    await engine.backend.executions.delay(handle, 1)
    left = armed - (claimed + 300)
    assert "attempt_timeout" not in await indexes(engine, handle.execution_id)
    fields = await record(engine, handle.execution_id)
    assert float(fields["attempt_timeout_remaining_ms"]) == left
    await engine.freeze(claimed + 900_000)
    handle = (await engine.claim()).handle
    held = await indexes(engine, handle.execution_id)
    assert held["attempt_timeout"] == claimed + 900_000 + left
    assert "attempt_timeout_remaining_ms" not in await record(engine, handle.execution_id)
    # A second pause counts on from there.
    await engine.freeze(claimed + 900_100)
    await engine.backend.executions.delay(handle, 1)
    fields = await record(engine, handle.execution_id)
    assert float(fields["attempt_timeout_remaining_ms"]) == left - 100


async def test_an_overdue_timer_keeps_one_millisecond(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    await engine.advance(5000)
    await engine.backend.executions.delay(handle, 1)
    assert (await record(engine, handle.execution_id))["attempt_timeout_remaining_ms"] == "1"
    now = await engine.now()
    await engine.freeze(now)
    await engine.claim()
    assert (await indexes(engine, handle.execution_id))["attempt_timeout"] == now + 1
    await engine.freeze(now + 1)
    assert await expire_attempt(engine, handle.execution_id) == "expired"


async def test_the_deadline_stays_armed(engine: Engine) -> None:
    deadline = await engine.now() + 60_000
    handle = await engine.running(execution_deadline_at=deadline)
    await engine.backend.executions.delay(handle, await engine.now() + 5000)
    assert (await indexes(engine, handle.execution_id))["execution_deadline"] == deadline


async def test_moved(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    await engine.block(handle.execution_id)
    outcome = await engine.backend.executions.wait_children(handle)
    assert outcome == Moved(handle.execution_id)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert await indexes(engine, handle.execution_id) == {
        f"lane:{LANE}:blocked:dependencies": int(info.created_at)
    }
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.suspension_id) == ("suspended", "waiting_children")
    event = (await engine.events(handle.execution_id))[-1]
    assert (event.type, event.get("reason")) == ("released", "waiting_children")
    assert event.get("delay_until") is None
    assert int((await record(engine, handle.execution_id))["attempt_timeout_remaining_ms"]) > 0
    why = await engine.backend.reads.explain_execution(handle.execution_id)
    assert (why.blocking_reason, why.unresolved_edges) == ("waiting_for_children", 1)
    assert (
        await unchanged(engine, lambda: engine.backend.executions.wait_children(handle)) == outcome
    )
    await refused(engine.backend.executions.delay(handle, 1), "execution_not_active")


async def test_a_move_that_would_be_ready_is_not_repeated(engine: Engine) -> None:
    """The answer stored with the pause wins over what the edges say now."""
    handle = await engine.running()
    await engine.block(handle.execution_id)
    await engine.backend.executions.wait_children(handle)
    await engine.backend.transport.call(
        "HDEL", keys.core(handle.execution_id.tag, handle.execution_id), "deps"
    )
    assert await engine.backend.executions.wait_children(handle) == Moved(handle.execution_id)


# --- promotion ----------------------------------------------------------------------------------


async def test_promotion_on_the_millisecond(engine: Engine) -> None:
    due = await engine.now() + 5000
    execution_id = await engine.create(delay_until=due, priority=3)
    await engine.freeze(due - 1)
    assert await unchanged(engine, lambda: promote(engine, execution_id)) == "not_yet_due"
    await engine.freeze(due)
    assert await promote(engine, execution_id) == "promoted"
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.delay_until is None
    assert await indexes(engine, execution_id) == {
        f"lane:{LANE}:eligible": int(info.created_at) - 3 * 10**12
    }
    assert await engine.events(execution_id) == []


@pytest.mark.corrupts
async def test_promotion_cleans_what_does_not_belong(engine: Engine) -> None:
    call = engine.backend.transport.call
    missing, handle = engine.new_id(), await engine.running()
    waiting = await engine.create()
    index = keys.lane(missing.tag, LANE, "delayed")
    await call("ZADD", index, 1, missing, 1, handle.execution_id, 1, waiting)
    ids = [missing, handle.execution_id, waiting]
    verdicts = await engine.backend.upkeep.promote_delayed(missing.tag, LANE, ids)
    assert verdicts == ["not_found_cleaned", "not_runnable_cleaned", "not_delayed_cleaned"]
    assert await call("EXISTS", index) == 0
    assert (await engine.vector(waiting)).code == "ruewnf"


@pytest.mark.corrupts
async def test_a_delayed_record_without_a_time_is_promoted(engine: Engine) -> None:
    execution_id = await engine.create(delay_until=await engine.now() + 60_000)
    key = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HDEL", key, "delay_until")
    assert await promote(engine, execution_id) == "promoted"
