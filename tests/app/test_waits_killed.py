"""Workers killed at each side of a wait: answers and waits are in the store, not in the process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from tests.app.waiting_program import application
from tests.support.engine import Engine
from tests.support.server import TestServer
from tests.support.waiting import parked


class Process:
    """A worker process that tells what happens in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def tells(self, text: str) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            while line := await self._process.stdout.readline():
                if line.decode().strip() == text:
                    return
        raise AssertionError(f"it ended without telling {text!r}")

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


@contextlib.asynccontextmanager
async def worker(valkey: TestServer) -> AsyncGenerator[Process]:
    process = Process(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.app.waiting_program", valkey.url),
            stdout=asyncio.subprocess.PIPE,
        )
    )
    try:
        await process.tells("ready")
        yield process
    finally:
        await process.kill()


@pytest.fixture
async def run(
    waiting_app: ff.Fabric, engine: Engine, valkey: TestServer
) -> AsyncIterator[ff.Run[Any]]:
    app, ask = application(valkey.url)
    async with app:
        yield await app.submit(ask)


async def test_killed_while_the_execution_waits(
    run: ff.Run[Any], engine: Engine, valkey: TestServer
) -> None:
    async with worker(valkey) as first:
        await parked(engine, run, "a")
        await first.kill()
    # Nobody is there, and an answer still counts.
    await run.signal("a", "one")
    async with worker(valkey) as second:
        await second.tells("start 1 2")
        await parked(engine, run, "b")
        await run.signal("b", "two")
        assert await run.result(20) == ["one", "two", 1]


async def test_killed_after_the_answer_was_read(
    run: ff.Run[Any], engine: Engine, valkey: TestServer
) -> None:
    async with worker(valkey) as first:
        await parked(engine, run, "a")
        await run.signal("a", "one", "hold")
        await first.tells("between")
        await first.kill()
    async with worker(valkey) as second:
        # A new attempt, once the lease has run out: the answer is found, not asked for again.
        await second.tells("start 2 3")
        await parked(engine, run, "b")
        await run.signal("b", "two")
        assert await run.result(20) == ["one", "two", 2]
