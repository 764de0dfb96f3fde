"""Workers killed while they hold a budget: what was settled fits the limit, nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator

import flowfabric as ff
from flowfabric.sdk.client import Client
from tests.app.spending_program import SPENT, application
from tests.support.engine import Engine
from tests.support.scanning import idle
from tests.support.sdk import seeded
from tests.support.server import TestServer

LIMIT = 450
WORKERS = 3
KILLS = 4
PER_KILL = 10
"""More than one worker holds at a time, so that the others hold and settle while one dies."""


class Workers:
    """Worker processes that run side by side, and what they tell."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._alive: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self.holding: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()

    async def start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.app.spending_program", self._url),
            stdout=asyncio.subprocess.PIPE,
        )
        self._alive.append(process)
        ready = asyncio.Event()
        self._readers.append(asyncio.create_task(self._read(process, ready)))
        async with asyncio.timeout(60):
            await ready.wait()

    async def _read(self, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line == b"ready\n":
                ready.set()
            elif line == b"holding\n":
                self.holding.put_nowait(process)

    def is_alive(self, process: asyncio.subprocess.Process) -> bool:
        return process in self._alive

    def kill(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process, with whatever it holds."""
        self._alive.remove(process)
        process.kill()

    async def end(self) -> None:
        while self._alive:
            self.kill(self._alive[0])
        await asyncio.gather(*self._readers)


@contextlib.asynccontextmanager
async def workers(url: str) -> AsyncGenerator[Workers]:
    fleet = Workers(url)
    try:
        await asyncio.gather(*(fleet.start() for _ in range(WORKERS)))
        yield fleet
    finally:
        await fleet.end()


async def next_hold(fleet: Workers, client: Client) -> asyncio.subprocess.Process:
    """The next process that holds a part of the budget, which is never exceeded."""
    while not fleet.is_alive(process := await fleet.holding.get()):
        pass
    status = await client.budget("fleet")
    assert status.usage.get("tokens", 0) + status.reserved.get("tokens", 0) <= LIMIT
    return process


async def watch(fleet: Workers, client: Client) -> None:
    while True:
        await next_hold(fleet, client)


async def ended(run: ff.Run[int]) -> bool:
    """Whether the execution succeeded; those that found no room failed."""
    try:
        return bool(await run.result(timeout=60))
    except ff.ExecutionFailed as error:
        if error.category != "budget_exceeded":
            raise
        return False


async def test_kills_leave_no_holds_and_no_overspending(engine: Engine, valkey: TestServer) -> None:
    rng = seeded("killed while holding")
    await Client(engine.backend).create_budget("fleet", {"tokens": LIMIT})
    app, agent = application(valkey.url)
    async with app, workers(valkey.url) as fleet:
        client = await app.client()

        async def submit(count: int) -> list[ff.Run[int]]:
            return [await agent.submit(rng.randrange(1, 20)) for _ in range(count)]

        runs = list[ff.Run[int]]()
        for _ in range(KILLS):
            runs += await submit(PER_KILL)
            for _ in range(rng.randrange(PER_KILL // 2)):
                await next_hold(fleet, client)
            fleet.kill(await next_hold(fleet, client))
            await fleet.start()
        runs += await submit(LIMIT // SPENT)
        watching = asyncio.create_task(watch(fleet, client))
        outcomes = await asyncio.gather(*map(ended, runs))
        assert not watching.done(), watching.exception()
        watching.cancel()
        await fleet.end()
        # The reconciler finds the holds whose leases are over; others end with their execution.
        assert (await idle(engine).scan_once("budget_reconciler")).errors == 0
        status = await client.budget("fleet")
    assert status.reserved == {}
    assert SPENT * sum(outcomes) <= status.usage["tokens"] <= LIMIT
