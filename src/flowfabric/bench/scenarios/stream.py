"""Output of attempts: how much a worker can write, and how soon followers receive it."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence

from flowfabric.bench.arena import LANE, Arena, poll, timed
from flowfabric.bench.report import Figures, percentile, percentiles
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import open_backend
from flowfabric.sdk.client import Client
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker

_TOKEN = Frame(payload=b" a token of an LLM", frame_type="delta")
_POOL = 64
_WRITERS = 10
_FRAMES_PER_LAG = 100
_PAUSE_S = 0.002
_TURNS = 7

Tasks = Sequence[ClaimedTask]


async def run(at: Arena) -> Figures:
    """Write `n` frames as fast as possible, then single ones that tails wait for."""
    n, tails = at.options.n, at.options.workers
    samples = max(10, n // _FRAMES_PER_LAG)
    config = WorkerConfig(max_concurrent_tasks=tails + _WRITERS + 1, scanners=False)
    async with await Worker.connect(config, at.url) as worker:
        count = max(tails, _WRITERS)
        ids = ExecutionId.mint_solo_many(LANE, at.backend.counts, count)
        await at.backend.executions.create_many(
            [NewExecution(execution_id=i, execution_kind="write", lane_id=LANE) for i in ids]
        )
        tasks = await worker.claim_many(count)
        at.progress.begin("stream: write", 3)
        await _write(at, tasks[:1], n // 10)
        one = await _write(at, tasks[:1], n)
        ten = await _write(at, tasks[:_WRITERS], n)
        lag = await _lags(at, tasks[:1], samples)
        crowd = await _lags(at, tasks, samples)
        slowdown = await _slowdown(at, tasks, samples)
        await asyncio.gather(*(task.complete() for task in tasks))
    return {
        "frames_per_s": one,
        "frames_per_s_10": ten,
        **percentiles(lag, "lag_"),
        **percentiles(crowd, "lag_", "_100"),
        "call_slowdown_pct": slowdown,
    }


async def _write(at: Arena, tasks: Tasks, n: int) -> float:
    """Frames per second, all stored."""
    each = max(1, n // len(tasks))

    async def write(task: ClaimedTask) -> None:
        for _ in range(each):
            await task.write_frame(_TOKEN)
        await task.flush_output()

    seconds, _ = await timed(asyncio.gather(*(write(task) for task in tasks)))
    at.progress.step()
    return each * len(tasks) / seconds


@contextlib.asynccontextmanager
async def _tails(at: Arena, tasks: Tasks, lags: asyncio.Queue[float]) -> AsyncGenerator[Backend]:
    """A client with one waiting tail per task; appends the age of each frame to `lags`."""
    # Every tail waits in a call of its own.
    os.environ["FF_MAX_CONCURRENT_STREAM_OPS"] = str(max(len(tasks), _POOL))
    backend = await open_backend(at.url, name="ff-bench-tails")

    async def all_wait() -> bool:
        for tail in reading:
            if tail.done():
                tail.result()
        return (await at.backend.meta.usage()).blocked >= len(tasks)

    async with Client(backend) as client:
        reading = [asyncio.create_task(_read(client, task, lags)) for task in tasks]
        try:
            await poll(all_wait)
            yield backend
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _read(client: Client, task: ClaimedTask, lags: asyncio.Queue[float]) -> None:
    last = await task.append_frame("delta", b"")
    async for frame in client.tail(task.execution_id, after=last.stream_id):
        lags.put_nowait((time.monotonic_ns() - int(frame.payload)) / 1e6)


async def _lags(at: Arena, tasks: Tasks, samples: int) -> list[float]:
    """Milliseconds from writing a frame until the tail of its stream receives it."""
    lags, measured = asyncio.Queue[float](), list[float]()
    at.progress.begin(f"stream: {len(tasks)} tails", samples)
    async with _tails(at, tasks, lags):
        for _ in range(samples):
            await asyncio.sleep(_PAUSE_S)
            frame = Frame(payload=b"%d" % time.monotonic_ns(), frame_type="delta")
            await random.choice(tasks).write_frame(frame)  # noqa: S311 - a test load
            measured.append(await lags.get())
            at.progress.step()
    return measured


async def _slowdown(at: Arena, tasks: Tasks, samples: int) -> float:
    """How many percent longer a call takes on the connection of a client whose tails all wait."""
    at.progress.begin("stream: calls beside waiting tails", _TURNS)
    ratios: list[float] = []
    for _ in range(_TURNS):
        alone = await _call_s(at, tasks[:1], samples)
        ratios.append(await _call_s(at, tasks, samples) / alone)
        at.progress.step()
    return 100 * (percentile(ratios, 50) - 1)


async def _call_s(at: Arena, tasks: Tasks, calls: int) -> float:
    async with _tails(at, tasks, asyncio.Queue()) as backend:
        start = time.perf_counter()
        for _ in range(calls):
            await backend.reads.read_execution_state(tasks[0].execution_id)
        return time.perf_counter() - start
