"""Submit, claim, run a no-op and complete: through the public API, and as raw calls."""

import asyncio
import time
from typing import Any

from flowfabric.app.tasks import TaskFunction
from flowfabric.bench.arena import Arena, timed
from flowfabric.bench.report import Figures
from flowfabric.bench.workers import BenchApp, worker_process

_WARM_UP = 1024
_CHUNK = 4096
_CONCURRENCY = 256
_CALLERS = 64
_PINGS = 2_000


async def floor(at: Arena) -> Figures:
    """The limit set by the engine's functions: raw batched calls, each transition timed."""
    n, raw = at.options.n, at.raw
    at.progress.begin("floor: warm-up", 3 * _WARM_UP)
    await raw.warm_up(_WARM_UP)
    at.progress.begin("floor: create, claim, complete", 3 * n)
    cpu = await at.server_cpu_s()
    create_s, _ = await timed(raw.send(raw.creations(n)))
    claim_s, rows = await timed(raw.send(raw.claims(n)))
    complete_s, _ = await timed(raw.send(raw.completions(rows)))
    cpu = await at.server_cpu_s() - cpu
    whole_s = create_s + claim_s + complete_s
    return _rates(n, cpu, submit=create_s, claim=claim_s, complete=complete_s, lifecycle=whole_s)


def _rates(n: int, server_s: float, **seconds: float) -> Figures:
    """Executions per second of each phase, and the server's time for each execution."""
    rates = {f"{phase}_per_s": n / took_s for phase, took_s in seconds.items()}
    return {**rates, "server_us": server_s / n * 1e6}


async def lifecycle(at: Arena) -> Figures:
    """Submit everything, then run one worker until it is done, both in this process."""
    if at.options.unbatched:
        return await _unbatched(at)
    n = at.options.n
    async with BenchApp(at.url) as app:
        at.progress.begin("lifecycle: warm-up", _WARM_UP)
        await submit(at, app, _WARM_UP)
        await process(at, app, _WARM_UP)
        at.progress.begin("lifecycle", 2 * n)
        server, python = await at.server_cpu_s(), time.process_time()
        submit_s, _ = await timed(submit(at, app, n))
        process_s = await process(at, app, n)
        at.progress.step(n)
        server, python = await at.server_cpu_s() - server, time.process_time() - python
    whole_s = submit_s + process_s
    rates = _rates(n, server, submit=submit_s, process=process_s, lifecycle=whole_s)
    return {**rates, "python_us": python / n * 1e6}


async def submit(
    at: Arena, app: BenchApp, n: int, task: TaskFunction[..., None, ..., Any] | None = None
) -> None:
    """Submit n executions of a task, by default of the no-op."""
    for done in range(0, n, _CHUNK):
        size = min(_CHUNK, n - done)
        await app.submit_many(task or app.noop, [()] * size)
        at.progress.step(size)


async def process(at: Arena, app: BenchApp, n: int) -> float:
    """Seconds from the first handler to the last stored completion."""
    reached = asyncio.Event()
    app.expect(n, reached.set)
    worker = app.worker(concurrency=_CONCURRENCY)
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


async def _unbatched(at: Arena) -> Figures:
    """One execution per call, with many callers and with one."""
    figures = await _single_calls(at, _CALLERS)
    serial = await _single_calls(at, 1)
    start = time.perf_counter()
    for _ in range(_PINGS):
        await at.backend.meta.ping()
    ping_us = (time.perf_counter() - start) / _PINGS * 1e6
    more = {"serial_per_s": serial["lifecycle_per_s"], "ping_us": ping_us}
    return {**figures, "callers": _CALLERS, **more}


async def _single_calls(at: Arena, callers: int) -> Figures:
    """Submit here and process in a worker process at the same time, one execution per call.

    Each caller submits, waits for the answer and submits again. The worker has as many slots; each
    of them ends its execution and claims the next one.
    """
    n = at.options.n
    process = worker_process(at.url, goal=_WARM_UP + n, concurrency=callers, batch=1)
    async with BenchApp(at.url) as app, process as worker:
        at.progress.begin(f"lifecycle: callers: {callers}", _WARM_UP + n)
        await submit(at, app, _WARM_UP)
        await at.until_done()
        server = await at.server_cpu_s()
        start = time.perf_counter()
        rest = iter(range(n))

        async def submit_some() -> None:
            for _ in rest:
                await app.submit(app.noop)
                at.progress.step()

        await asyncio.gather(*(submit_some() for _ in range(callers)))
        submit_s = time.perf_counter() - start
        await worker.events("reached")
        await at.until_done()
        whole_s = time.perf_counter() - start
        server = await at.server_cpu_s() - server
    return _rates(n, server, submit=submit_s, process=whole_s, lifecycle=whole_s)
