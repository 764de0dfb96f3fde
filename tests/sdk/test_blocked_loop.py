"""A task that blocks the event loop keeps its own lease, not those of its neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Self

import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.runtime import Handler, RunSummary, WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.sdk import config, info, opener, serving, state, submit, until
from tests.support.server import TestServer

NEIGHBOURS = 5
_watch_logger = logging.getLogger("flowfabric.sdk.runtime")


@contextlib.asynccontextmanager
async def serving_in_a_thread(
    url: str, handlers: dict[str, Handler], release: Callable[[], None], **settings: Any
) -> AsyncGenerator[WorkerRuntime]:
    """A runtime whose loop the test's own loop survives."""
    ready: asyncio.Future[WorkerRuntime] = asyncio.get_running_loop().create_future()
    tell = asyncio.get_running_loop().call_soon_threadsafe

    async def serve() -> None:
        async with await Worker.connect(config(**settings), opener(url)) as worker:
            runtime = WorkerRuntime(worker)
            for kind, handler in handlers.items():
                runtime.on(kind, handler)
            stop.append(lambda: loop.call_soon_threadsafe(runtime.stop))
            loop = asyncio.get_running_loop()
            tell(ready.set_result, runtime)
            await runtime.run()

    stop: list[Callable[[], object]] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield await ready
    finally:
        release()
        stop[0]()
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()


class Block:
    """Blocks the event loop until released, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how
        self._released = threading.Event()
        self._reading, self._writing = os.pipe()
        self._handler = logging.StreamHandler(os.fdopen(self._writing, "w"))
        # The test itself must not wait for a pipe that it empties.
        own = threading.get_ident()
        self._handler.addFilter(lambda record: record.thread != own)
        self._logger = logging.getLogger("flowfabric")
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._logger.addHandler(self._handler)
        _watch_logger.addFilter(self._hold_warning)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        _watch_logger.removeFilter(self._hold_warning)
        self._logger.removeHandler(self._handler)
        self._handler.stream.close()
        if self._reader is not None:
            self._reader.join()
        os.close(self._reading)

    async def hold(self) -> None:
        match self.how:
            case "wait":
                self._released.wait(30)
            case "spin":
                while not self._released.is_set():
                    pass
            case "child":
                await asyncio.create_task(Block.hold(self._as("wait")))
            case _:
                # A pipe holds 64 KiB, and nobody reads this one.
                self._logger.warning("x" * 200_000)

    def _as(self, how: str) -> Block:
        self.how = how
        return self

    def _hold_warning(self, record: logging.LogRecord) -> bool:
        """Keep the warning that the loop is blocked until it is not; later lines must follow it."""
        return record.levelno != logging.WARNING or self._released.wait(30)

    def release(self) -> None:
        self._released.set()
        if self._reader is None:
            self._reader = threading.Thread(target=self._read)
            self._reader.start()

    def _read(self) -> None:
        while os.read(self._reading, 1 << 16):
            pass


@pytest.fixture(params=["wait", "spin", "child", "log"])
def block(request: pytest.FixtureRequest) -> Iterator[Block]:
    with Block(request.param) as block:
        yield block


async def test_neighbours_of_a_task_that_blocks_the_loop_go_to_another_worker(
    engine: Engine,
    make_worker: MakeWorker,
    valkey: TestServer,
    block: Block,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started, lost = list[ClaimedTask](), list[str]()

    async def blocks(task: ClaimedTask) -> None:
        await until(lambda: len(started) == NEIGHBOURS, "the neighbours")
        await block.hold()

    async def waits(task: ClaimedTask) -> None:
        started.append(task)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert task.lease_lost is not None
            lost.append(task.lease_lost.reason)
            # One that has its result by then is released like the others.
            if task is not started[0]:
                raise

    async def quick(task: ClaimedTask) -> None:
        pass

    (blocker,) = await submit(engine.backend, kind="blocks")
    neighbours = await submit(engine.backend, NEIGHBOURS, kind="waits")
    settings = {"lease_ttl_ms": 3000, "block_limit_ms": 3000, "max_concurrent_tasks": 6}
    handlers: dict[str, Handler] = {"blocks": blocks, "waits": waits, "quick": quick}
    async with serving_in_a_thread(valkey.url, handlers, block.release, **settings) as blocked:
        async with serving(await make_worker(max_concurrent_tasks=6), {"waits": quick}) as healthy:
            await until(lambda: healthy.summary.completed == NEIGHBOURS, "the hand-over", 15)
        for execution_id in neighbours:
            seen = await info(engine.backend, execution_id)
            assert (seen.public_state.value, seen.total_attempt_count) == ("completed", 1)
        seen = await info(engine.backend, blocker)
        assert (seen.public_state.value, seen.total_attempt_count) == ("active", 1)

        # The loop turns again: the neighbours stop, and the worker claims again.
        block.release()
        await until(lambda: blocked.summary.completed == 1, "the end of the blocking task")
        await submit(engine.backend, kind="quick")
        await until(lambda: blocked.summary.completed == 2, "another claim")
    assert blocked.summary == RunSummary(completed=2, released=NEIGHBOURS)
    assert len(lost) == NEIGHBOURS
    assert "the event loop was blocked" in lost[0]
    await until(lambda: "runs again" in caplog.text, "the last log line")
    warning, critical = [r for r in caplog.records if r.__dict__.get("action") == "loop_blocked"]
    assert (warning.levelno, critical.levelno) == (logging.WARNING, logging.CRITICAL)
    for record in (warning, critical):
        assert record.__dict__["execution_id"] == blocker
        assert f"blocks {blocker.short} has blocked the event loop" in record.getMessage()
        assert "in hold" in (record.stack_info or "")
    assert f"releasing {NEIGHBOURS} other executions" in critical.getMessage()


async def test_a_neighbour_whose_attempt_timed_out_is_released_at_once(
    engine: Engine, valkey: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    started = list[ClaimedTask]()

    async def blocks(task: ClaimedTask) -> None:
        await until(lambda: len(started) == 2, "the neighbours")
        await block.hold()

    async def waits(task: ClaimedTask) -> None:
        started.append(task)
        await asyncio.Event().wait()

    timed = {"timeout_policy": {"attempt_timeout_ms": 500}}
    (blocker,) = await submit(engine.backend, kind="blocks", policy=timed)
    (overdue,) = await submit(engine.backend, kind="waits", policy=timed)
    (patient,) = await submit(engine.backend, kind="waits")
    settings = {"lease_ttl_ms": 3000, "block_limit_ms": 60_000, "max_concurrent_tasks": 3}
    handlers: dict[str, Handler] = {"blocks": blocks, "waits": waits}
    with Block("wait") as block:
        async with serving_in_a_thread(valkey.url, handlers, block.release, **settings):

            async def ended() -> bool:
                return await state(engine.backend, overdue) == "expired"

            await until(ended, "the end of the neighbour")
            assert await state(engine.backend, patient) == "active"
            assert await state(engine.backend, blocker) == "active"
            (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
            assert "releasing 1 other execution." in record.getMessage()
            assert re.search(r"for [012] s: ", record.getMessage()), "it waited for the warning"
            block.release()
            await engine.backend.executions.cancel_execution(patient, "the test is over")


def test_the_limit_is_three_leases_unless_set() -> None:
    assert WorkerConfig(lease_ttl_ms=2_000).longest_block_s == 6.0
    assert WorkerConfig(block_limit_ms=1_500).longest_block_s == 1.5
    with pytest.raises(ConfigError, match="block_limit_ms: must be at least 1000"):
        WorkerConfig(block_limit_ms=999)
