"""How long work stops when its worker is killed."""

from __future__ import annotations

import time

from flowfabric.bench.arena import arena
from flowfabric.bench.report import Figures, Options, Progress
from flowfabric.bench.workers import BenchApp, Plan, worker_process

_TTL_S = 2.0


async def run(options: Options, progress: Progress) -> Figures:
    """Kill the one worker of two that holds all the work; once with the scanners, once without."""
    progress.begin("recovery", 2 * options.n)
    return {
        "recovery_s": await _recover(options, progress, scanners=True),
        "recovery_follower_s": await _recover(options, progress, scanners=False),
        "lease_ttl_s": _TTL_S,
    }


async def _recover(options: Options, progress: Progress, *, scanners: bool) -> float:
    """Seconds from the kill until all its executions run in the other process."""
    n = options.n
    async with arena(options.aof) as at:
        app = BenchApp(at.url)
        killed_plan = Plan(url=at.url, concurrency=n, lease_ttl_s=_TTL_S, scanners=scanners)
        async with app.fabric, worker_process(killed_plan) as first:
            await app.fabric.submit_many(app.hold, [()] * n)
            await first.events("started", n)
            plan = Plan(url=at.url, concurrency=n, lease_ttl_s=_TTL_S)
            async with worker_process(plan) as second:
                killed = time.monotonic_ns()
                first.process.kill()
                restarted = await second.events("started", n)
                progress.advance(n)
    return (max(restarted) - killed) / 1e9
