"""expire_execution: two timers, what they end, and stale ones that must not act."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.upkeep import Index
from tests.support.engine import Engine, unchanged
from tests.support.executions import expire_attempt, expire_deadline, promote

FIXED = {"type": "fixed", "delay_ms": 10}


def timeouts(**retry: Any) -> dict[str, Any]:
    policy: dict[str, Any] = {"timeout_policy": {"attempt_timeout_ms": 1000}}
    if retry:
        policy["retry_policy"] = {"backoff": FIXED, **retry}
    return policy


async def test_a_past_deadline_expires_at_the_first_scan(engine: Engine) -> None:
    execution_id = await engine.create(execution_deadline_at=1)
    scan = await engine.backend.upkeep.scan_due([Index(execution_id.tag, "execution_deadline")], 50)
    assert list(scan.due.values()) == [[execution_id]]
    assert await expire_deadline(engine, execution_id) == "expired"
    scan = await engine.backend.upkeep.scan_due([Index(execution_id.tag, "execution_deadline")], 50)
    assert scan.due == {}


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


async def test_a_removed_timer_does_not_act(engine: Engine) -> None:
    handle = await engine.running()
    for verdict in (
        await expire_attempt(engine, handle.execution_id),
        await expire_deadline(engine, handle.execution_id),
    ):
        assert verdict == "not_yet_due"
    assert (await engine.backend.reads.read_execution_state(handle.execution_id)).value == "active"


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
