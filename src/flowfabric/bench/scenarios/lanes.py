"""What many lanes cost one worker."""

import asyncio
import time

from flowfabric.bench.arena import LANE, Arena
from flowfabric.bench.report import Figures
from flowfabric.bench.scenarios.load import commands_per_s
from flowfabric.bench.workers import BenchApp

_FEW = 100
_MANY = 1_000
_EACH = 10
_CONCURRENCY = 256
_SETTLE_S = 1.5


async def run(at: Arena) -> Figures:
    """The same work on one lane and on a hundred, then a thousand lanes with ten each."""
    n = at.options.n
    few = [f"lane-{number}" for number in range(_FEW)]
    many = [f"many-{number}" for number in range(min(_MANY, n))]
    at.progress.begin("lanes", 2 * n + _EACH * len(many))
    async with BenchApp(at.url) as app:
        # Measured first: later, the scanners' checks of what ran would count as well.
        worker = app.worker(lanes=few, concurrency=1)
        serving = asyncio.create_task(worker.run(signals=False))
        await asyncio.sleep(min(at.options.seconds, _SETTLE_S))
        idle = await commands_per_s(at)
        worker.stop()
        await serving
        await _rate(at, app, [LANE], max(1, n // 10))
        one = await _rate(at, app, [LANE], n)
        hundred = await _rate(at, app, few, n)
        thousand = await _rate(at, app, many, _EACH * len(many))
    return {
        "one_lane_per_s": one,
        "lanes_100_per_s": hundred,
        "of_one_lane": hundred / one,
        "lanes_1000_per_s": thousand,
        "idle_commands_per_s": idle,
    }


async def _rate(at: Arena, app: BenchApp, lanes: list[str], n: int) -> float:
    """Executions per second of one worker for all lanes, from the first handler to the last."""
    for number, lane in enumerate(lanes):
        share = n // len(lanes) + (number < n % len(lanes))
        if share:
            await app.submit_many(app.noop.options(lane=lane), [()] * share)
        at.progress.step(share)
    reached = asyncio.Event()
    app.expect(n, reached.set)
    worker = app.worker(lanes=lanes, concurrency=_CONCURRENCY)
    serving = asyncio.create_task(worker.run(signals=False))
    serving.add_done_callback(lambda _: reached.set())
    await reached.wait()
    took_s = (time.monotonic_ns() - app.first_ns) / 1e9
    worker.stop()
    await serving
    return n / took_s
