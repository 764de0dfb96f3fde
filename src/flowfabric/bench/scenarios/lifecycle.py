"""Submit, claim, run a no-op and complete through the public API."""

from __future__ import annotations

import asyncio
import time

from flowfabric.bench.arena import Arena, arena
from flowfabric.bench.report import Figures, Options, Progress
from flowfabric.bench.scenarios import floor
from flowfabric.bench.workers import BenchApp, Plan, worker_process

_WARM_UP = 1024
_CHUNK = 4096
_CONCURRENCY = 256
_CALLERS = 64
_PINGS = 2_000


async def run(options: Options, progress: Progress) -> Figures:
    """The figures of one run, and of the floor right after it if asked."""
    async with arena(options.aof) as at:
        measure = _unbatched if options.unbatched else _batched
        figures = await measure(at, options.n, progress)
    if not options.with_floor:
        return figures
    most = (await floor.run(options, progress))["lifecycle_per_s"]
    return {**figures, "floor_per_s": most, "of_floor": figures["lifecycle_per_s"] / most}


async def _batched(at: Arena, n: int, progress: Progress) -> Figures:
    """Submit everything, then run one worker until it is done, both in this process."""
    app = BenchApp(at.url)
    async with app.fabric:
        progress.begin("lifecycle: warm-up", _WARM_UP)
        await _submit(app, _WARM_UP, progress)
        await _process(at, app, _WARM_UP)
        progress.begin("lifecycle", 2 * n)
        server, python = await at.server_cpu_s(), time.process_time()
        submit_s = await _submit(app, n, progress)
        process_s = await _process(at, app, n)
        progress.advance(n)
        server, python = await at.server_cpu_s() - server, time.process_time() - python
    return {
        "submit_per_s": n / submit_s,
        "process_per_s": n / process_s,
        "lifecycle_per_s": n / (submit_s + process_s),
        "server_us": server / n * 1e6,
        "python_us": python / n * 1e6,
    }


async def _submit(app: BenchApp, n: int, progress: Progress) -> float:
    start = time.perf_counter()
    for done in range(0, n, _CHUNK):
        size = min(_CHUNK, n - done)
        await app.fabric.submit_many(app.noop, [()] * size)
        progress.advance(size)
    return time.perf_counter() - start


async def _process(at: Arena, app: BenchApp, n: int) -> float:
    """Seconds from the first handler to the last stored completion."""
    reached = asyncio.Event()
    app.expect(n, reached.set)
    worker = app.fabric.worker(concurrency=_CONCURRENCY)
    serving = asyncio.create_task(worker.run(signals=False))
    serving.add_done_callback(lambda _: reached.set())
    try:
        await reached.wait()
        if not serving.done():
            await at.until_done()
        return (time.monotonic_ns() - app.first_ns) / 1e9
    finally:
        worker.stop()
        # Raises the reason if the worker crashed.
        await serving


async def _unbatched(at: Arena, n: int, progress: Progress) -> Figures:
    """One execution per call, with many callers and with one."""
    figures = await _single_calls(at, n, _CALLERS, progress)
    serial = await _single_calls(at, n, 1, progress)
    start = time.perf_counter()
    for _ in range(_PINGS):
        await at.backend.meta.ping()
    ping_s = (time.perf_counter() - start) / _PINGS
    return {
        **figures,
        "callers": _CALLERS,
        "serial_per_s": serial["lifecycle_per_s"],
        "ping_us": ping_s * 1e6,
    }


async def _single_calls(at: Arena, n: int, callers: int, progress: Progress) -> Figures:
    """Submit here and process in a worker process at the same time, one execution per call.

    Each caller submits, waits for the answer and submits again; the worker has as many slots,
    and each of them ends its execution and takes the next one.
    """
    app = BenchApp(at.url)
    plan = Plan(url=at.url, concurrency=callers, batch=1, goal=_WARM_UP + n)
    async with app.fabric, worker_process(plan) as worker:
        progress.begin(f"lifecycle: callers: {callers}", _WARM_UP + n)
        await _submit(app, _WARM_UP, progress)
        await at.until_done()
        server = await at.server_cpu_s()
        start = time.perf_counter()
        rest = iter(range(n))

        async def submit_some() -> None:
            for _ in rest:
                await app.fabric.submit(app.noop)
                progress.advance()

        await asyncio.gather(*(submit_some() for _ in range(callers)))
        submit_s = time.perf_counter() - start
        await worker.events("reached")
        await at.until_done()
        whole_s = time.perf_counter() - start
        server = await at.server_cpu_s() - server
    return {
        "submit_per_s": n / submit_s,
        "process_per_s": n / whole_s,
        "lifecycle_per_s": n / whole_s,
        "server_us": server / n * 1e6,
    }
