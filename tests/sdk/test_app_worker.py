"""Tasks of an application on a worker: `def` handlers, decoding, interruption."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app.stopping import HandlerThreads, Interrupted
from tests.support.engine import Engine
from tests.support.sdk import info, until
from tests.support.server import TestServer


@pytest.fixture
def app(engine: Engine, valkey: TestServer) -> ff.Fabric:
    return ff.Fabric(valkey.url)


async def failure(run: ff.Run[Any]) -> ff.RunError:
    with pytest.raises(ff.RunError) as caught:
        await run.result(timeout=10)
    return caught.value


async def test_def_handlers_run_beside_the_event_loop(app: ff.Fabric) -> None:
    """As many at once as there are permits, each on its own thread, and the loop stays free."""
    gate = threading.Barrier(4)
    names: set[str] = set()

    @app.task()
    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        gate.wait(10)
        return number * 2

    async with app, app.worker(concurrency=4, scanners=False):
        runs = await app.submit_many(work, [[n] for n in range(8)])
        assert [await run.result(10) for run in runs] == [n * 2 for n in range(8)]
    assert len(names) == 4
    await until(lambda: not handler_threads(), "the end of the threads")


def handler_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ff-handler")]


async def test_context_variables_reach_the_thread(app: ff.Fabric) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    @app.task()
    def read() -> str:
        return variable.get()

    variable.set("from the worker")
    async with app, app.worker(concurrency=1, scanners=False):
        assert await (await app.submit(read)).result(10) == "from the worker"


async def test_payload_that_does_not_fit_is_no_handler_error(app: ff.Fabric) -> None:
    called: list[Any] = []

    @app.task()
    async def later(number: int, other: int) -> None:
        called.append(number)

    @app.task()
    def threaded(number: int) -> None:
        called.append(number)

    async with app, app.worker(concurrency=2, scanners=False):
        client = await app.client()
        for kind, payload in (
            ("later", b"{not json"),
            ("later", b'["text", 1]'),
            ("later", b"[1]"),
            ("later", b"[1, 2, 3]"),
            ("threaded", b"[]"),
            ("threaded", b'{"unknown": 1}'),
        ):
            created = await client.submit(kind, payload)
            outcome = await client.wait(created.execution_id, 10)
            assert outcome.failure_category == "extractor_payload_decode", payload
            assert (outcome.failure_reason or "").startswith(f"{kind}: ")
    assert called == []


async def test_handlers_own_type_errors_are_its_failures(app: ff.Fabric) -> None:
    @app.task()
    def threaded() -> None:
        raise TypeError("mine")

    @app.task()
    def stops() -> None:
        raise StopIteration

    async with app, app.worker(concurrency=2, scanners=False):
        for task, reason in (
            (threaded, "TypeError: mine"),
            (stops, "RuntimeError: the handler raised StopIteration"),
        ):
            error = await failure(await app.submit(task))
            assert error.info.failure_category == "handler_error"
            assert (error.info.failure_reason or "").startswith(reason)


async def test_a_result_that_cannot_be_stored_is_no_reason_to_do_the_work_again(
    app: ff.Fabric,
) -> None:
    done: list[str] = []

    async def inner() -> int:
        return 5

    @app.task(retry=5)
    async def odd() -> Any:
        done.append("odd")
        return object()

    @app.task(retry=5)
    def unawaited() -> Any:
        done.append("unawaited")
        return inner()

    @app.task(retry=5)
    async def lazy() -> Any:
        done.append("lazy")
        return (number for number in range(3))

    reasons = {
        odd: "odd: the result cannot be written as JSON: cannot encode object",
        unawaited: "unawaited: the result is a coroutine: await it and return its value",
        lazy: "lazy: the result is a generator: return a list, or write output with `ctx.stream()`",
    }
    async with app, app.worker(scanners=False):
        for task, reason in reasons.items():
            error = await failure(await app.submit(task))
            assert (error.info.failure_reason, error.info.failure_category) == (reason, "permanent")
    assert done == ["odd", "unawaited", "lazy"]


async def test_lost_lease_interrupts_a_def_handler(app: ff.Fabric, engine: Engine) -> None:
    """One that computes stops at once; the loss is told by the exception and by the context."""
    started = threading.Event()
    told: list[Any] = []

    @app.task()
    def spin(ctx: ff.SyncContext) -> None:
        started.set()
        try:
            try:
                while True:
                    pass
            except Exception:  # noqa: BLE001 - must not catch the interruption
                told.append("swallowed")
        except Interrupted as error:
            told.extend((error.reason, ctx.lease_healthy))
            with pytest.raises(ff.LeaseLost):
                ctx.check()
            raise

    async with app:
        worker = app.worker(concurrency=1, lease_ttl=1, scanners=False)
        async with worker:
            run = await app.submit(spin)
            await asyncio.to_thread(started.wait)
            await run.cancel("enough")
            await until(lambda: len(told) == 2, "the interruption")
            lost, healthy = told
            assert isinstance(lost, ff.LeaseLost)
            assert (lost.code, healthy) == ("execution_not_active", False)
            runtime: Any = worker._runtime
            await until(lambda: runtime.worker.free == 1, "the permit")


async def test_permit_is_taken_until_the_thread_has_stopped(
    app: ff.Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_ATTEMPT_TIMEOUT_INTERVAL_MS", "100")
    started, leave = threading.Event(), threading.Event()
    running: list[int] = []

    @app.task(timeout="100ms")
    def stuck(number: int) -> None:
        running.append(number)
        started.set()
        leave.wait()

    async with app:
        worker = app.worker(concurrency=1)
        # Before the worker: scanners see new partitions only after a while.
        first = await app.submit(stuck, 1)
        async with worker:
            await asyncio.to_thread(started.wait)
            # The engine ends it, but the thread waits inside C code.
            await first.wait(10)
            second = await app.submit(stuck, 2)
            assert running == [1]
            runtime: Any = worker._runtime
            assert runtime.worker.free == 0
            leave.set()
            await second.wait(10)
    assert running == [1, 2]


async def test_attempt_timeout_interrupts_a_def_handler(app: ff.Fabric) -> None:
    ended = threading.Event()

    @app.task(timeout="100ms")
    def spin() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    async with app, app.worker(concurrency=1):
        error = await failure(await app.submit(spin))
        assert isinstance(error, ff.ExecutionExpired)
        assert await asyncio.to_thread(ended.wait, 5)


async def test_context_in_both_kinds_of_handler(
    app: ff.Fabric, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task()
    def threaded(ctx: ff.SyncContext) -> list[Any]:
        ctx.progress(10, "thread")
        ctx.log.warning("seen")
        return [ctx.kind, ctx.attempt, ctx.lease_epoch, ctx.lease_healthy, ctx.shutting_down]

    @app.task()
    async def later(ctx: ff.Context) -> list[Any]:
        await ctx.progress(20, "loop")
        ctx.check()
        return [ctx.kind, ctx.attempt, ctx.lease_epoch, ctx.lease_healthy, ctx.tags["a"]]

    async with app, app.worker(concurrency=2, scanners=False):
        run = await app.submit(threaded)
        assert await run.result(10) == ["threaded", 1, 1, True, False]
        assert (await info(engine.backend, run.id)).progress_message == "thread"
        (record,) = [r for r in caplog.records if r.name == "flowfabric.task.threaded"]
        assert getattr(record, "execution_id", None) == str(run.id)
        run = await app.submit(later.options(tags={"a": "b"}))
        assert await run.result(10) == ["later", 1, 1, True, "b"]


async def test_stop_before_the_run_has_begun(app: ff.Fabric) -> None:
    @app.task()
    def task() -> None: ...

    worker = app.worker(scanners=False)
    worker.stop()
    async with app:
        await app.client()
        assert (await asyncio.wait_for(worker.run(signals=False), 10)).completed == 0


def test_worker_without_tasks_is_refused(valkey: TestServer) -> None:
    with pytest.raises(ff.ConfigError, match="no tasks"):
        ff.Fabric(valkey.url).worker()


# --- threads, by themselves -------------------------------------------------------------------


async def test_interrupt_before_the_start_and_only_once() -> None:
    threads = HandlerThreads()
    inside, stop = threading.Event(), threading.Event()
    cleaned: list[int] = []

    def spin() -> None:
        # By itself: Python 3.13.0 does not count the end of a loop as part of the `try` around it.
        while not stop.is_set():
            pass

    def careful() -> None:
        try:
            inside.set()
            spin()
        except Interrupted:
            # A second interruption must not break the first one's cleaning up.
            cleaned.append(0)
            for _ in range(200_000):
                pass
            cleaned.append(1)
            raise

    call = threads.start(careful)
    await until(inside.is_set, "the start")
    for number in range(20):
        call.interrupt(ValueError(f"stop {number}"))
    with pytest.raises(Interrupted, match="stop 0"):
        await call.future
    assert cleaned == [0, 1]
    refused = threads.start(lambda: cleaned.append(1))
    # It may have been too quick; then there is nothing to interrupt.
    refused.interrupt(ValueError("too late"))
    await asyncio.wait([refused.future])
    assert await threads.start(lambda: 5).future == 5
    threads.close()


async def test_interruption_never_reaches_the_next_call() -> None:
    """Calls that end just when they are interrupted, a thousand times on the same threads."""
    threads = HandlerThreads()
    for _ in range(1000):
        call = threads.start(lambda: sum(range(50)))
        if call._thread is not None:
            call.interrupt(ValueError("stop"))
        await asyncio.wait([call.future])
        error = call.future.exception()
        assert error is None or isinstance(error, Interrupted)
        assert await threads.start(lambda: 7).future == 7
    threads.close()
    await until(lambda: not handler_threads(), "the end of the threads")


async def test_loop_is_not_blocked(app: ff.Fabric, caplog: pytest.LogCaptureFixture) -> None:
    @app.task()
    def sleepy() -> None:
        time.sleep(0.3)

    async with app, app.worker(concurrency=1, scanners=False):
        run = await app.submit(sleepy)
        ticks = 0
        result = asyncio.create_task(run.result(10))
        while not result.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 10
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
