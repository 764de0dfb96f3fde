"""Handlers and servers that break the rules: the run ends all the same, and says whose fault."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.sdk import config, info, opener, serving, state, submit, until
from tests.support.server import TestServer


async def test_a_handler_that_ignores_its_cancellation_is_left_behind_by_name(
    make_worker: MakeWorker,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("flowfabric.sdk.runtime._CANCEL_WAIT_S", 0.1)
    started, leave = asyncio.Event(), asyncio.Event()

    async def stubborn(_: ClaimedTask) -> None:
        started.set()
        while not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                continue

    worker = await make_worker()
    (job,) = await submit(engine.backend)
    async with serving(worker, {"job": stubborn}, grace_s=0):
        await started.wait()
    (record,) = [r for r in caplog.records if getattr(r, "action", "") == "task_left_behind"]
    assert f"job {job.short} ignored its cancellation" in record.getMessage()
    assert await state(engine.backend, job) == "waiting"
    leave.set()


async def test_leaving_does_not_wait_for_a_server_that_is_gone() -> None:
    """Not even though every call may wait for a minute."""
    server = TestServer("--appendonly", "yes")
    try:
        connect = opener(server.url, request_timeout=60)
        address = parse_url(server.url)
        backend = await ValkeyBackend.connect(address, prepare_with=PartitionCounts())
        await backend.meta.prepare()
        await backend.aclose()
        worker = await Worker.connect(config(scanners=True), connect)
        async with asyncio.timeout(30):
            async with serving(worker, {}):
                await asyncio.to_thread(server.kill)
            await worker.aclose()
    finally:
        server.stop()


@pytest.mark.parametrize("threaded", [False, True])
async def test_generator_exit_is_a_failure_like_any_other(
    engine: Engine, valkey: TestServer, threaded: bool
) -> None:
    app = ff.Fabric(valkey.url)

    @app.task("odd")
    async def later() -> None:
        raise GeneratorExit

    def direct() -> None:
        raise GeneratorExit

    if threaded:
        del app.tasks["odd"]
        app.task("odd")(direct)
    async with app, app.worker(scanners=False):
        run: ff.Run[Any] = await app.submit("odd")
        with pytest.raises(ff.ExecutionFailed, match="handler crashed: GeneratorExit"):
            await run.result(timeout=20)
        assert (await info(engine.backend, run.id)).failure_category == "handler_panic"


async def test_a_coroutine_that_python_closes_has_not_failed(
    make_worker: MakeWorker, engine: Engine
) -> None:
    """That is a GeneratorExit, too, but there is nobody left to run a report."""
    started = asyncio.Event()

    async def endless(_: ClaimedTask) -> None:
        started.set()
        await asyncio.Event().wait()

    worker = await make_worker()
    (job,) = await submit(engine.backend)
    async with serving(worker, {"job": endless}, grace_s=0) as runtime:
        await started.wait()
        (task,) = runtime._running
        # As far as its first wait, and in no task of its own.
        coroutine = runtime._handle(task)
        coroutine.send(None)
        coroutine.close()
    assert await state(engine.backend, job) == "active"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("kind", ["huge", "caused", "grouped", "unprintable"])
async def test_what_is_logged_of_a_failure_has_a_limit(
    make_worker: MakeWorker,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    huge = ValueError("x" * 5_000_000)

    async def broken(_: ClaimedTask) -> None:
        if kind == "huge":
            raise huge
        if kind == "caused":
            raise KeyError("small") from huge
        if kind == "grouped":
            raise ExceptionGroup("small", [huge])
        raise Unprintable

    worker = await make_worker()
    (job,) = await submit(engine.backend)
    async with serving(worker, {"job": broken}) as runtime:
        await until(lambda: runtime.summary.failed == 1, "the failure")
    (record,) = [r for r in caplog.records if getattr(r, "action", "") == "task_failed"]
    text = logging.Formatter().format(record)
    assert len(text) < 20_000
    assert "broken" in text
    assert "Logging error" not in capsys.readouterr().err
    stored = (await info(engine.backend, job)).failure_reason or ""
    named = {
        "huge": "ValueError: xxx",
        "caused": "KeyError: 'small'",
        "grouped": "ExceptionGroup: small",
        "unprintable": "Unprintable: (its message cannot be shown)",
    }
    assert stored.startswith(named[kind])
