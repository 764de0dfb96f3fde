"""A direct claim that waits for work."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.errors import ValidationError
from tests.sdk.conftest import MakeWorker
from tests.sdk.test_doorbell import sleeping
from tests.support.engine import Engine
from tests.support.sdk import submit, until


async def test_a_ring_ends_the_wait(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    waiting = asyncio.create_task(worker.claim(max_wait="30s"))
    await until(sleeping(engine, 1), "a wait")
    (execution_id,) = await submit(engine.backend)
    task = await waiting
    assert task is not None
    assert task.execution_id == execution_id
    await task.complete()


async def test_without_work_it_ends_in_time(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    assert await worker.claim(max_wait="50ms") is None
    assert worker.free == worker.config.max_concurrent_tasks


async def test_without_permits_it_does_not_wait(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(max_concurrent_tasks=1)
    await submit(engine.backend, 2)
    task = await worker.claim(max_wait="30s")
    assert task is not None
    assert await worker.claim(max_wait="30s") is None
    await task.complete()


async def test_without_permits_it_lets_others_run(engine: Engine, make_worker: MakeWorker) -> None:
    """A loop of claims must not keep the event loop from the tasks that hold the permits."""
    worker = await make_worker(max_concurrent_tasks=1)
    await submit(engine.backend)
    task = await worker.claim()
    assert task is not None
    for max_wait in ("0s", "30s"):
        ran = asyncio.Event()
        asyncio.get_running_loop().call_soon(ran.set)
        assert await worker.claim(max_wait=max_wait) is None
        assert ran.is_set()
    await task.complete()


async def test_a_cancelled_wait_keeps_no_permit(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    waiting = asyncio.create_task(worker.claim(max_wait="30s"))
    await until(sleeping(engine, 1), "a wait")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert worker.free == worker.config.max_concurrent_tasks
    await until(sleeping(engine, 0), "the end of the wait")


@pytest.mark.parametrize("knows", [False, True], ids=["told by its claim", "told before"])
async def test_a_drained_worker_keeps_no_ring(
    engine: Engine, make_worker: MakeWorker, *, knows: bool
) -> None:
    # Without a ring, they would look again in an hour.
    drained, able = [await make_worker(claim_poll_interval_ms=3_600_000) for _ in range(2)]
    await engine.backend.workers.drain_worker(drained.config.worker_instance_id)
    if knows:
        drained.claims.drain()
    first = asyncio.create_task(drained.claim(max_wait="1h"))
    await until(sleeping(engine, 0 if knows else 1), "the drained worker waiting")
    second = asyncio.create_task(able.claim(max_wait="1h"))
    await until(sleeping(engine, 1 if knows else 2), "both waiting")
    (execution_id,) = await submit(engine.backend)
    async with asyncio.timeout(10):
        task = await second
    assert task is not None
    assert task.execution_id == execution_id
    await task.complete()
    assert drained.claims.draining
    assert not first.done()
    first.cancel()
    await asyncio.wait([first])


async def test_a_negative_wait_is_refused(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    with pytest.raises(ValidationError, match="max_wait"):
        await worker.claim(max_wait=-1)
