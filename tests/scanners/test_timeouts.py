from __future__ import annotations

import pytest

from flowfabric.core.state import PublicState
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.scanning import idle, members, plant

TIMED = {"timeout_policy": {"attempt_timeout_ms": 1000}}
RETRIED = {
    **TIMED,
    "retry_policy": {
        "max_retries": 1,
        "backoff": {"type": "fixed", "delay_ms": 10},
        "retry_on_timeout": True,
    },
}


async def test_an_attempt_that_runs_too_long_ends_the_execution(engine: Engine) -> None:
    handle = await engine.running(policy=TIMED)
    supervisor = idle(engine)
    assert await supervisor.scan_once("attempt_timeout") == ScanResult()
    await engine.advance(1001)
    assert await supervisor.scan_once("attempt_timeout") == ScanResult(processed=1)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.public_state is PublicState.EXPIRED
    assert info.failure_reason == "attempt_timeout"
    assert await members(engine, handle.execution_id.tag, "attempt_timeout") == []


async def test_an_attempt_timeout_is_retried_where_the_policy_says_so(engine: Engine) -> None:
    handle = await engine.running(policy=RETRIED)
    supervisor = idle(engine)
    await engine.advance(1001)
    assert await supervisor.scan_once("attempt_timeout") == ScanResult(processed=1)
    assert (
        await engine.backend.reads.read_execution_state(handle.execution_id) is PublicState.DELAYED
    )
    await engine.advance(11)
    await supervisor.scan_once("delayed_promoter")
    await engine.claim()
    await engine.advance(1001)
    assert await supervisor.scan_once("attempt_timeout") == ScanResult(processed=1)
    state = await engine.backend.reads.read_execution_state(handle.execution_id)
    assert state is PublicState.FAILED


async def test_a_deadline_ends_an_execution_in_any_phase(engine: Engine) -> None:
    deadline = await engine.now() + 1000
    held = (await engine.running(execution_deadline_at=deadline)).execution_id
    waiting = await engine.create(execution_deadline_at=deadline)
    delayed = await engine.create(execution_deadline_at=deadline, delay_until=deadline + 1000)
    supervisor = idle(engine)
    assert await supervisor.scan_once("execution_deadline") == ScanResult()
    await engine.advance(1001)
    assert await supervisor.scan_once("execution_deadline") == ScanResult(processed=3)
    for one in (held, waiting, delayed):
        assert await engine.backend.reads.read_execution_state(one) is PublicState.EXPIRED
    assert await members(engine, held.tag, "execution_deadline") == []


async def test_terminal_and_unknown_executions_lose_both_timers(engine: Engine) -> None:
    ended = (await engine.running()).execution_id
    await engine.backend.executions.cancel_execution(ended)
    ghost = engine.new_id()
    for index in ("attempt_timeout", "execution_deadline"):
        for stray in (ended, ghost):
            await plant(engine, ghost.tag, index, stray)
    assert await idle(engine).scan_once("attempt_timeout") == ScanResult(processed=2)
    for index in ("attempt_timeout", "execution_deadline"):
        assert await members(engine, ghost.tag, index) == []


@pytest.mark.corrupts
async def test_a_timer_of_an_execution_that_does_not_run_changes_nothing(engine: Engine) -> None:
    waiting = await engine.create()
    await plant(engine, waiting.tag, "attempt_timeout", waiting)
    assert await idle(engine).scan_once("attempt_timeout") == ScanResult()
    assert await engine.backend.reads.read_execution_state(waiting) is PublicState.WAITING
    assert await members(engine, waiting.tag, "attempt_timeout") == [waiting]
