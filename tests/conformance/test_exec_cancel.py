"""cancel_execution: sources, check order, and what it ends."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.executions import Cancelled
from flowfabric.core.errors import EngineError
from tests.support.engine import TTL, Engine, refused, unchanged
from tests.support.executions import Case, foreign_fence


@pytest.mark.parametrize("state", ["active", "paused_waiting", "waiting_children", "revoked"])
async def test_an_unfinished_attempt_is_ended(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await case.backend.executions.cancel_execution(case.execution_id, "enough")
    (attempt,) = await case.backend.reads.read_attempts(case.execution_id)
    assert attempt.attempt_state == "ended_cancelled"
    assert attempt.failure_reason == "cancelled: enough"
    assert attempt.failure_category is None


async def test_an_ended_attempt_keeps_its_end(engine: Engine) -> None:
    case = await Case.make(engine, "retry_delayed")
    await case.backend.executions.cancel_execution(case.execution_id, "enough")
    (attempt,) = await case.backend.reads.read_attempts(case.execution_id)
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_failure", "boom")


@pytest.mark.parametrize("source", ["flow_cascade", "system_timeout"])
async def test_engine_sources_are_refused_before_any_lookup(engine: Engine, source: str) -> None:
    for execution_id in (engine.new_id(), await engine.create()):
        answer = await unchanged(
            engine,
            lambda eid=execution_id: engine.backend.executions.cancel_execution(eid, source=source),
        )
        assert isinstance(answer, EngineError)
        assert answer.code == "invalid_input"
        assert answer.detail.startswith("source")


async def test_unknown_execution(engine: Engine) -> None:
    await refused(
        engine.backend.executions.cancel_execution(engine.new_id()), "execution_not_found"
    )


@pytest.mark.parametrize("source", ["lease_holder", "worker", "my own reason"])
async def test_the_lease_holder(engine: Engine, source: str) -> None:
    handle = await engine.running()
    await engine.backend.executions.cancel_execution(
        handle.execution_id, "done", source=source, fence=handle
    )
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.cancelled_by == source
    # The same holder, again: answered as before, nothing written.
    answer = await unchanged(
        engine,
        lambda: engine.backend.executions.cancel_execution(
            handle.execution_id, "again", source=source, fence=handle
        ),
    )
    assert answer == Cancelled(handle.execution_id)
    # Another's fence is told what happened.
    error = await refused(
        engine.backend.executions.cancel_execution(
            handle.execution_id, source=source, fence=foreign_fence()
        ),
        "execution_not_active",
    )
    assert error.details == ("cancelled", "1", "terminal", handle.attempt_id)


async def test_a_worker_after_the_operator(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.cancel_execution(handle.execution_id, "operator")
    assert await engine.backend.executions.cancel(handle, "worker") == Cancelled(
        handle.execution_id
    )
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.cancellation_reason == "operator"


@pytest.mark.parametrize("state", ["completed", "failed", "expired", "expired_early"])
async def test_an_ended_execution(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    answer = await unchanged(
        engine, lambda: case.backend.executions.cancel_execution(case.execution_id)
    )
    assert isinstance(answer, EngineError)
    assert answer.code == "execution_not_active"
    outcome = "success" if state == "completed" else state.removesuffix("_early")
    assert answer.details[0] == outcome


async def test_cancelled_again_by_an_operator(engine: Engine) -> None:
    case = await Case.make(engine, "cancelled_early")
    answer = await unchanged(
        engine, lambda: case.backend.executions.cancel_execution(case.execution_id, "other reason")
    )
    assert answer == Cancelled(case.execution_id)


async def test_a_lost_lease_cannot_cancel(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL)
    await refused(engine.backend.executions.cancel(handle), "lease_expired")
    assert await engine.backend.executions.cancel_execution(handle.execution_id)


async def test_a_grant_dies_with_the_execution(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.claims.issue_claim_grant(
        execution_id, worker_id="w", worker_instance_id="w-1"
    )
    await engine.backend.executions.cancel_execution(execution_id)
    assert not any(name.endswith(b":claim_grant") for name in await engine.dump())


async def test_reasons_are_cut_and_empty_ones_read_as_unset(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id, "ü" * 5000)
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.cancellation_reason == "ü" * 2048
    other = await engine.create()
    await engine.backend.executions.cancel_execution(other)
    assert (await engine.backend.reads.read_execution_info(other)).cancellation_reason is None


async def test_the_worker_learns_on_its_next_call(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.cancel_execution(handle.execution_id)
    for call in (
        engine.backend.leases.renew(handle),
        engine.backend.executions.progress(handle, 1),
        engine.backend.executions.complete(handle),
        engine.backend.executions.fail(handle, "x", "transient"),
        engine.backend.executions.delay(handle, 2**50),
        engine.backend.executions.wait_children(handle),
    ):
        error = await refused(call, "execution_not_active")
        assert error.details[0] == "cancelled"
