"""Retention: what a purge deletes, when, and how a long one is finished."""

from __future__ import annotations

from typing import Any

from flowfabric.core.ids import ExecutionId
from tests.support.engine import LANE, Engine, refused, unchanged
from tests.support.executions import Case, promote, trim

DAY = 86_400_000


async def test_a_replayed_execution_is_not_purged(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    await engine.advance(DAY)
    await engine.backend.executions.replay_execution(case.execution_id)
    answer = await unchanged(engine, lambda: trim(engine, case.execution_id))
    assert answer == "not_terminal"
    # Its age counts from the new end.
    await engine.backend.executions.complete((await engine.claim()).handle)
    assert await unchanged(engine, lambda: trim(engine, case.execution_id)) == "not_due"


async def test_a_purged_execution_is_not_replayed(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    await engine.advance(DAY)
    await trim(engine, case.execution_id)
    await refused(
        engine.backend.executions.replay_execution(case.execution_id), "execution_not_found"
    )
    await refused(engine.backend.executions.complete(case.held), "execution_not_found")


async def test_trimming_twice(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    await engine.advance(DAY)
    ids = [case.execution_id, case.execution_id]
    verdicts = await engine.backend.upkeep.trim_retention(case.execution_id.tag, LANE, ids)
    assert verdicts == ["purged", "orphan_removed"]


async def test_a_recreated_execution_starts_clean(engine: Engine) -> None:
    case = await Case.make(engine, "retry_waiting")
    await engine.backend.executions.cancel_execution(case.execution_id)
    await engine.advance(DAY)
    await trim(engine, case.execution_id)
    await engine.create(execution_id=case.execution_id)
    claim = await engine.claim()
    assert (claim.attempt_index, claim.handle.lease_epoch) == (0, 1)
    assert len(await engine.backend.reads.read_attempts(case.execution_id)) == 1


async def _with_attempts(engine: Engine, count: int) -> ExecutionId:
    """An ended execution that went through this many attempts."""
    policy: dict[str, Any] = {
        "retry_policy": {"max_retries": count, "backoff": {"type": "fixed", "delay_ms": 0}}
    }
    execution_id = await engine.create(policy=policy)
    for _ in range(count - 1):
        handle = (await engine.claim()).handle
        await engine.backend.executions.fail(handle, "x", "transient")
        await promote(engine, execution_id)
    handle = (await engine.claim()).handle
    await engine.backend.executions.fail(handle, "x", "permanent")
    assert await engine.backend.reads.read_total_attempt_count(execution_id) == count
    return execution_id


async def test_an_id_used_again_finds_nothing_of_its_former_life(engine: Engine) -> None:
    execution_id = await _with_attempts(engine, 1101)
    await engine.advance(DAY)
    assert await trim(engine, execution_id) == "purging"
    await engine.create(execution_id=execution_id)
    assert await engine.backend.upkeep.purge(execution_id.tag) == 0
    handle = (await engine.claim()).handle
    await engine.backend.executions.complete(handle, b"new")
    # A repeat is recognised by the attempt it ended.
    await engine.backend.executions.complete(handle, b"new")
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_success", None)
