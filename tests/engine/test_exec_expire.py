"""expire_execution: two timers, what they end, and stale ones that must not act."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey import keys
from tests.engine.exec_support import (
    POLICY,
    Case,
    expire_attempt,
    expire_deadline,
    freeze,
    indexes,
    promote,
    record,
    unchanged,
)
from tests.support.engine import LANE, TTL, Engine

FIXED = {"type": "fixed", "delay_ms": 10}


def timeouts(**retry: Any) -> dict[str, Any]:
    policy: dict[str, Any] = {"timeout_policy": {"attempt_timeout_ms": 1000}}
    if retry:
        policy["retry_policy"] = {"backoff": FIXED, **retry}
    return policy


async def test_attempt_timeout_on_the_millisecond(engine: Engine) -> None:
    now = await engine.now()
    await freeze(engine, now)
    handle = await engine.running(policy=timeouts())
    assert (await indexes(engine, handle.execution_id))["attempt_timeout"] == now + 1000
    await freeze(engine, now + 999)
    answer = await unchanged(engine, lambda: expire_attempt(engine, handle.execution_id))
    assert answer == "not_yet_due"
    await freeze(engine, now + 1000)
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


async def test_a_past_deadline_expires_at_the_first_scan(engine: Engine) -> None:
    execution_id = await engine.create(execution_deadline_at=1)
    scan = await engine.backend.upkeep.scan_due({execution_id.tag: ["execution_deadline"]}, 50)
    assert [page.ids for page in scan.pages] == [[execution_id]]
    assert await expire_deadline(engine, execution_id) == "expired"
    scan = await engine.backend.upkeep.scan_due({execution_id.tag: ["execution_deadline"]}, 50)
    assert list(scan.pages) == []


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


@pytest.mark.parametrize(
    ("retry", "verdict"),
    [
        ({}, "expired"),
        ({"max_retries": 3}, "expired"),
        ({"retryable_categories": ["transient"]}, "expired"),
        ({"retry_on_timeout": True}, "retry_scheduled"),
        ({"retryable_categories": ["timeout"]}, "retry_scheduled"),
        ({"retry_on_timeout": True, "max_retries": 0}, "failed"),
        ({"retryable_categories": ["timeout"], "max_retries": 0}, "failed"),
        ({"retry_on_timeout": True, "retryable_categories": ["transient"]}, "failed"),
    ],
)
async def test_whether_a_timeout_is_retried(
    engine: Engine, retry: dict[str, Any], verdict: str
) -> None:
    handle = await engine.running(policy=timeouts(**retry))
    await engine.advance(1000)
    assert await expire_attempt(engine, handle.execution_id) == verdict
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    expected = {"expired": "expired", "failed": "failed", "retry_scheduled": "delayed"}[verdict]
    assert info.public_state.value == expected
    assert (info.failure_reason, info.failure_category) == ("attempt_timeout", "timeout")
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.failure_category) == ("ended_failure", "timeout")
    event = (await engine.events(handle.execution_id))[-1]
    reason = {
        "expired": "expired:attempt_timeout",
        "failed": "failed_terminal",
        "retry_scheduled": "failed_retry_scheduled",
    }[verdict]
    assert event.get("reason") == reason
    assert event.get("failure_category") == (None if verdict == "retry_scheduled" else "timeout")


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


# --- stale timers -------------------------------------------------------------------------------


async def test_a_stale_timer_after_a_retry(engine: Engine) -> None:
    """A scan saw the first attempt's timer; meanwhile the second attempt runs."""
    handle = await engine.running(policy=timeouts(max_retries=3))
    await engine.advance(1000)
    await engine.backend.executions.fail(handle, "x", "transient")
    answer = await unchanged(engine, lambda: expire_attempt(engine, handle.execution_id))
    assert answer == "not_yet_due"
    await engine.advance(10)
    await promote(engine, handle.execution_id)
    await engine.claim()
    answer = await unchanged(engine, lambda: expire_attempt(engine, handle.execution_id))
    assert answer == "not_yet_due"


@pytest.mark.corrupts
async def test_a_timer_left_behind_never_acts_on_a_waiting_execution(engine: Engine) -> None:
    execution_id = await engine.create()
    index = keys.index(execution_id.tag, "attempt_timeout")
    await engine.backend.transport.call("ZADD", index, 1, execution_id)
    assert await unchanged(engine, lambda: expire_attempt(engine, execution_id)) == "not_yet_due"


async def test_a_removed_timer_does_not_act(engine: Engine) -> None:
    handle = await engine.running()
    for verdict in (
        await expire_attempt(engine, handle.execution_id),
        await expire_deadline(engine, handle.execution_id),
    ):
        assert verdict == "not_yet_due"
    assert (await engine.backend.reads.read_execution_state(handle.execution_id)).value == "active"


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


async def test_a_batch_answers_each(engine: Engine) -> None:
    due = [(await engine.running(policy=timeouts())).execution_id for _ in range(2)]
    await engine.advance(1000)
    fresh = (await engine.running(policy=timeouts())).execution_id
    waiting = await engine.create()
    ended = await engine.create()
    await engine.backend.executions.cancel_execution(ended)
    missing = engine.new_id()
    verdicts = await engine.backend.upkeep.expire_execution(
        missing.tag, ExpireReason.ATTEMPT_TIMEOUT, [due[0], fresh, waiting, ended, missing, *due]
    )
    assert verdicts == [
        *("expired", "not_yet_due", "not_yet_due", "already_terminal", "not_found_cleaned"),
        *("already_terminal", "expired"),
    ]


async def test_a_reclaimed_attempt_gets_the_full_time(engine: Engine) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    await engine.advance(TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        handle.execution_id.tag, [handle.execution_id]
    )
    now = await engine.now() + 100
    await freeze(engine, now)
    await engine.claim()
    assert (await indexes(engine, handle.execution_id))["attempt_timeout"] == now + 90_000
    assert "attempt_timeout_remaining_ms" not in await record(engine, handle.execution_id)
