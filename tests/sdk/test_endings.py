"""How attempts end by themselves: self-inflicted cancellations, indescribable failures."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import Any

import pytest

from flowfabric.sdk.runtime import RunSummary
from flowfabric.sdk.task import ClaimedTask
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.sdk import info, serving, state, submit, until


async def cancels_itself(task: ClaimedTask) -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(60)


async def cancels_itself_and_raises(task: ClaimedTask) -> None:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    raise ValueError("after a cancel that nobody awaited")


async def raises_cancelled(task: ClaimedTask) -> None:
    raise asyncio.CancelledError


async def is_cancelled_by_a_timer(task: ClaimedTask) -> None:
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().call_soon(current.cancel)
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("handler", "category"),
    [
        (cancels_itself, "handler_panic"),
        (cancels_itself_and_raises, "handler_error"),
        (raises_cancelled, "handler_panic"),
        (is_cancelled_by_a_timer, "handler_panic"),
    ],
)
async def test_a_cancellation_that_the_worker_did_not_ask_for_fails_the_attempt(
    engine: Engine,
    make_worker: MakeWorker,
    handler: Any,
    category: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Counted, logged, and retried after the backoff that its policy names."""
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 200}}}
    (execution_id,) = await submit(engine.backend, policy=policy)
    starts: list[float] = []

    async def noted(task: ClaimedTask) -> None:
        starts.append(asyncio.get_running_loop().time())
        await handler(task)

    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": noted}) as runtime:
        await until(lambda: runtime.summary.failed == 1, "the last attempt")
    assert runtime.summary == RunSummary(failed=1, retried=1)
    assert len(starts) == 2
    assert starts[1] - starts[0] >= 0.2
    seen = await info(engine.backend, execution_id)
    assert (seen.public_state.value, seen.failure_category) == ("failed", category)
    told = [r for r in caplog.records if r.__dict__.get("action") == "task_failed"]
    assert [record.levelno for record in told] == [logging.WARNING, logging.ERROR]


class Unnamed(type):
    @property
    def __name__(cls) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Unnamed):
    pass


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class BrokenClassError(Exception):
    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no class")


class BrokenCauseError(Exception):
    @property
    def __cause__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise RuntimeError("no cause")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NamelessError("text"), "The handler failed with an exception that cannot be described."),
        (BrokenTextError(), "BrokenTextError: (its message cannot be shown)"),
        (BrokenClassError(), "The handler failed with an exception that cannot be described."),
        (BrokenCauseError(), "The handler failed with an exception that cannot be described."),
    ],
    ids=["name", "text", "class", "cause"],
)
async def test_a_failure_that_cannot_be_described_is_recorded(
    engine: Engine, make_worker: MakeWorker, error: Exception, reason: str
) -> None:
    async def handler(task: ClaimedTask) -> None:
        raise error

    (execution_id,) = await submit(engine.backend)
    async with serving(await make_worker(), {"job": handler}) as runtime:
        await until(lambda: runtime.summary != RunSummary(), "the failure")
    assert runtime.summary == RunSummary(failed=1)
    seen = await info(engine.backend, execution_id)
    assert (seen.public_state.value, seen.failure_category) == ("failed", "handler_error")
    assert (seen.failure_reason or "").splitlines()[0] == reason


async def test_a_cancelled_execution_is_no_error(
    engine: Engine, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its handler is stopped, or ends before it hears of the cancellation."""
    caplog.set_level(logging.DEBUG)
    started = asyncio.Event()

    async def stopped(task: ClaimedTask) -> None:
        started.set()
        await asyncio.Event().wait()

    async def too_late(task: ClaimedTask) -> None:
        await engine.backend.executions.cancel_execution(task.execution_id, "no longer needed")

    ids = [(await submit(engine.backend, kind=kind))[0] for kind in ("stopped", "too_late")]
    worker = await make_worker(lease_ttl_ms=1000, max_concurrent_tasks=2)
    async with serving(worker, {"stopped": stopped, "too_late": too_late}) as runtime:
        await started.wait()
        await engine.backend.executions.cancel_execution(ids[0], "no longer needed")
        await until(lambda: runtime.summary.cancelled == 2, "both ends")
    assert {await state(engine.backend, each) for each in ids} == {"cancelled"}
    told = [r for r in caplog.records if r.__dict__.get("action") == "task_cancelled"]
    assert [record.levelno for record in told] == [logging.INFO] * 2
    assert all("stopped: the execution was cancelled (attempt 1, " in r.message for r in told)
    assert max(record.levelno for record in caplog.records) == logging.INFO


async def test_a_retry_after_an_attempt_timeout_comes_at_its_exact_time(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """As after an exception: the delayed promoter's interval does not show."""
    policy = {
        "timeout_policy": {"attempt_timeout_ms": 100},
        "retry_policy": {
            "max_retries": 6,
            "backoff": {"type": "fixed", "delay_ms": 400},
            "retry_on_timeout": True,
        },
    }

    async def handler(task: ClaimedTask) -> None:
        if task.attempt_index < 4:
            await asyncio.Event().wait()

    (execution_id,) = await submit(engine.backend, policy=policy)
    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed == 1, "the last attempt")
    attempts = await engine.backend.reads.read_attempts(execution_id)
    gaps = sorted(b.started_at - a.started_at for a, b in pairwise(attempts))
    # The median: one of them may meet a pause of the machine.
    assert 500 <= gaps[0] <= gaps[len(gaps) // 2] < 600
