"""expire_execution: two timers, what they end, and stale ones that must not act."""

from __future__ import annotations

import pytest

from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey import keys
from tests.conformance.test_exec_expire import timeouts
from tests.support.engine import LANE, TTL, Engine, unchanged
from tests.support.executions import POLICY, Case, expire_attempt, expire_deadline, promote
from tests.support.storage import indexes, record


async def test_attempt_timeout_on_the_millisecond(engine: Engine) -> None:
    now = await engine.now()
    await engine.freeze(now)
    handle = await engine.running(policy=timeouts())
    assert (await indexes(engine, handle.execution_id))["attempt_timeout"] == now + 1000
    await engine.freeze(now + 999)
    answer = await unchanged(engine, lambda: expire_attempt(engine, handle.execution_id))
    assert answer == "not_yet_due"
    await engine.freeze(now + 1000)
    assert await expire_attempt(engine, handle.execution_id) == "expired"
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.public_state.value == "expired"
    assert (info.failure_reason, info.failure_category) == ("attempt_timeout", "timeout")
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert attempt.attempt_state == "ended_failure"
    assert attempt.failure_reason == "attempt_timeout"
    assert attempt.ended_at == now + 1000
    event = (await engine.events(handle.execution_id))[-1]
    assert event.get("outcome") == "expired"
    assert event.get("reason") == "expired:attempt_timeout"
    assert event.get("lease_id") == handle.lease_id
    assert list(await indexes(engine, handle.execution_id)) == [f"lane:{LANE}:terminal"]
    answer = await unchanged(engine, lambda: expire_attempt(engine, handle.execution_id))
    assert answer == "already_terminal"


async def test_deadline_of_a_never_claimed_execution(engine: Engine) -> None:
    execution_id = await engine.create(execution_deadline_at=await engine.now() + 1000)
    assert await unchanged(engine, lambda: expire_deadline(engine, execution_id)) == "not_yet_due"
    await engine.advance(1000)
    assert await expire_deadline(engine, execution_id) == "expired"
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.failure_reason == "execution_deadline"
    assert info.state_vector.code == "tunnxf"
    assert list(await indexes(engine, execution_id)) == [f"lane:{LANE}:terminal"]
    (event,) = await engine.events(execution_id)
    assert (event.get("reason"), event.get("attempt_index")) == ("expired:execution_deadline", None)


@pytest.mark.parametrize(
    "state", ["paused_delayed", "retry_delayed", "waiting_children", "lease_expired", "revoked"]
)
async def test_a_deadline_ends_everything(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await engine.advance(3_600_000)
    assert await expire_deadline(engine, case.execution_id) == "expired"
    info = await engine.backend.reads.read_execution_info(case.execution_id)
    assert (info.public_state.value, info.failure_reason) == ("expired", "execution_deadline")
    for attempt in await engine.backend.reads.read_attempts(case.execution_id):
        assert attempt.attempt_state == "ended_failure"
    assert list(await indexes(engine, case.execution_id)) == [f"lane:{LANE}:terminal"]


async def test_timeouts_use_up_retries(engine: Engine) -> None:
    handle = await engine.running(policy=timeouts(retry_on_timeout=True, max_retries=1))
    execution_id = handle.execution_id
    await engine.advance(1000)
    assert await expire_attempt(engine, execution_id) == "retry_scheduled"
    assert (await engine.backend.reads.read_execution_info(execution_id)).retry_count == 1
    await engine.advance(10)
    await promote(engine, execution_id)
    claim = await engine.claim()
    assert claim.attempt_type == "retry"
    assert (await indexes(engine, execution_id))["attempt_timeout"] is not None
    await engine.advance(1000)
    assert await expire_attempt(engine, execution_id) == "failed"


async def test_a_lost_worker_still_times_out(engine: Engine) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": TTL + 1000}})
    await engine.advance(TTL + 1000)
    assert await expire_attempt(engine, handle.execution_id) == "expired"
    assert list(await indexes(engine, handle.execution_id)) == [f"lane:{LANE}:terminal"]


@pytest.mark.corrupts
async def test_a_timer_left_behind_never_acts_on_a_waiting_execution(engine: Engine) -> None:
    execution_id = await engine.create()
    index = keys.index(execution_id.tag, "attempt_timeout")
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    assert await unchanged(engine, lambda: expire_attempt(engine, execution_id)) == "not_yet_due"


@pytest.mark.corrupts
@pytest.mark.parametrize("reason", list(ExpireReason))
async def test_timers_of_missing_executions_are_dropped(
    engine: Engine, reason: ExpireReason
) -> None:
    missing = engine.new_id()
    call = engine.backend.transport.call
    names = [keys.index(missing.tag, name.value) for name in ExpireReason]
    for name in names:
        await call("ZADD", name, 1, missing)
    verdicts = await engine.backend.upkeep.expire_execution(missing.tag, reason, [missing])
    assert verdicts == ["not_found_cleaned"]
    assert await call("EXISTS", *names) == 0


@pytest.mark.corrupts
async def test_timers_of_ended_executions_are_dropped(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    call = engine.backend.transport.call
    names = [keys.index(case.execution_id.tag, name.value) for name in ExpireReason]
    for name in names:
        await call("ZADD", name, 1, case.execution_id)
    assert await expire_deadline(engine, case.execution_id) == "already_terminal"
    assert await call("EXISTS", *names) == 0
    assert (await engine.backend.reads.read_execution_state(case.execution_id)).value == "completed"


async def test_fail_against_the_deadline(engine: Engine) -> None:
    """The deadline survives the retry and ends the waiting execution later."""
    handle = await engine.running(policy=POLICY)
    await engine.backend.executions.fail(handle, "x", "transient")
    assert "execution_deadline" in await indexes(engine, handle.execution_id)
    await engine.advance(3_600_000)
    assert await expire_deadline(engine, handle.execution_id) == "expired"


async def test_a_reclaimed_attempt_gets_the_full_time(engine: Engine) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    await engine.advance(TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        handle.execution_id.tag, [handle.execution_id]
    )
    now = await engine.now() + 100
    await engine.freeze(now)
    await engine.claim()
    assert (await indexes(engine, handle.execution_id))["attempt_timeout"] == now + 90_000
    assert "attempt_timeout_remaining_ms" not in await record(engine, handle.execution_id)
