"""Tasks that a worker does not know: failed, or left to a worker that knows them (11 §8, §16)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.endings import RunSummary
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from tests.sdk.conftest import MakeWorker
from tests.sdk.test_doorbell import sleeping
from tests.support.engine import Engine
from tests.support.sdk import info, serving, state, submit, until

SILENT: Any = {"claim_poll_interval_ms": 60_000}
"""Workers that only hear rings, and look for nothing themselves."""


async def done(task: ClaimedTask) -> bytes:
    return task.execution_kind.encode()


async def offered_to(engine: Engine, execution_id: ExecutionId) -> str | None:
    return (await engine.backend.reads.explain_execution(execution_id)).offered_to


async def test_the_low_level_runtime_fails_them(engine: Engine, make_worker: MakeWorker) -> None:
    (execution_id,) = await submit(engine.backend, kind="new")
    async with serving(await make_worker(), {"old": done}) as runtime:
        await until(lambda: runtime.summary.failed == 1, "the failure")
    failed = await info(engine.backend, execution_id)
    assert failed.failure_category == "runtime_no_handler"


async def test_they_wait_for_a_worker_that_knows_them(
    engine: Engine, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    ids = await submit(engine.backend, 3, kind="new")
    old, new = await make_worker(), await make_worker()
    async with serving(old, {"old": done}, on_unknown_kind="release") as first:
        await until(lambda: _all_offered(engine, ids, old), "the offers")
        assert [await state(engine.backend, one) for one in ids] == ["waiting"] * 3
        # A worker that starts with the task takes what waits for it, at once.
        started = time.monotonic()
        async with serving(new, {"new": done}, on_unknown_kind="release") as second:
            await until(lambda: second.summary.completed == 3, "the ends")
        assert time.monotonic() - started < 1
    assert first.summary == RunSummary()
    # Neither a lease nor an attempt was spent before.
    for execution_id in ids:
        read = await engine.backend.reads.read_attempts(execution_id)
        assert [(one.lease_epoch, one.worker_instance_id) for one in read] == [
            (1, new.config.worker_instance_id)
        ]
    said = [r for r in caplog.records if getattr(r, "action", "") == "task_unknown"]
    words = 'This worker does not know task "new". Its executions wait for one that does.'
    assert [(r.levelno, r.getMessage()) for r in said] == [(logging.WARNING, words)]


async def _is_offered(engine: Engine, execution_id: ExecutionId, *workers: Worker) -> bool:
    instances = [worker.config.worker_instance_id for worker in workers]
    return await offered_to(engine, execution_id) in instances


async def _all_offered(engine: Engine, ids: list[ExecutionId], worker: Worker) -> bool:
    return all([await _is_offered(engine, one, worker) for one in ids])


async def test_a_ring_for_them_wakes_only_workers_that_know_them(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Idle workers of another application hear of a task first, and do not delay it."""
    go_on = asyncio.Event()

    async def hold(_: ClaimedTask) -> None:
        await go_on.wait()

    others, mine = [await make_worker(**SILENT) for _ in range(3)], await make_worker(**SILENT)
    async with contextlib.AsyncExitStack() as stack:
        for worker in others:
            await stack.enter_async_context(
                serving(worker, {"other": done}, on_unknown_kind="release")
            )
        runtime = await stack.enter_async_context(
            serving(mine, {"mine": hold}, on_unknown_kind="release")
        )
        await submit(engine.backend, kind="mine")
        await until(lambda: mine.free == 0, "the first start")
        (second,) = await submit(engine.backend, kind="mine")
        # The only worker that knows it is busy.
        await until(lambda: _is_offered(engine, second, *others), "the offer")
        await until(sleeping(engine, 3), "an end of all rings")
        go_on.set()
        await until(lambda: runtime.summary.completed == 2, "both ends")


async def test_a_held_task_is_released_to_them(engine: Engine, make_worker: MakeWorker) -> None:
    """As after a grant, or when the handler is missing although the claim offered it."""
    worker = await make_worker()
    (execution_id,) = await submit(engine.backend, kind="new")
    task = await worker.claim()
    assert task is not None
    await task.release_unknown()
    assert (task.finished_by, worker.free) == ("release_unknown", 1)
    assert await offered_to(engine, execution_id) == worker.config.worker_instance_id
    assert await worker.claim() is None
    worker.offer_tasks(["new"])
    resumed = await worker.claim()
    assert resumed is not None
    assert (resumed.attempt_id, resumed.attempt_index) == (task.attempt_id, 0)
    await resumed.complete()


async def test_single_claims_find_their_own_behind_a_long_queue_of_others(
    engine: Engine, make_worker: MakeWorker
) -> None:
    await submit(engine.backend, 1500, kind="other", priority=1)
    (mine,) = await submit(engine.backend, kind="mine")
    worker = await make_worker()
    worker.offer_tasks(["mine"], no_others=True)
    task = await worker.claim()
    assert task is not None
    assert task.execution_id == mine
    await task.complete()


async def test_a_handler_added_later_is_offered(engine: Engine, make_worker: MakeWorker) -> None:
    (execution_id,) = await submit(engine.backend, kind="late")
    worker = await make_worker()
    async with serving(worker, {"old": done}, on_unknown_kind="release") as runtime:
        await until(lambda: _is_offered(engine, execution_id, worker), "the offer")
        runtime.on("late", done)
        await until(lambda: runtime.summary.completed == 1, "the end")
        await until(lambda: _registered(engine, "late", "old"), "the registration")


async def _registered(engine: Engine, *tasks: str) -> bool:
    (entry,) = await engine.backend.workers.list_workers()
    return entry.tasks == tasks and not entry.takes_other_tasks


async def test_a_grant_for_an_unknown_task_is_not_lost(
    engine: Engine, make_worker: MakeWorker
) -> None:
    (execution_id,) = await submit(engine.backend, kind="new")
    worker = await make_worker()
    grant = await engine.backend.claims.issue_claim_grant(
        execution_id,
        worker_id=worker.config.worker_id,
        worker_instance_id=worker.config.worker_instance_id,
    )
    task = await worker.claim_from_grant("default", grant)
    await task.release_unknown()
    # Workers that fail other tasks offer their own all the same.
    async with serving(await make_worker(), {"new": done}) as runtime:
        await until(lambda: runtime.summary.completed == 1, "the end")
