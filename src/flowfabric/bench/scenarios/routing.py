"""Work for some workers only: by capability, and by namespace."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator

from flowfabric.app.tasks import Task
from flowfabric.app.worker import AppWorker
from flowfabric.bench.arena import LANE, Arena, arena, timed
from flowfabric.bench.report import Figures, percentile, percentiles
from flowfabric.bench.scenarios.lifecycle import lifecycle
from flowfabric.bench.workers import CAPABILITY_SETS, BenchApp, worker_process

_WORKERS_PER_SET = 4
_SLOTS = 16
_CHUNK = 256
_SINGLE = 200
_NOISE = 10
_WARM_UP = 50
_QUIET_SLOTS = 8
_EVERY_S = 0.01


@contextlib.asynccontextmanager
async def _serving(*workers: AppWorker) -> AsyncGenerator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        yield


async def routed(at: Arena) -> Figures:
    """Run `n` executions of ten capability sets on forty workers; then one at a time."""
    n = at.options.n
    async with arena(at.options, at.progress) as plain:
        most = (await lifecycle(plain))["lifecycle_per_s"]
    async with BenchApp(at.url) as app:
        workers = [
            app.worker(concurrency=_SLOTS, capabilities=[name], scanners=False)
            for name in CAPABILITY_SETS
            for _ in range(_WORKERS_PER_SET)
        ]
        at.progress.begin("routed", n)
        async with _serving(*workers):
            whole_s, _ = await timed(_run_all(at, app, n))
            tasks = itertools.islice(itertools.cycle(app.routed), min(_SINGLE, n))
            times = [await _start_ms(app, task) for task in tasks]
    figures: Figures = {"per_s": n / whole_s, **percentiles(times, "", "")}
    return {**figures, "lifecycle_per_s": most, "of_lifecycle": n / whole_s / most}


async def _run_all(at: Arena, app: BenchApp, n: int) -> None:
    reached = asyncio.Event()
    app.expect(n, reached.set)
    for number, done in enumerate(range(0, n, _CHUNK)):
        size = min(_CHUNK, n - done)
        await app.submit_many(app.routed[number % len(app.routed)], [()] * size)
        at.progress.step(size)
    await reached.wait()
    await at.until_done()


async def _start_ms(app: BenchApp, task: Task[..., None]) -> float:
    """Milliseconds from the submission of one execution to its handler."""
    began = asyncio.Event()
    app.expect(1, began.set)
    start = time.monotonic_ns()
    await app.submit(task)
    await began.wait()
    return (app.first_ns - start) / 1e6


async def fairness(at: Arena) -> Figures:
    """Compare start times of one namespace alone and beside one with ten times its work."""
    n = at.options.n
    async with BenchApp(at.url) as quiet, BenchApp(at.url) as noisy:
        quiet.namespace, noisy.namespace = "quiet", "noisy"
        worker = quiet.worker(concurrency=_QUIET_SLOTS, namespaces=["*"], scanners=False)
        async with _serving(worker):
            await _starts(at, quiet, min(_WARM_UP, n))
            alone = await _starts(at, quiet, n)
            # Submitted before the clock starts: making noise in the process that measures would
            # count against the engine.
            await noisy.submit_many(noisy.stamp, [()] * (_NOISE * n))
            beside = await _starts(at, quiet, n)
            left = await _waiting(at)
            await at.until_done()
            calm = await _starts(at, quiet, n, _EVERY_S)
            async with worker_process(at.url, workers=0, noise_per_s=_NOISE / _EVERY_S):
                busy = await _starts(at, quiet, n, _EVERY_S)
    return {
        **percentiles(alone, "alone_", ""),
        **percentiles(beside, "beside_", ""),
        "fairness_ratio_p99": percentile(beside, 99) / percentile(alone, 99),
        "noise_left": left,
        **percentiles(calm, "calm_", ""),
        **percentiles(busy, "busy_", ""),
        "arrivals_ratio_p99": percentile(busy, 99) / percentile(calm, 99),
    }


async def _starts(at: Arena, app: BenchApp, count: int, every_s: float = 0.0) -> list[float]:
    at.progress.begin("fairness", count)
    loop = asyncio.get_running_loop()
    due = loop.time()
    times: list[float] = []
    for _ in range(count):
        times.append(await _start_ms(app, app.noop))
        at.progress.step()
        due += every_s
        await asyncio.sleep(due - loop.time())
    return times


async def _waiting(at: Arena) -> int:
    return (await at.backend.lanes.get_lane(LANE)).counts["eligible"]
