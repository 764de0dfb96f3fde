"""What idle workers cost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from statistics import median

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.report import Figures, Options, Progress
from flowfabric.bench.workers import BenchApp, Plan, worker_process

_OTHER_LANE = "elsewhere"
_PROCESSES = 2
_TURNS = 80
_WARM_UP = 50
_SETTLE_S = 1.5


async def run(options: Options, progress: Progress) -> Figures:
    """Count the commands of one idle worker and of many, and what the many cost a submitter."""
    workers, seconds = options.workers, options.seconds
    async with arena(options.aof) as at, arena(options.aof) as empty:
        async with _idle_workers(at, 1, LANE, seconds):
            one = await _commands_per_s(at, seconds, progress)
        async with _idle_workers(at, workers, _OTHER_LANE, seconds):
            many = await _commands_per_s(at, seconds, progress)
            rate, elsewhere = await _submit_both(empty, at, options.n, progress)
        async with _idle_workers(at, workers, LANE, seconds):
            _, same = await _submit_both(empty, at, options.n, progress)
    return {
        "commands_per_s": one,
        "commands_per_s_100": many,
        "submit_per_s": rate,
        "submit_slowdown_pct": elsewhere,
        "submit_slowdown_same_lane_pct": same,
    }


@contextlib.asynccontextmanager
async def _idle_workers(at: Arena, workers: int, lane: str, seconds: float) -> AsyncGenerator[None]:
    """Workers of a lane, spread over a few processes, each with its own connections."""
    processes = min(_PROCESSES, workers)
    async with contextlib.AsyncExitStack() as stack:
        for index in range(processes):
            share = workers // processes + (index < workers % processes)
            plan = Plan(url=at.url, workers=share, lane=lane)
            await stack.enter_async_context(worker_process(plan))
        await asyncio.sleep(min(seconds, _SETTLE_S))
        yield


async def _commands_per_s(at: Arena, seconds: float, progress: Progress) -> float:
    """Commands that the server ran for the workers, those inside functions included."""
    progress.begin("idle: count commands", 10)
    before, start = (await at.backend.meta.usage()).commands, time.perf_counter()
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
        progress.advance()
    after, end = (await at.backend.meta.usage()).commands, time.perf_counter()
    # One of them was ours: it read the first figure.
    return (after - before - 1) / (end - start)


async def _submit_both(
    alone: Arena, crowded: Arena, n: int, progress: Progress
) -> tuple[float, float]:
    """Submits per second without workers, and how many percent slower they are beside them.

    One after the other, of a task that no worker can take. The two servers take turns, and the
    median turn counts, so that other load on the machine matters little.
    """
    apps = BenchApp(alone.url), BenchApp(crowded.url)
    async with apps[0].fabric, apps[1].fabric:
        for app in apps:
            await _submit_some(app, _WARM_UP)
        progress.begin("idle: submit", _TURNS)
        size = -(-n // _TURNS)
        turns: list[tuple[float, float]] = []
        for _ in range(_TURNS):
            turns.append((await _submit_some(apps[0], size), await _submit_some(apps[1], size)))
            progress.advance()
    rate = median(size / without for without, _ in turns)
    return rate, 100 * (1 - median(without / beside for without, beside in turns))


async def _submit_some(app: BenchApp, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        await app.fabric.submit(app.unwanted)
    return time.perf_counter() - start
