"""How soon an idle worker starts what is submitted, and how soon the submitter has the result."""

from __future__ import annotations

import asyncio
import time

from flowfabric.bench.arena import arena
from flowfabric.bench.child import Plan
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.processes import worker_process
from flowfabric.bench.statistics import percentile
from flowfabric.bench.tasks import BenchApp

_WARM_UP = 50
_PAUSE_S = 0.003
"""Long enough for the worker to fall asleep again."""


async def run(options: Options, progress: Progress) -> Figures:
    """Submit one execution at a time to a worker that waits in a process of its own."""
    async with arena(options.aof) as at:
        app = BenchApp(at.url)
        async with app.fabric, worker_process(Plan(url=at.url, concurrency=4)):
            progress.begin("latency: warm-up", _WARM_UP)
            for _ in range(_WARM_UP):
                await _once(app, progress)
            progress.begin("latency", options.n)
            times = [await _once(app, progress) for _ in range(options.n)]
    starts, results = zip(*times, strict=True)
    return {
        "start_p50_ms": percentile(starts, 50),
        "start_p99_ms": percentile(starts, 99),
        "result_p50_ms": percentile(results, 50),
        "result_p99_ms": percentile(results, 99),
    }


async def _once(app: BenchApp, progress: Progress) -> tuple[float, float]:
    await asyncio.sleep(_PAUSE_S)
    submitted = time.monotonic_ns()
    run = await app.fabric.submit(app.stamp)
    started: int = await run.result(timeout=30)
    seen = time.monotonic_ns()
    progress.advance()
    return (started - submitted) / 1e6, (seen - submitted) / 1e6
