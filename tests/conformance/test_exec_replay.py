"""replay_execution: every outcome runs again under the same id."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import TTL, Engine, refused, unchanged
from tests.support.executions import RUNNABLE, Case, mark, promote


@pytest.mark.parametrize("state", [*RUNNABLE, "active", "lease_expired", "revoked"])
async def test_only_ended_executions(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    answer = await unchanged(
        engine, lambda: case.backend.executions.replay_execution(case.execution_id)
    )
    assert answer.code == "execution_not_terminal"


async def test_checks_in_order(engine: Engine) -> None:
    await refused(
        engine.backend.executions.replay_execution(engine.new_id(), expected_replay_count=5),
        "execution_not_found",
    )
    waiting = await engine.create(policy={"max_replay_count": 0})
    await refused(
        engine.backend.executions.replay_execution(waiting, expected_replay_count=5),
        "execution_not_terminal",
    )
    await engine.backend.executions.cancel_execution(waiting)
    await refused(
        engine.backend.executions.replay_execution(waiting, expected_replay_count=5),
        "max_replays_exhausted",
    )
    other = await engine.create()
    await engine.backend.executions.cancel_execution(other)
    answer = await unchanged(
        engine, lambda: engine.backend.executions.replay_execution(other, expected_replay_count=5)
    )
    assert answer.code == "replay_not_allowed"


@pytest.mark.parametrize(("policy", "limit"), [(None, 10), ({"max_replay_count": 2}, 2)])
async def test_limit(engine: Engine, policy: dict[str, Any] | None, limit: int) -> None:
    execution_id = await engine.create(policy=policy)
    for count in range(limit):
        await engine.backend.executions.cancel_execution(execution_id)
        await engine.backend.executions.replay_execution(execution_id, expected_replay_count=count)
    await engine.backend.executions.cancel_execution(execution_id)
    answer = await unchanged(
        engine, lambda: engine.backend.executions.replay_execution(execution_id)
    )
    assert answer.code == "max_replays_exhausted"
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.replay_count == limit


async def test_counters_restart(engine: Engine) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    handle = await engine.running(policy=policy)
    execution_id = handle.execution_id
    await engine.backend.executions.fail(handle, "1", "transient")
    await promote(engine, execution_id)
    handle = (await engine.claim()).handle
    await engine.advance(TTL)
    await mark(engine, execution_id)
    handle = (await engine.claim()).handle
    await engine.backend.executions.fail(handle, "2", "transient")
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.public_state.value, info.retry_count, info.lease_reclaim_count) == ("failed", 1, 1)
    await engine.backend.executions.replay_execution(execution_id)
    claim = await engine.claim()
    assert claim.attempt_index == 3
    # The replay has its own retry.
    await engine.backend.executions.fail(claim.handle, "3", "transient")
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.public_state.value, info.retry_count) == ("delayed", 1)
    attempts = await engine.backend.reads.read_attempts(execution_id)
    assert [a.attempt_type for a in attempts] == ["initial", "retry", "reclaim", "replay"]
    assert [a.attempt_state for a in attempts] == [
        *("ended_failure", "interrupted_reclaimed", "ended_failure", "ended_failure")
    ]
    assert [a.failure_reason for a in attempts] == ["1", "lease_expired", "2", "3"]


async def test_what_an_archived_attempt_says(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.cancel_execution(handle.execution_id, "enough")
    await engine.backend.executions.replay_execution(handle.execution_id)
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert attempt.failure_reason == "cancelled: enough"
    second = (await engine.claim()).handle
    await engine.backend.executions.complete(second)
    await engine.backend.executions.replay_execution(handle.execution_id)
    attempt = (await engine.backend.reads.read_attempts(handle.execution_id))[1]
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_success", None)


async def test_ranks_by_original_age(engine: Engine) -> None:
    old = await engine.create()
    await engine.advance(5)
    await engine.backend.executions.cancel_execution(old)
    young = await engine.create()
    await engine.advance(5)
    await engine.backend.executions.replay_execution(old)
    assert [claim.execution_id for claim in await engine.claim_all(2)] == [old, young]


async def test_event_and_history(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.replay_execution(execution_id, reason="why", requested_by="me")
    event = (await engine.events(execution_id))[-1]
    assert event.type == "replayed"
    assert event.fields == {
        "branch": "normal",
        "replay_count": 1,
        "requested_by": "me",
        "reason": "why",
    }
    assert await engine.backend.reads.read_execution_history(execution_id) == [event]


async def test_another_request_is_refused_while_it_runs(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.replay_execution(execution_id)
    answer = await unchanged(
        engine, lambda: engine.backend.executions.replay_execution(execution_id)
    )
    assert answer.code == "execution_not_terminal"
