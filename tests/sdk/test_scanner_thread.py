"""The scanners of a worker go on whatever its handlers do to the event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ConfigError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.keys import LEADERS_TAG, PARTITIONS, PLACES
from flowfabric.engine.valkey.keys import leader as leader_key
from flowfabric.scanners import ScannerSettings
from flowfabric.scanners.jobs import DoorbellScanner, DueScanner
from flowfabric.sdk.runtime import RunSummary, WorkerRuntime
from flowfabric.sdk.scanner_thread import ScannerThread
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import config, info, opener, serving, state, submit, until
from tests.support.server import TestServer

ONE_SECOND = {"timeout_policy": {"attempt_timeout_ms": 1000}}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ff-scanners"]


@pytest.fixture(autouse=True)
async def no_thread_is_left() -> AsyncIterator[None]:
    yield
    assert threads() == []


async def nothing(task: ClaimedTask) -> None:
    pass


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def spin(seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


async def clients(engine: Engine) -> int:
    listed: Any = await engine.backend.transport.call("CLIENT", "LIST")
    text = listed if isinstance(listed, str) else listed.decode()
    return len(text.splitlines())


async def leader(engine: Engine) -> Any:
    return await engine.backend.transport.call("GET", leader_key(LEADERS_TAG, ""))


def leads(engine: Engine) -> Any:
    async def found() -> bool:
        return await leader(engine) is not None

    return found


def is_in(engine: Engine, execution_id: Any, *expected: str) -> Any:
    async def reached() -> bool:
        return await state(engine.backend, execution_id) in expected

    return reached


# --- handlers that hold the event loop ------------------------------------------------------


@pytest.mark.parametrize("block", [sleep, spin])
async def test_attempt_of_a_blocking_handler_expires_on_time(
    engine: Engine, make_worker: MakeWorker, block: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own process is the only one there; the end that comes too late is refused and told."""
    started = 0

    async def handler(task: ClaimedTask) -> bytes:
        nonlocal started
        started = await engine.now()
        block(3.0)
        return b"too late"

    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": handler}) as runtime:
        await until(leads(engine), "scanners")
        (execution_id,) = await submit(engine.backend, policy=ONE_SECOND)
        await until(lambda: runtime.summary != RunSummary(), "the end", 20)
    assert runtime.summary == RunSummary(abandoned=1)
    seen = await info(engine.backend, execution_id)
    assert (seen.public_state.value, seen.failure_category) == ("expired", "timeout")
    (ended,) = [e for e in await engine.events(execution_id) if e.type == "completion"]
    assert 900 <= ended.at - started < 2900
    (record,) = [r for r in caplog.records if r.__dict__.get("action") == "task_abandoned"]
    assert record.levelno == logging.ERROR


@pytest.mark.parametrize("retry", [False, True])
async def test_scanner_that_is_faster_than_the_worker_is_no_surprise(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, retry: bool
) -> None:
    """The handler comes back to the loop after the scanner has ended its attempt."""

    async def handler(task: ClaimedTask) -> None:
        if task.attempt_index == 0:
            expired = expire(valkey.url, task.execution_id)
            scanner = threading.Thread(target=asyncio.run, args=(expired,))
            scanner.start()
            # Holds the loop, so that its own timer is overdue at the next await.
            scanner.join()
            await asyncio.Event().wait()

    policy: dict[str, Any] = {"timeout_policy": {"attempt_timeout_ms": 100}}
    if retry:
        policy["retry_policy"] = {
            "max_retries": 1, "retry_on_timeout": True,
            "backoff": {"type": "fixed", "delay_ms": 10},
        }  # fmt: skip
    worker = await make_worker(scanners=retry)
    async with serving(worker, {"job": handler}) as runtime:
        (execution_id,) = await submit(engine.backend, policy=policy)
        await until(is_in(engine, execution_id, "expired", "completed"), "the end")
        await until(lambda: worker.free == 1, "the permit")
    expected = RunSummary(completed=1, retried=1) if retry else RunSummary(failed=1)
    assert runtime.summary == expected


def serve_alone(url: str) -> None:
    """A worker process with one handler that blocks its event loop."""
    app = ff.Fabric(url)

    @app.task(timeout=1)
    async def stuck() -> None:
        time.sleep(60)  # noqa: ASYNC251 - the point of the test

    assert stuck.name

    async def main() -> None:
        async with app:
            await app.worker(concurrency=2).run()

    asyncio.run(main())


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_process_with_a_blocked_loop_still_scans(
    engine: Engine, valkey: TestServer, method: str
) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=serve_alone, args=(valkey.url,))
    process.start()
    try:
        (stuck,) = await submit(engine.backend, kind="stuck", policy=ONE_SECOND)
        await until(is_in(engine, stuck, "active"), "the handler", 20)
        # The blocked worker cannot take it: only its scanners move it.
        (delayed,) = await submit(engine.backend, delay_ms=300)
        await until(is_in(engine, stuck, "expired"), "the expiry", 5)
        await until(is_in(engine, delayed, "waiting"), "the promotion", 5)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


# --- start and stop -------------------------------------------------------------------------


