"""Several worker processes under one quota, some of them killed: no window and no moment holds more
than its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from flowfabric.core.ids import quota_id
from flowfabric.core.partition import quota_partition
from flowfabric.sdk.client import Client
from tests.app.limited_program import QUOTA, application
from tests.support import lua_keys
from tests.support.engine import Engine
from tests.support.sdk import seeded
from tests.support.server import TestServer

RATE, CAP, WINDOW_S, COUNT, WORKERS, KILLS = 12, 4, 2, 40, 3, 3
WINDOW_MS = WINDOW_S * 1000
Admissions = set[tuple[str, int]]
"""Executions, and when each was admitted."""


class Recorder:
    """Reads the window of the quota again and again: an entry stays there long enough."""

    def __init__(self, engine: Engine) -> None:
        policy = quota_id(QUOTA)
        self._backend = engine.backend
        self._policy = policy
        tag = f"{{q:{quota_partition(policy, engine.backend.counts)}}}"
        self._window = lua_keys.quota_window(tag, policy)
        self.seen: Admissions = set()
        self.most_slots = 0

    async def run(self) -> None:
        while True:
            rows: Any = await self._backend.transport.call(
                "ZRANGE", self._window, 0, -1, "WITHSCORES"
            )
            status = await self._backend.quotas.get_quota_status(self._policy)
            self.most_slots = max(self.most_slots, status.slots_held)
            self.seen |= {(member.decode(), int(score)) for member, score in rows}
            await asyncio.sleep(WINDOW_S / 50)

    def most_in_a_window(self) -> int:
        """The most different executions that one window admitted."""
        return max(
            len({each for each, at in self.seen if end - WINDOW_MS < at <= end})
            for _, end in self.seen
        )


@contextlib.asynccontextmanager
async def recording(engine: Engine) -> AsyncGenerator[Recorder]:
    recorder = Recorder(engine)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        task.cancel()
        await asyncio.wait([task])


async def tells(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while line := await process.stdout.readline():
            if line.decode().strip() == text:
                return
    raise AssertionError(f"it ended without telling {text!r}")


async def started(url: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.app.limited_program", url), stdout=asyncio.subprocess.PIPE
    )
    await tells(process, "ready")
    return process


async def killed(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


@pytest.mark.timeout(120)
async def test_no_window_holds_more_than_its_limit(engine: Engine, valkey: TestServer) -> None:
    rng = seeded("quota with kills")
    await Client(engine.backend).create_quota(QUOTA, RATE, per=f"{WINDOW_S}s", max_concurrent=CAP)
    app, call = application(valkey.url)
    async with app, recording(engine) as recorder:
        workers = [await started(valkey.url) for _ in range(WORKERS)]
        try:
            runs = [await call.submit(number) for number in range(COUNT)]
            for _ in range(KILLS):
                doomed = workers.pop(rng.randrange(len(workers)))
                await tells(doomed, "started")
                # It dies with the slots of what it runs; another process takes over.
                await killed(doomed)
                workers.append(await started(valkey.url))
            await asyncio.gather(*(run.result(timeout=60) for run in runs))
        finally:
            for each in workers:
                await killed(each)
        ids = [run.id for run in runs]
    infos = [await engine.backend.reads.read_execution_info(each) for each in ids]
    times: dict[str, list[int]] = {}
    for each, at in recorder.seen:
        times.setdefault(each, []).append(at)
    # Every first start follows an admission that the window counted, and no window counted more.
    for info in infos:
        assert min(times[info.execution_id]) <= int(info.started_at or 0)
    assert recorder.most_in_a_window() <= RATE
    assert recorder.most_slots <= CAP
    # A retry is admitted again, so some were counted twice.
    assert len(recorder.seen) > COUNT
