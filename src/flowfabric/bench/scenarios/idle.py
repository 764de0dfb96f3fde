"""What workers cost that have nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.child import Plan
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.processes import worker_process
from flowfabric.bench.tasks import BenchApp

__all__ = ["run"]

_OTHER_LANE = "elsewhere"
_PROCESSES = 2
_ROUNDS = 3
_SETTLE_S = 1.5


async def run(options: Options, progress: Progress) -> Figures:
    """Count the commands of one idle worker and of many, and what the many cost a submitter."""
    workers, seconds = options.workers, options.seconds
    async with arena(options.aof) as at:
        async with _crowd(at, 1, LANE, seconds):
            one = await _commands_per_s(at, seconds, "one idle worker", progress)
        before = await _submit_rate(at, options.n, progress)
        async with _crowd(at, workers, _OTHER_LANE, seconds):
            many = await _commands_per_s(at, seconds, f"{workers} idle workers", progress)
            elsewhere = await _submit_rate(at, options.n, progress)
        between = await _submit_rate(at, options.n, progress)
        async with _crowd(at, workers, LANE, seconds):
            same = await _submit_rate(at, options.n, progress)
        after = await _submit_rate(at, options.n, progress)
    # Each compared with the submitter alone right before and right after.
    return {
        "commands_per_s": one,
        "commands_per_s_100": many,
        "submit_per_s": between,
        "submit_slowdown_pct": 100 * (1 - 2 * elsewhere / (before + between)),
        "submit_slowdown_same_lane_pct": 100 * (1 - 2 * same / (between + after)),
    }


@contextlib.asynccontextmanager
async def _crowd(at: Arena, workers: int, lane: str, seconds: float) -> AsyncGenerator[None]:
    """So many workers of a lane, spread over a few processes, each with its own connections."""
    processes = min(_PROCESSES, workers)
    shares = [workers // processes + (i < workers % processes) for i in range(processes)]
    async with contextlib.AsyncExitStack() as stack:
        for share in shares:
            plan = Plan(url=at.url, workers=share, lane=lane)
            await stack.enter_async_context(worker_process(plan))
        await asyncio.sleep(min(seconds, _SETTLE_S))
        yield


async def _commands_per_s(at: Arena, seconds: float, title: str, progress: Progress) -> float:
    """Commands the server ran for others, those inside functions included."""
    progress.begin(f"idle: {title}", 10)
    before, start = await _commands(at), time.perf_counter()
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        progress.advance()
    after, end = await _commands(at), time.perf_counter()
    # One INFO of our own lies between the two readings.
    return (after - before - 1) / (end - start)


async def _commands(at: Arena) -> int:
    return int((await at.info("stats"))["total_commands_processed"])


async def _submit_rate(at: Arena, n: int, progress: Progress) -> float:
    """Submits per second, one after the other, of a task that no worker can take."""
    app = BenchApp(at.url)
    rates: list[float] = []
    async with app.fabric:
        progress.begin("idle: submit", _ROUNDS * n)
        await app.fabric.submit(app.unwanted)
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            for _ in range(n):
                await app.fabric.submit(app.unwanted)
                progress.advance()
            rates.append(n / (time.perf_counter() - start))
    return sorted(rates)[_ROUNDS // 2]
