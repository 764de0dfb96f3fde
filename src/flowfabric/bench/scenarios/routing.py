"""Work for some workers only: by capability, and by namespace."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from flowfabric.app.worker import AppWorker
from flowfabric.bench.arena import Arena, arena, timed
from flowfabric.bench.report import Figures, percentile, percentiles
from flowfabric.bench.scenarios.lifecycle import lifecycle
from flowfabric.bench.workers import CAPABILITY_SETS, BenchApp

_WORKERS_PER_SET = 4
_SLOTS = 16
_CHUNK = 256
_SINGLE = 200
_NOISE = 10
_QUIET_SLOTS = 8


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
            times = [await _start_ms(app, each) for each in range(min(_SINGLE, n))]
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


async def _start_ms(app: BenchApp, number: int) -> float:
    """Milliseconds from the submission of one execution to its handler."""
    began = asyncio.Event()
    app.expect(1, began.set)
    start = time.monotonic_ns()
    await app.submit(app.routed[number % len(app.routed)])
    await began.wait()
    return (app.first_ns - start) / 1e6


async def fairness(at: Arena) -> Figures:
    """Compare the starts of one namespace alone and beside one with ten times its work."""
    async with BenchApp(at.url) as quiet, BenchApp(at.url) as noisy:
        quiet.namespace, noisy.namespace = "quiet", "noisy"
        worker = quiet.worker(concurrency=_QUIET_SLOTS, namespaces=["*"], scanners=False)
        async with _serving(worker):
            alone = await _starts(at, quiet)
            noise = asyncio.create_task(_make_noise(noisy, _NOISE * at.options.n))
            beside = await _starts(at, quiet)
            await noise
    ratio = percentile(beside, 99) / percentile(alone, 99)
    return {
        **percentiles(alone, "alone_", ""),
        **percentiles(beside, "beside_", ""),
        "fairness_ratio_p99": ratio,
    }


async def _starts(at: Arena, app: BenchApp) -> list[float]:
    at.progress.begin("fairness", at.options.n)
    times: list[float] = []
    for _ in range(at.options.n):
        start = time.monotonic_ns()
        run = await app.submit(app.stamp)
        times.append((await run.result() - start) / 1e6)
        at.progress.step()
    return times


async def _make_noise(app: BenchApp, count: int) -> None:
    for done in range(0, count, _CHUNK):
        await app.submit_many(app.stamp, [()] * min(_CHUNK, count - done))
