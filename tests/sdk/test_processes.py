"""Workers as processes: signals, forks, spawns."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.contracts.streams import Frame
from tests.support import programs
from tests.support.engine import Engine
from tests.support.sdk import info, state, until, watch_of
from tests.support.server import TestServer


class Program:
    """A worker process and what it noted."""

    def __init__(self, url: str, folder: Path, *options: str) -> None:
        self._notes = folder / "notes"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs", url, str(folder), *options]
        )

    @property
    def lines(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    async def noted(self, line: str) -> None:
        await until(lambda: line in self.lines, f"{line!r} in {self.lines}", 20)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def ended(self, timeout: float = 20) -> int:
        return await asyncio.to_thread(self.process.wait, timeout)


@pytest.fixture
def program(
    engine: Engine, valkey: TestServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Program]:
    started = Program(valkey.url, tmp_path, *getattr(request, "param", ()))
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


async def submitted(valkey: TestServer, kind: str) -> ff.Run[Any]:
    # The run outlives its application; only its id is used.
    async with ff.Fabric(valkey.url) as app:
        return await app.submit(kind)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_lets_the_handler_finish(
    program: Program, engine: Engine, valkey: TestServer, number: int
) -> None:
    run = await submitted(valkey, "patient")
    await program.noted("started 1 1")
    program.signal(number)
    assert await program.ended() == 0
    assert "told" in program.lines
    assert program.lines[-1].startswith("summary RunSummary(completed=1, failed=0")
    assert await state(engine.backend, run.id) == "completed"
    assert await engine.backend.workers.list_workers() == []


@pytest.mark.parametrize("program", [("grace_s=0.1",)], indirect=True)
async def test_after_the_grace_the_same_attempt_resumes_elsewhere(
    program: Program, engine: Engine, valkey: TestServer, tmp_path: Path
) -> None:
    run = await submitted(valkey, "endless")
    await program.noted("started 1 1")
    program.signal()
    assert await program.ended() == 0
    assert "released=1" in program.lines[-1]
    assert await state(engine.backend, run.id) == "waiting"
    other = Program(valkey.url, tmp_path)
    await other.noted("started 1 2")
    other.signal()
    assert await other.ended() == 0
    seen = await info(engine.backend, run.id)
    assert (seen.public_state.value, seen.total_attempt_count) == ("completed", 1)


@pytest.mark.parametrize("program", [("grace_s=0.1", "on_shutdown=fail")], indirect=True)
async def test_on_shutdown_fail(program: Program, engine: Engine, valkey: TestServer) -> None:
    run = await submitted(valkey, "endless")
    await program.noted("started 1 1")
    program.signal()
    assert await program.ended() == 0
    assert (await info(engine.backend, run.id)).failure_category == "worker_shutdown"


@pytest.mark.parametrize("kind", ["endless", "blocking", "stubborn"])
async def test_second_signal_exits_at_once(
    program: Program, engine: Engine, valkey: TestServer, kind: str
) -> None:
    """Also while a handler holds the event loop, or a thread that cannot be stopped."""
    await submitted(valkey, kind)
    await program.noted("started 1 1")
    program.signal()
    # Only two signals that are not merged by the system count as two.
    asked = time.monotonic()
    while program.process.poll() is None and time.monotonic() - asked < 10:
        await asyncio.sleep(0.1)
        program.signal()
    assert await program.ended() == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 5


@pytest.mark.parametrize("program", [("grace_s=0.1",)], indirect=True)
async def test_stubborn_thread_does_not_hold_up_the_end(
    program: Program, engine: Engine, valkey: TestServer
) -> None:
    run = await submitted(valkey, "stubborn")
    await program.noted("started 1 1")
    program.signal()
    assert await program.ended(15) == 0
    assert "released=1" in program.lines[-1]
    assert await state(engine.backend, run.id) == "waiting"


def serve_one(url: str, folder: str) -> None:
    programs.run(url, folder, signals=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_multiprocessing_workers(
    engine: Engine, valkey: TestServer, tmp_path: Path, method: str
) -> None:
    """The parent has used its own client, with a waiter open, before it forks."""
    context: Any = multiprocessing.get_context(method)
    async with ff.Fabric(valkey.url) as app:
        early: ff.Run[Any] = await app.submit("quick", 0)
        waiting = asyncio.create_task(early.result(20))
        client = await app.client()
        await until(lambda: watch_of(client).waiting == 1, "the waiter")
        workers = [
            context.Process(target=serve_one, args=(valkey.url, str(tmp_path))) for _ in range(2)
        ]
        for worker in workers:
            worker.start()
        runs: list[ff.Run[Any]] = await app.submit_many("quick", [[n] for n in range(1, 40)])
        assert [await run.result(20) for run in runs] == list(range(1, 40))
        assert await waiting == 0
        await until(
            lambda: (tmp_path / "notes").read_text().count("ready") == 2, "both workers", 20
        )
        for worker in workers:
            os.kill(worker.pid, signal.SIGTERM)
        for worker in workers:
            await asyncio.to_thread(worker.join, 20)
            assert worker.exitcode == 0
    lines = (tmp_path / "notes").read_text().splitlines()
    pids = {line.split()[2] for line in lines if line.startswith("quick")}
    assert pids <= {str(worker.pid) for worker in workers}


async def test_async_client_in_a_forked_child(engine: Engine, valkey: TestServer) -> None:
    """A client with a reader at work is forked: the child dials for itself, waiting included."""
    app = ff.Fabric(valkey.url)
    run: ff.Run[Any] = await app.submit("job")
    waiting = asyncio.create_task(run.wait(20))
    client = await app.client()
    await until(lambda: watch_of(client).waiting == 1, "the waiter")
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            # A forked child has no running loop of its own.
            asyncio.events._set_running_loop(None)
            ended = asyncio.new_event_loop().run_until_complete(in_child(app, run))
        finally:
            os._exit(ended)
    status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    assert (await waiting).state.value == "cancelled"
    await app.aclose()


async def test_connections_of_their_own_in_a_forked_child(engine: Engine) -> None:
    """Stream reads and feeds have theirs, open while nobody uses them: a child dials new ones."""
    backend = engine.backend
    await engine.create()
    handle = (await engine.claim()).handle
    await backend.streams.append_frame(handle, Frame(payload=b"x"))
    feed = await backend.events.subscribe_lease_history("start")
    assert isinstance(await anext(feed), ff.LeaseEvent)

    async def use() -> None:
        for _ in range(3):
            page = await backend.streams.read_stream(handle.execution_id, 0)
            assert [frame.payload for frame in page.frames] == [b"x"]

    await use()
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            asyncio.events._set_running_loop(None)
            asyncio.new_event_loop().run_until_complete(use())
            ended = 0
        finally:
            os._exit(ended)
    status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    await use()
    await backend.executions.complete(handle)
    assert isinstance(await anext(feed), ff.LeaseEvent)
    await feed.aclose()


async def in_child(app: ff.Fabric, run: ff.Run[Any]) -> int:
    other: ff.Run[Any] = await app.submit("job")
    try:
        await other.wait(0.05)
    except TimeoutError:
        await run.cancel("by the child")
        return 0
    return 1
