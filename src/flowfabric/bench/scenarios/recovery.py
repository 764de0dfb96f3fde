"""How long work stands still when its worker is killed."""

from __future__ import annotations

import time

from flowfabric.bench.arena import arena
from flowfabric.bench.child import Plan
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.processes import worker_process
from flowfabric.bench.tasks import BenchApp

_TTL_S = 2.0


async def run(options: Options, progress: Progress) -> Figures:
    """Kill the one worker of two that holds all the work; once with the scanners, once without."""
    progress.begin("recovery", 2 * options.n)
    with_scanners = await _recover(options, progress, scanners=True)
    without = await _recover(options, progress, scanners=False)
    return {
        "recovery_s": with_scanners,
        "recovery_follower_s": without,
        "lease_ttl_s": _TTL_S,
    }


async def _recover(options: Options, progress: Progress, *, scanners: bool) -> float:
    """Seconds from the kill until all its executions run in the other process."""
    n = options.n
    async with arena(options.aof) as at:
        plan = Plan(url=at.url, concurrency=n, lease_ttl_s=_TTL_S, scanners=scanners)
        app = BenchApp(at.url)
        async with app.fabric, worker_process(plan) as first:
            await app.fabric.submit_many(app.hold, [(item,) for item in range(n)])
            await first.events("started", n)
            second_plan = Plan(url=at.url, concurrency=n, lease_ttl_s=_TTL_S)
            async with worker_process(second_plan) as second:
                killed = time.monotonic_ns()
                first.kill()
                restarted = await second.events("started", n)
                progress.advance(n)
    return (max(event.at_ns for event in restarted) - killed) / 1e9
