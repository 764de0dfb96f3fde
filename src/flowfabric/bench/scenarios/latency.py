"""How soon an idle worker starts what is submitted, and how soon the submitter has the result."""

from __future__ import annotations

import asyncio
import time

from flowfabric.bench.arena import arena
from flowfabric.bench.report import Figures, Options, Progress, percentiles
from flowfabric.bench.workers import BenchApp, Plan, worker_process

_WARM_UP = 50
_PAUSE_S = 0.003
"""Long enough for the worker to fall asleep again."""


async def run(options: Options, progress: Progress) -> Figures:
    """Submit one execution at a time to an idle worker in its own process."""
    async with arena(options.aof) as at:
        app = BenchApp(at.url)
        async with app.fabric, worker_process(Plan(url=at.url, concurrency=4)):
            progress.begin("latency", _WARM_UP + options.n)
            times = [await _once(app, progress) for _ in range(_WARM_UP + options.n)]
    starts, results = zip(*times[_WARM_UP:], strict=True)
    return {**percentiles(starts, "start_"), **percentiles(results, "result_")}


async def _once(app: BenchApp, progress: Progress) -> tuple[float, float]:
    await asyncio.sleep(_PAUSE_S)
    submitted = time.monotonic_ns()
    run = await app.fabric.submit(app.stamp)
    started: int = await run.result(timeout=30)
    seen = time.monotonic_ns()
    progress.advance()
    return (started - submitted) / 1e6, (seen - submitted) / 1e6
