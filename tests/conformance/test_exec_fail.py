"""fail_execution: the retry decision, every backoff, lineage, and repeats of lost replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.contracts.executions import RetryScheduled, TerminalFailed
from flowfabric.core.contracts.leases import Fence
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from tests.support.engine import Engine, refused, unchanged
from tests.support.executions import expire_deadline, promote

FIXED = {"type": "fixed", "delay_ms": 10}


def policy(**retry: Any) -> dict[str, Any]:
    return {"retry_policy": {"backoff": FIXED, **retry}}


async def again(engine: Engine, execution_id: Any, wait: int = 10) -> Any:
    """The claim of the attempt after a scheduled retry."""
    await engine.advance(wait)
    assert await promote(engine, execution_id) == "promoted"
    return await engine.claim()


@pytest.mark.parametrize(
    ("stored", "category", "retried"),
    [
        (None, "transient", False),
        ({"max_replay_count": 3}, "transient", False),
        (policy(), "transient", True),
        (policy(), "anything at all", True),
        (policy(), "", True),
        (policy(), "timeout", True),
        (policy(), "permanent", False),
        (policy(), "cancelled", False),
        (policy(), "budget_exceeded", False),
        (policy(), "step_kind_mismatch", False),
        (policy(), "extractor_payload_decode", False),
        (policy(retryable_categories=["permanent"]), "permanent", False),
        (policy(retryable_categories=["transient", "rate"]), "rate", True),
        (policy(retryable_categories=["transient", "rate"]), "Rate", False),
        (policy(retryable_categories=["transient"]), "timeout", False),
        (policy(max_retries=0), "transient", False),
    ],
)
async def test_decision(
    engine: Engine, stored: dict[str, Any] | None, category: str, *, retried: bool
) -> None:
    handle = await engine.running(policy=stored)
    outcome = await engine.backend.executions.fail(handle, "reason", category)
    assert isinstance(outcome, RetryScheduled if retried else TerminalFailed)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.public_state.value == ("delayed" if retried else "failed")
    assert info.failure_reason == "reason"
    assert info.failure_category == (category or None)
    assert info.retry_count == (1 if retried else 0)


async def test_retries_run_out(engine: Engine) -> None:
    handle = await engine.running(policy=policy(max_retries=2))
    execution_id = handle.execution_id
    for n in (1, 2):
        outcome = await engine.backend.executions.fail(handle, f"boom {n}", "transient")
        assert isinstance(outcome, RetryScheduled)
        assert outcome.next_attempt_index == n
        claim = await again(engine, execution_id)
        assert (claim.attempt_type, claim.attempt_index) == ("retry", n)
        handle = claim.handle
    assert isinstance(
        await engine.backend.executions.fail(handle, "boom 3", "transient"), TerminalFailed
    )
    attempts = await engine.backend.reads.read_attempts(execution_id)
    assert [(a.attempt_type, a.attempt_state, a.failure_reason) for a in attempts] == [
        ("initial", "ended_failure", "boom 1"),
        ("retry", "ended_failure", "boom 2"),
        ("retry", "ended_failure", "boom 3"),
    ]
    assert [a.retry_reason for a in attempts] == [None, "boom 1", "boom 2"]
    assert [a.previous_attempt_index for a in attempts] == [None, 0, 1]
    assert [a.next_attempt_index for a in attempts] == [1, 2, None]
    assert all(a.ended_at is not None and a.ended_at >= a.started_at for a in attempts)
    assert len({a.attempt_id for a in attempts}) == 3
    assert [a.lease_epoch for a in attempts] == [1, 2, 3]
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.retry_count, info.total_attempt_count) == (2, 3)


async def test_a_retry_that_succeeds(engine: Engine) -> None:
    handle = await engine.running(policy=policy())
    started = (await engine.backend.reads.read_execution_info(handle.execution_id)).started_at
    await engine.backend.executions.fail(handle, "boom", "transient")
    claim = await again(engine, handle.execution_id)
    await engine.backend.executions.complete(claim.handle, b"r")
    first, second = await engine.backend.reads.read_attempts(handle.execution_id)
    assert (first.attempt_state, first.failure_reason) == ("ended_failure", "boom")
    assert (second.attempt_state, second.failure_reason) == ("ended_success", None)
    assert second.failure_category is None
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.public_state.value == "completed"
    assert info.started_at == started


async def ended_by_cancel(engine: Engine, execution_id: ExecutionId) -> str:
    await engine.backend.executions.cancel_execution(execution_id, "enough")
    return "cancelled"


async def ended_by_deadline(engine: Engine, execution_id: ExecutionId) -> str:
    await engine.advance(100_000)
    assert await expire_deadline(engine, execution_id) == "expired"
    return "expired"


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("end", [ended_by_cancel, ended_by_deadline])
async def test_an_execution_that_ends_between_attempts_has_no_current_one(
    engine: Engine, end: Callable[[Engine, ExecutionId], Awaitable[str]], replayed: bool
) -> None:
    deadline = await engine.now() + 90_000
    handle = await engine.running(policy=policy(), execution_deadline_at=deadline)
    execution_id = handle.execution_id
    if replayed and end is ended_by_cancel:
        await engine.backend.executions.complete(handle)
        await engine.backend.executions.replay_execution(execution_id)
    else:
        await engine.backend.executions.fail(handle, "boom", "transient")
    outcome = await end(engine, execution_id)
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert (snapshot.current_attempt, snapshot.total_attempt_count) == (None, 1)
    names = ["current_attempt_id", "current_attempt_index", "attempt_state", "between_attempts"]
    assert await engine.backend.reads.read_exec_core_fields(execution_id, names) == {
        "current_attempt_id": None,
        "current_attempt_index": "0",
        "attempt_state": "attempt_terminal",
        "between_attempts": None,
    }
    error = await refused(engine.backend.leases.renew(handle), "execution_not_active")
    assert error.details == (outcome, "1", "terminal", "")
    # The next run has one again, also once it has ended.
    await engine.backend.executions.replay_execution(execution_id)
    claim = await engine.claim()
    await engine.backend.executions.cancel_execution(execution_id)
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_attempt is not None
    assert snapshot.current_attempt.attempt_id == claim.handle.attempt_id
    error = await refused(engine.backend.leases.renew(claim.handle), "execution_not_active")
    assert error.details[3] == claim.handle.attempt_id


async def test_long_texts_are_cut(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.fail(handle, "ü" * 5000, "permanent")
    reason = (await engine.backend.reads.read_execution_info(handle.execution_id)).failure_reason
    assert reason == "ü" * 4096


async def test_empty_texts_read_as_unset(engine: Engine) -> None:
    handle = await engine.running()
    assert isinstance(await engine.backend.executions.fail(handle, "", ""), TerminalFailed)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.failure_reason, info.failure_category) == (None, None)


# --- the stored policy decides ------------------------------------------------------------------


GENEROUS = '{"max_retries": 9, "backoff": {"type": "fixed", "delay_ms": 5}}'


async def test_a_worker_cannot_grant_itself_retries(engine: Engine) -> None:
    handle = await engine.running()
    outcome = await engine.backend.executions.fail_execution(
        handle.execution_id,
        handle,
        failure_reason="x",
        failure_category="transient",
        retry_policy_json=GENEROUS,
    )
    assert isinstance(outcome, TerminalFailed)


async def test_an_operator_can(engine: Engine) -> None:
    handle = await engine.running()
    outcome = await engine.backend.executions.fail_execution(
        handle.execution_id,
        failure_reason="x",
        failure_category="transient",
        source="operator_override",
        retry_policy_json=GENEROUS,
    )
    assert isinstance(outcome, RetryScheduled)


@pytest.mark.parametrize("text", ["{", "[]", '{"max_retries": -1}', '{"unknown": 1}'])
async def test_an_operator_policy_is_checked(engine: Engine, text: str) -> None:
    handle = await engine.running()
    answer = await unchanged(
        engine,
        lambda: engine.backend.executions.fail_execution(
            handle.execution_id,
            failure_reason="x",
            failure_category="transient",
            source="operator_override",
            retry_policy_json=text,
        ),
    )
    assert answer.code == "invalid_policy_json"


# --- repeats ------------------------------------------------------------------------------------


async def test_a_final_failure_repeated(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.fail(handle, "x", "transient")
    answer = await unchanged(
        engine, lambda: engine.backend.executions.fail(handle, "other", "timeout")
    )
    assert answer == TerminalFailed()


async def test_a_scheduled_retry_repeated_at_every_later_moment(engine: Engine) -> None:
    handle = await engine.running(policy=policy())
    first = await engine.backend.executions.fail(handle, "x", "transient")

    own = handle.fence
    without_index = Fence(own.lease_id, own.lease_epoch, own.attempt_id)

    async def repeated() -> None:
        for fence in (handle, without_index):
            answer = await unchanged(
                engine,
                lambda fence=fence: engine.backend.executions.fail_execution(
                    handle.execution_id, fence, failure_reason="x", failure_category="transient"
                ),
            )
            assert answer == first

    await repeated()
    await engine.advance(10)
    await promote(engine, handle.execution_id)
    await repeated()
    other = (await engine.claim(instance="w-2")).handle
    await repeated()
    await engine.backend.executions.fail(other, "y", "transient")
    await repeated()
    third = await again(engine, handle.execution_id)
    await engine.backend.executions.complete(third.handle)
    await repeated()
    await engine.backend.executions.replay_execution(handle.execution_id)
    await repeated()


async def test_an_operator_replay_is_no_retry(engine: Engine) -> None:
    handle = await engine.running(policy=policy())
    await engine.backend.executions.complete(handle)
    await engine.backend.executions.replay_execution(handle.execution_id)
    answer = await unchanged(
        engine, lambda: engine.backend.executions.fail(handle, "x", "transient")
    )
    assert isinstance(answer, EngineError)
    assert answer.code == "execution_not_active"


async def test_a_failure_of_someone_else_is_no_repeat(engine: Engine) -> None:
    """An attempt ended by its timeout was not ended by fail."""
    from tests.support.executions import expire_attempt

    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 5}})
    await engine.advance(5)
    assert await expire_attempt(engine, handle.execution_id) == "expired"
    await refused(engine.backend.executions.fail(handle, "x", "transient"), "execution_not_active")


async def test_default_retry_policy_allows_three(engine: Engine) -> None:
    handle = await engine.running(policy={"retry_policy": {"retry_on_timeout": True}})
    for n in range(3):
        outcome = await engine.backend.executions.fail(handle, "x", "transient")
        assert isinstance(outcome, RetryScheduled)
        handle = (await again(engine, handle.execution_id, 1000 * 2**n)).handle
    assert isinstance(
        await engine.backend.executions.fail(handle, "x", "transient"), TerminalFailed
    )
