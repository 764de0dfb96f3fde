"""How soon a waiting handler resumes when its signal comes."""

from __future__ import annotations

import asyncio
import time

from flowfabric.app.run import Run
from flowfabric.bench.arena import Arena, arena, poll
from flowfabric.bench.report import Figures, Options, Progress, percentiles
from flowfabric.bench.workers import BenchApp, Plan, worker_process
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.state import PublicState

_WARM_UP = 50
_CONCURRENCY = 64
_SENDERS = 32
_PAUSE_S = 0.003
"""Long enough for the worker to fall asleep again."""

Answer = tuple[ExecutionId, str, WaitpointToken]
"""What it takes to answer one wait."""


async def run(options: Options, progress: Progress) -> Figures:
    """Signal one waiting execution at a time; then `n` that all wait, as fast as possible."""
    async with arena(options.aof) as at:
        await at.seed_secret()
        app = BenchApp(at.url)
        async with app.fabric, worker_process(Plan(url=at.url, concurrency=_CONCURRENCY)):
            progress.begin("resume: one at a time", _WARM_UP + options.n)
            times = [await _once(at, app, progress) for _ in range(_WARM_UP + options.n)]
            per_s = await _many(at, app, options.n, progress)
    return {**percentiles(times[_WARM_UP:]), "per_s": per_s}


async def _once(at: Arena, app: BenchApp, progress: Progress) -> float:
    """Milliseconds from sending the signal until the handler has it."""
    run = await app.fabric.submit(app.ask)
    answer = await _answer(at, run)
    await asyncio.sleep(_PAUSE_S)
    sent = time.monotonic_ns()
    await at.backend.signals.deliver_signal(*answer, "go")
    resumed: int = await run.result(timeout=30)
    progress.advance()
    return (resumed - sent) / 1e6


async def _many(at: Arena, app: BenchApp, n: int, progress: Progress) -> float:
    """Waits answered per second, until the last handler has ended."""
    progress.begin("resume: suspend many", n)
    runs = await app.fabric.submit_many(app.ask, [()] * n)
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


async def _answer(at: Arena, run: Run[int]) -> Answer:
    """The answer to the run's wait, as soon as it is suspended."""

    async def suspended() -> bool:
        return await run.state() is PublicState.SUSPENDED

    await poll(suspended)
    (waitpoint,) = (await at.backend.waitpoints.list_pending_waitpoints(run.id)).entries
    token = await at.backend.signals.read_waitpoint_token(run.id, waitpoint.waitpoint_id)
    assert token is not None
    return run.id, waitpoint.waitpoint_id, token
