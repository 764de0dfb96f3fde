"""How soon workers start, resume and take over executions."""

import asyncio
import functools
import time

from flowfabric.bench.arena import Arena, arena, timed
from flowfabric.bench.report import Figures, percentiles
from flowfabric.bench.workers import BenchApp, SignalTarget, worker_process

_WARM_UP = 50
_CONCURRENCY = 64
_SENDERS = 32
_PAUSE_S = 0.003
"""Long enough for the worker to fall asleep again."""
_TTL_S = 2.0


async def latency(at: Arena) -> Figures:
    """Submit one execution at a time to an idle worker in its own process."""
    count = _WARM_UP + at.options.n
    starts, results = list[float](), list[float]()
    async with (
        BenchApp(at.url) as app,
        worker_process(at.url, concurrency=4),
    ):
        at.progress.begin("latency", count)
        for _ in range(count):
            await asyncio.sleep(_PAUSE_S)
            submitted = time.monotonic_ns()
            started = await (await app.submit(app.stamp)).result(timeout=30)
            results.append((time.monotonic_ns() - submitted) / 1e6)
            starts.append((started - submitted) / 1e6)
            at.progress.step()
    return percentiles(starts[_WARM_UP:], "start_") | percentiles(results[_WARM_UP:], "result_")


async def resume(at: Arena) -> Figures:
    """Signal one waiting execution at a time; then signal `n` as fast as possible."""
    n = at.options.n
    async with BenchApp(at.url) as app, worker_process(at.url, concurrency=_CONCURRENCY):
        at.progress.begin("resume: one at a time", _WARM_UP + n)
        times = [await _resume_once(at, app) for _ in range(_WARM_UP + n)]
        at.progress.begin("resume: suspend many", n)
        runs = await app.submit_many(app.ask, [()] * n)
        targets = [await SignalTarget.of(at, run) for run in runs]
        at.progress.begin("resume: signal many", n)
        seconds, _ = await timed(_resume_all(at, targets))
    return {**percentiles(times[_WARM_UP:]), "per_s": n / seconds}


async def _resume_once(at: Arena, app: BenchApp) -> float:
    """Milliseconds from sending the signal until the handler has it."""
    run = await app.submit(app.ask)
    target = await SignalTarget.of(at, run)
    await asyncio.sleep(_PAUSE_S)
    sent = time.monotonic_ns()
    await at.backend.signals.deliver_signal(*target, "go")
    resumed = await run.result(timeout=30)
    at.progress.step()
    return (resumed - sent) / 1e6


async def _resume_all(at: Arena, targets: list[SignalTarget]) -> None:
    """Answer the waits; returns when the last handler has ended."""
    unsent = iter(targets)

    async def send() -> None:
        for target in unsent:
            await at.backend.signals.deliver_signal(*target, "go")
            at.progress.step()

    await asyncio.gather(*(send() for _ in range(_SENDERS)))
    await at.until_done()


async def recovery(at: Arena) -> Figures:
    """Kill the worker that holds all the work, first one that runs the scanners, then another."""
    at.progress.begin("recovery", 2 * at.options.n)
    with_scanners = await _recover(at, scanners=True)
    async with arena(at.options, at.progress) as fresh:
        without = await _recover(fresh, scanners=False)
    return {
        "recovery_s": with_scanners,
        "recovery_follower_s": without,
        "lease_ttl_s": _TTL_S,
    }


async def _recover(at: Arena, *, scanners: bool) -> float:
    """Seconds from the kill until all its executions run in the other process."""
    n = at.options.n
    process = functools.partial(worker_process, at.url, concurrency=n, lease_ttl=_TTL_S)
    async with BenchApp(at.url) as app, process(scanners=scanners) as first:
        await app.submit_many(app.hold, [()] * n)
        await first.events("started", n)
        async with process() as second:
            killed_ns = time.monotonic_ns()
            first.process.kill()
            restarted = await second.events("started", n)
            at.progress.step(n)
    return (max(restarted) - killed_ns) / 1e9
