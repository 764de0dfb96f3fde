"""A worker over HTTP: it claims, renews and completes through a server process."""

import time

from flowfabric.bench.arena import Arena
from flowfabric.bench.report import Figures, percentile
from flowfabric.bench.scenarios.http import server_process
from flowfabric.bench.scenarios.lifecycle import submit
from flowfabric.bench.workers import BenchApp, worker_process

_WARM_UP = 1024
_CONCURRENCY = 256
_STARTS = 200


async def run(at: Arena) -> Figures:
    """Executions per second of one worker behind one server, and how soon an idle one starts."""
    n = at.options.n
    async with server_process(at.url) as port, BenchApp(at.url) as app:
        url = f"http://127.0.0.1:{port}"
        process = worker_process(url, goal=_WARM_UP + n, concurrency=_CONCURRENCY)
        async with process as worker:
            at.progress.begin("remote: warm-up", _WARM_UP)
            await submit(at, app, _WARM_UP)
            await at.until_done()
            at.progress.begin("remote: worker over HTTP", n)
            began = time.perf_counter()
            await submit(at, app, n)
            await worker.events("reached")
            await at.until_done()
            took_s = time.perf_counter() - began
            starts: list[float] = []
            at.progress.begin("remote: idle worker", _STARTS)
            for _ in range(_STARTS):
                asked = time.monotonic_ns()
                starts.append((await (await app.submit(app.stamp)).result() - asked) / 1e6)
                at.progress.step()
    return {
        "lifecycle_per_s": n / took_s,
        "start_p50_ms": percentile(starts, 50),
        "start_p99_ms": percentile(starts, 99),
    }
