"""What workers cost that have nothing to do."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncGenerator

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.child import Plan
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.processes import worker_process
from flowfabric.bench.tasks import BenchApp

_OTHER_LANE = "elsewhere"
_PROCESSES = 2
_TURNS = 80
_WARM_UP = 50
_SETTLE_S = 1.5


async def run(options: Options, progress: Progress) -> Figures:
    """Count the commands of one idle worker and of many, and what the many cost a submitter."""
    workers, seconds = options.workers, options.seconds
    async with arena(options.aof) as at, arena(options.aof) as empty:
        async with _crowd(at, 1, LANE, seconds):
            one = await _commands_per_s(at, seconds, "one idle worker", progress)
        async with _crowd(at, workers, _OTHER_LANE, seconds):
            many = await _commands_per_s(at, seconds, f"{workers} idle workers", progress)
            rate, elsewhere = await _submit_both(empty, at, options.n, progress)
        async with _crowd(at, workers, LANE, seconds):
            _, same = await _submit_both(empty, at, options.n, progress)
    return {
        "commands_per_s": one,
        "commands_per_s_100": many,
        "submit_per_s": rate,
        "submit_slowdown_pct": elsewhere,
        "submit_slowdown_same_lane_pct": same,
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


async def _submit_both(
    alone: Arena, crowded: Arena, n: int, progress: Progress
) -> tuple[float, float]:
    """Submits per second without workers, and by how many percent they are slower beside them.

    One after the other, of a task that no worker can take. The two servers take turns, and the
    median turn counts, so that whatever else the machine does matters little.
    """
    apps = (BenchApp(alone.url), BenchApp(crowded.url))
    async with apps[0].fabric, apps[1].fabric:
        for app in apps:
            await _submit_some(app, _WARM_UP)
        progress.begin("idle: submit", _TURNS)
        size = -(-n // _TURNS)
        turns: list[tuple[float, float]] = []
        for _ in range(_TURNS):
            turns.append((await _submit_some(apps[0], size), await _submit_some(apps[1], size)))
            progress.advance()
    rate = statistics.median(size / without for without, _ in turns)
    return rate, 100 * (1 - statistics.median(without / beside for without, beside in turns))


async def _submit_some(app: BenchApp, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        await app.fabric.submit(app.unwanted)
    return time.perf_counter() - start
