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

LIMIT = 150


@contextlib.asynccontextmanager
async def worker(url: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.app.spending_program", url), stdout=asyncio.subprocess.PIPE
    )
    try:
        await tells(process, "ready")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def tells(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while line := await process.stdout.readline():
            if line.decode().strip() == text:
                return
    raise AssertionError(f"it ended without telling {text!r}")


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
    async with app:
        client = await app.client()
        runs = [await agent.submit(rng.randrange(1, 20)) for _ in range(30)]
        for _ in range(3):
            async with worker(valkey.url) as doomed:
                await tells(doomed, "holding")
                # It dies with whatever it holds.
                doomed.kill()
                await doomed.wait()
            status = await client.budget("fleet")
            assert status.usage.get("tokens", 0) + status.reserved.get("tokens", 0) <= LIMIT
        async with worker(valkey.url):
            outcomes = await asyncio.gather(*map(ended, runs))
        # The reconciler finds the holds whose leases are over; others end with their execution.
        assert (await idle(engine).scan_once("budget_reconciler")).errors == 0
        status = await client.budget("fleet")
    assert status.reserved == {}
    assert status.usage["tokens"] <= LIMIT
    assert status.usage["tokens"] >= SPENT * sum(outcomes)
    assert status.usage["tokens"] % SPENT == 0
