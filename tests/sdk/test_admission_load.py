"""Several workers share a quota: no more run at once than it allows."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from flowfabric.sdk.task import ClaimedTask
from tests.sdk.conftest import MakeWorker
from tests.support.admission import limited, quota, settled, slots
from tests.support.engine import Engine
from tests.support.sdk import serving

RATE, CAP, WINDOW_S, COUNT, WORKERS = 15, 4, 3, 40, 3


@pytest.mark.timeout(60)
async def test_no_more_run_at_once_than_the_cap(engine: Engine, make_worker: MakeWorker) -> None:
    policy = await quota(engine, rate=RATE, cap=CAP, window=WINDOW_S)
    ids = [await limited(engine, quota=policy) for _ in range(COUNT)]
    running, most, left = 0, 0, COUNT
    done = asyncio.Event()

    async def job(task: ClaimedTask) -> None:
        nonlocal running, most, left
        running += 1
        most = max(most, running)
        await task.update_progress(50)
        running -= 1
        left -= 1
        if left == 0:
            done.set()

    async with AsyncExitStack() as stack:
        for n in range(WORKERS):
            worker = await make_worker(worker_instance_id=f"w-{n}", max_concurrent_tasks=8)
            await stack.enter_async_context(serving(worker, {"job": job}))
        await done.wait()
    assert most <= CAP
    await settled(engine)
    await engine.backend.admission.deliver_returns(ids[0].tag)
    assert await slots(engine, policy) == 0
