"""How soon a handler that waits goes on when its signal comes."""

from __future__ import annotations

import asyncio
import time

from flowfabric.app.run import Run
from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.child import Plan
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.processes import worker_process
from flowfabric.bench.statistics import percentile
from flowfabric.bench.tasks import BenchApp
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.engine.valkey import keys

_WARM_UP = 50
_CONCURRENCY = 64
_SENDERS = 32
_PAUSE_S = 0.003
"""Long enough for the worker to fall asleep again."""
_LOOK_S = 0.001

Answer = tuple[ExecutionId, str, WaitpointToken]
"""What it takes to answer one wait."""


async def run(options: Options, progress: Progress) -> Figures:
    """Signal one waiting execution at a time; then `n` that all wait, as fast as it goes."""
    async with arena(options.aof) as at:
        await at.seed_secret()
        app = BenchApp(at.url)
        plan = Plan(url=at.url, concurrency=_CONCURRENCY)
        async with app.fabric, worker_process(plan):
            progress.begin("resume: warm-up", _WARM_UP)
            for _ in range(_WARM_UP):
                await _once(at, app, progress)
            progress.begin("resume: one at a time", options.n)
            times = [await _once(at, app, progress) for _ in range(options.n)]
            per_s = await _many(at, app, options.n, progress)
    return {
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "per_s": per_s,
    }


async def _once(at: Arena, app: BenchApp, progress: Progress) -> float:
    """Milliseconds from sending the signal until the handler has it in hand."""
    run = await app.fabric.submit(app.ask)
    await _parked(at, 1)
    answer = await _answer(at, run)
    await asyncio.sleep(_PAUSE_S)
    sent = time.monotonic_ns()
    await at.backend.signals.deliver_signal(*answer, "go")
    went_on: int = await run.result(timeout=30)
    progress.advance()
    return (went_on - sent) / 1e6


async def _many(at: Arena, app: BenchApp, n: int, progress: Progress) -> float:
    """Waits answered per second, until the last handler has ended."""
    progress.begin("resume: suspend many", n)
    runs = await app.fabric.submit_many(app.ask, [()] * n)
    await _parked(at, n)
    answers = iter([await _answer(at, run) for run in runs])
    progress.begin("resume: signal many", n)

    async def send() -> None:
        for answer in answers:
            await at.backend.signals.deliver_signal(*answer, "go")
            progress.advance()

    start = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(_SENDERS)))
    await at.until_done()
    return n / (time.perf_counter() - start)


async def _parked(at: Arena, wanted: int) -> None:
    """Return when so many executions wait."""
    index = keys.lane(at.tag, LANE, "suspended")
    while await at.backend.transport.call("ZCARD", index, key=index) < wanted:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


async def _answer(at: Arena, run: Run[int]) -> Answer:
    (waitpoint,) = (await at.backend.waitpoints.list_pending_waitpoints(run.id)).entries
    token = await at.backend.signals.read_waitpoint_token(run.id, waitpoint.waitpoint_id)
    assert token is not None
    return run.id, waitpoint.waitpoint_id, token