async def test_stop_gives_the_lease_up_and_leaves_nothing(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker(scanners=True)
    before = await clients(engine)
    async with serving(worker, {"job": nothing}):
        await until(leads(engine), "scanners")
        assert threads() == ["ff-scanners"]
    assert await leader(engine) is None

    async def gone() -> bool:
        return await clients(engine) == before

    await until(gone, "their connection")


async def test_signal_ends_a_process_with_scanners(engine: Engine, valkey: TestServer) -> None:
    context: Any = multiprocessing.get_context("spawn")
    process = context.Process(target=serve_alone, args=(valkey.url,))
    process.start()
    try:
        await until(leads(engine), "scanners", 20)
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.to_thread(process.join, 10)
        assert process.exitcode == 0
        assert await leader(engine) is None
    finally:
        process.kill()


async def test_one_worker_may_run_twice(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(scanners=True)
    for _ in range(2):
        async with serving(worker, {"job": nothing}):
            await until(leads(engine), "scanners")


async def test_stop_before_and_while_connecting(valkey: TestServer, engine: Engine) -> None:
    dialled = threading.Event()

    async def never() -> ValkeyBackend:
        dialled.set()
        await asyncio.Event().wait()
        raise AssertionError

    early = ScannerThread(never, ScannerSettings(), engine.backend)
    early.stop()
    early.start()
    assert threads() == []
    scanners = ScannerThread(never, ScannerSettings(), engine.backend)
    starting = asyncio.create_task(asyncio.to_thread(scanners.start))
    await asyncio.to_thread(dialled.wait)
    await asyncio.to_thread(scanners.stop)
    await starting


@pytest.mark.parametrize("error", [TransportError("auth", "WRONGPASS"), ConfigError("test", "no")])
async def test_error_at_the_start_ends_the_run(
    engine: Engine, valkey: TestServer, error: Exception
) -> None:
    good, opened = opener(valkey.url), 0

    async def connect() -> Backend:
        nonlocal opened
        opened += 1
        if opened == 3:
            raise error
        return await good()

    async with await Worker.connect(config(scanners=True), connect) as worker:
        with pytest.raises(type(error)):
            await WorkerRuntime(worker).run()


async def test_server_away_at_the_start(
    engine: Engine,
    make_worker: MakeWorker,
    valkey: TestServer,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the scanners' connection cannot be opened: work goes on, and so do they, later."""
    worker = await make_worker(valkey.url, valkey.url, proxy.url, scanners=True)
    proxy.down()
    async with serving(worker, {"job": nothing}) as runtime:
        await submit(engine.backend)
        await until(lambda: runtime.summary.completed == 1, "the work")

        def warned() -> bool:
            actions = [record.__dict__.get("action") for record in caplog.records]
            return actions.count("outage_began") == 1

        await until(warned, "a warning", 15)
        proxy.up()
        await submit(engine.backend, delay_ms=50)
        await until(lambda: runtime.summary.completed == 2, "the delayed one", 20)


async def test_scanner_that_breaks_does_not_end_the_worker(
    engine: Engine, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broke = threading.Event()

    async def broken(*_: Any) -> None:
        broke.set()
        raise RuntimeError("a bug in a scanner")

    for kind in (DueScanner, DoorbellScanner):
        monkeypatch.setattr(kind, "scan", broken)
    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": nothing}) as runtime:
        await until(broke.is_set, "the bug")
        await submit(engine.backend, 10)
        await until(lambda: runtime.summary.completed == 10, "the work")


async def test_forked_child_leaves_the_scanners_alone(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": nothing}) as runtime:
        await until(leads(engine), "scanners")
        child = os.fork()
        if child == 0:
            scanners: Any = runtime._scanners
            scanners.hint("default", "{fp:0}", "x", 1)
            scanners.stop()
            gc.collect()
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await submit(engine.backend, delay_ms=50)
        await until(lambda: runtime.summary.completed == 1, "the delayed one")


# --- what the worker's loop tells them --------------------------------------------------------


async def test_they_look_where_the_worker_found_work(engine: Engine, valkey: TestServer) -> None:
    (execution_id,) = await submit(engine.backend, partition=77, delay_ms=1)
    await engine.backend.transport.call("SREM", PARTITIONS, 77)
    await engine.backend.transport.call("DEL", PLACES)
    settings = ScannerSettings(disabled=frozenset({"index_reconciler"}))
    async with await ValkeyBackend.connect(parse_url(valkey.url)) as worker:
        scanners = ScannerThread(opener(valkey.url), settings, worker)
        await asyncio.to_thread(scanners.start)
        try:
            worker.places.known_places["{fp:77}"] = {"default"}
            # Sooner than they read the list of partitions again.
            await until(is_in(engine, execution_id, "waiting"), "the promotion", 3)
        finally:
            await asyncio.to_thread(scanners.stop)


async def test_hints_before_during_and_after(engine: Engine, valkey: TestServer) -> None:
    """A hint given from another thread promotes at its time; at any other time it does no harm."""
    settings = ScannerSettings(intervals_s={"delayed_promoter": 60, "doorbell": 60})
    async with await ValkeyBackend.connect(parse_url(valkey.url)) as worker:
        scanners = ScannerThread(opener(valkey.url), settings, worker)
        ids = await submit(engine.backend, 2, delay_ms=1500)
        due = await engine.now() + 1500
        scanners.hint("default", ids[0].tag, ids[0], due)
        await asyncio.to_thread(scanners.start)
        try:
            scanners.hint("default", ids[1].tag, ids[1], due)
            for execution_id in ids:
                await until(is_in(engine, execution_id, "waiting"), "the promotion", 5)
        finally:
            await asyncio.to_thread(scanners.stop)
        scanners.hint("default", ids[0].tag, ids[0], due)


async def expire(url: str, execution_id: ExecutionId) -> None:
    """What the scanner of another process does, as soon as it may."""
    async with await ValkeyBackend.connect(parse_url(url)) as backend:
        # The worker's own scanners may be faster, and then it is never due again.
        while await state(backend, execution_id) == "active":
            due = execution_id.tag, ExpireReason.ATTEMPT_TIMEOUT, [str(execution_id)]
            await backend.upkeep.expire_execution(*due)
            await asyncio.sleep(0.005)
