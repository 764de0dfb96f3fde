"""A claimed attempt as a context manager, its failure reports, and its permit."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from typing import Any

import pytest

from flowfabric.core.errors import (
    BudgetExceeded,
    PermanentError,
    RetryableError,
)
from flowfabric.sdk.failures import describe
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import RETRY, claimed, info, seeded, state, submit, until
from tests.support.server import TestServer

# --- as a context manager -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (RetryableError("again"), "transient"),
        (PermanentError("never"), "permanent"),
        (TimeoutError("slow"), "timeout"),
        (BudgetExceeded("tokens"), "budget_exceeded"),
        (ValueError("bad"), "handler_error"),
    ],
)
async def test_exception_in_the_block_fails_the_attempt(
    engine: Engine, make_worker: MakeWorker, error: Exception, category: str
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    with pytest.raises(type(error)):
        async with task:
            raise error
    seen = await info(engine.backend, task.execution_id)
    assert (seen.public_state.value, seen.failure_category) == ("failed", category)
    assert type(error).__name__ in (seen.failure_reason or "")
    assert worker.free == 1


async def test_block_without_an_end_gives_the_lease_back(
    engine: Engine, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await make_worker()
    async with await claimed(worker, engine) as task:
        pass
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "dropped without terminal operation" in warning.message
    assert getattr(warning, "execution_id", None) == task.execution_id
    assert (await state(engine.backend, task.execution_id), worker.free) == ("waiting", 1)
    again = await worker.claim()
    assert again is not None
    assert again.attempt_id == task.attempt_id
    await again.complete()


async def test_block_with_an_end_warns_of_nothing(
    engine: Engine, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await make_worker()
    async with await claimed(worker, engine) as task:
        await task.complete()
    task = await claimed(worker, engine)
    with pytest.raises(ValueError, match="late"):
        await ends_and_raises(task)
    assert await state(engine.backend, task.execution_id) == "completed"
    assert caplog.text == ""


async def ends_and_raises(task: ClaimedTask) -> None:
    async with task:
        await task.complete()
        raise ValueError("late")


async def test_complete_on_exit_when_configured(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(complete_on_exit=True)
    async with await claimed(worker, engine) as task:
        pass
    assert await state(engine.backend, task.execution_id) == "completed"


async def test_cancelled_block_gives_the_lease_back(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    entered = asyncio.Event()

    async def block() -> None:
        async with task:
            entered.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(block())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await state(engine.backend, task.execution_id), worker.free) == ("waiting", 1)


async def test_unreachable_server_hides_no_exception_of_the_block(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.1)
    task = await claimed(worker, engine)

    async def block() -> None:
        async with task:
            proxy.down()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await block()
    assert (task.finished_by, worker.free) == ("abandoned", 1)
    proxy.up()


@pytest.mark.parametrize("dropped_by", ["block", "call", "garbage collection"])
async def test_dropping_every_task_does_not_spin(
    engine: Engine, make_worker: MakeWorker, dropped_by: str
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    started = time.monotonic()
    for _ in range(3):
        if dropped_by == "block":
            async with task:
                pass
        elif dropped_by == "call":
            await task.discard()
        del task
        gc.collect()
        task = await next_task(worker)
    assert time.monotonic() - started >= 0.3
    await task.complete()


async def next_task(worker: Worker) -> ClaimedTask:
    found: list[ClaimedTask] = []

    async def claims() -> bool:
        found.extend(await worker.claim_many(1))
        return bool(found)

    await until(claims, "the next claim")
    return found.pop()


async def test_forgotten_task_is_noticed(
    engine: Engine, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    execution_id = task.execution_id
    del task
    gc.collect()
    await until(lambda: worker.free == 1, "the permit")
    await until(lambda: waiting(engine, execution_id), "the lease")
    assert caplog.text.count("dropped without terminal operation") == 1
    assert len(worker.keeper) == 0


async def waiting(engine: Engine, execution_id: Any) -> bool:
    return await state(engine.backend, execution_id) == "waiting"


# --- reasons ----------------------------------------------------------------------------


def test_report_has_the_chain_first_and_the_place_after() -> None:
    def inner() -> None:
        raise KeyError("k")

    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        report = describe(error).report
        first, header, *where = report.splitlines()
        assert first == "ValueError: outer: KeyError: 'k'"
        assert header == "Traceback (most recent call last):"
        assert __file__ in where[0]

    def handler() -> None:
        inner()

    try:
        handler()
    except KeyError as error:
        first, *where = describe(error).report.splitlines()
        assert first == "KeyError: 'k'"
        assert "in inner" in where[-2]


def test_report_fits_and_survives_anything() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe(Hostile()).report.startswith("Hostile: (its message cannot be shown)")
    assert len(describe(ValueError("x" * 100_000)).report.encode()) <= 8192
    loop = ValueError("a")
    loop.__cause__ = KeyError("b")
    loop.__cause__.__cause__ = loop
    assert describe(loop).report == "ValueError: a: KeyError: 'b'"
    assert describe(SystemExit(3)).report == "handler crashed: SystemExit: 3"

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("é" * 3000)

    with pytest.raises(ValueError, match="é") as caught:
        deep(200)
    assert len(describe(caught.value).report.encode()) <= 8192


# --- permits ------------------------------------------------------------------------------


async def end_somehow(task: ClaimedTask, engine: Engine, rng: random.Random) -> None:
    match rng.randrange(9):
        case 5:
            await engine.backend.leases.revoke_lease(task.execution_id)
            await task.complete()
        case 6:
            async with task:
                raise ValueError("x")
        case 7:
            async with asyncio.timeout(0):
                await task.complete()
        case 8:
            return  # forgotten
        case simple:
            ends = (
                lambda: task.complete(b"x"),
                lambda: task.fail("x", rng.choice(["transient", "permanent"])),
                task.cancel,
                lambda: task.delay_execution(1),
                task.discard,
            )
            await ends[simple]()


async def test_permits_are_never_lost_or_doubled(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """Random ways to end tasks, through a connection that breaks now and then."""
    rng = seeded("permits")
    permits = 8
    worker = await make_worker(
        proxy.url, valkey.url, request_timeout=0.5, max_concurrent_tasks=permits
    )
    await submit(engine.backend, 400, policy=RETRY)

    async def one() -> None:
        task = await worker.claim()
        if task is None:
            return
        try:
            async with task:
                await end_somehow(task, engine, rng)
        except (Exception, asyncio.CancelledError):  # noqa: BLE001
            pass

    for round_ in range(30):
        if rng.random() < 0.2:
            proxy.cut()
        ones = [asyncio.create_task(one()) for _ in range(rng.randrange(1, 2 * permits))]
        if rng.random() < 0.3:
            rng.choice(ones).cancel()
        await asyncio.gather(*ones, return_exceptions=True)
        del ones
        gc.collect()
        await until(lambda: worker.free == permits, f"all permits after round {round_}")
        assert len(worker.keeper) == 0
