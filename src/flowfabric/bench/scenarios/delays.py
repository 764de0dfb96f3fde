"""How soon workers start, resume and take over executions."""

import asyncio
import time

import msgspec

from flowfabric.app.run import Run
from flowfabric.bench.arena import Arena, arena, poll, timed
from flowfabric.bench.report import Figures, percentiles
from flowfabric.bench.workers import BenchApp, Plan, worker_process
from flowfabric.core.ids import ExecutionId, WaitpointToken
from flowfabric.core.state import PublicState

_WARM_UP = 50
_CONCURRENCY = 64
_SENDERS = 32
_PAUSE_S = 0.003
"""Long enough for the worker to fall asleep again."""
_TTL_S = 2.0

Answer = tuple[ExecutionId, str, WaitpointToken]
"""What it takes to answer one wait."""


async def latency(at: Arena) -> Figures:
    """Submit one execution at a time to an idle worker in its own process."""
    count = _WARM_UP + at.options.n
    starts, results = list[float](), list[float]()
    async with BenchApp(at.url) as app, worker_process(Plan(url=at.url, concurrency=4)):
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
    """Signal one waiting execution at a time; then `n` that all wait, as fast as possible."""
    n = at.options.n
    plan = Plan(url=at.url, concurrency=_CONCURRENCY)
    async with BenchApp(at.url) as app, worker_process(plan):
        at.progress.begin("resume: one at a time", _WARM_UP + n)
        times = [await _resume_once(at, app) for _ in range(_WARM_UP + n)]
        at.progress.begin("resume: suspend many", n)
        runs = await app.submit_many(app.ask, [()] * n)
        answers = [await _answer(at, run) for run in runs]
        at.progress.begin("resume: signal many", n)
        seconds, _ = await timed(_resume_all(at, answers))
    return {**percentiles(times[_WARM_UP:]), "per_s": n / seconds}


async def _resume_once(at: Arena, app: BenchApp) -> float:
    """Milliseconds from sending the signal until the handler has it."""
    run = await app.submit(app.ask)
    answer = await _answer(at, run)
    await asyncio.sleep(_PAUSE_S)
    sent = time.monotonic_ns()
    await at.backend.signals.deliver_signal(*answer, "go")
    resumed = await run.result(timeout=30)
    at.progress.step()
    return (resumed - sent) / 1e6


async def _resume_all(at: Arena, answers: list[Answer]) -> None:
    """Answer the waits; returns when the last handler has ended."""
    unsent = iter(answers)

    async def send() -> None:
        for answer in unsent:
            await at.backend.signals.deliver_signal(*answer, "go")
            at.progress.step()

    await asyncio.gather(*(send() for _ in range(_SENDERS)))
    await at.until_done()


async def _answer(at: Arena, run: Run[int]) -> Answer:
    """The answer to the run's wait, as soon as it is suspended."""

    async def suspended() -> bool:
        return await run.state() is PublicState.SUSPENDED

    await poll(suspended)
    (waitpoint,) = (await at.backend.waitpoints.list_pending_waitpoints(run.id)).entries
    token = await at.backend.signals.read_waitpoint_token(run.id, waitpoint.waitpoint_id)
    assert token is not None
    return run.id, waitpoint.waitpoint_id, token


async def recovery(at: Arena) -> Figures:
    """Kill the one worker of two that holds all the work; once with the scanners, once without."""
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
    plan = Plan(url=at.url, concurrency=n, lease_ttl_s=_TTL_S)
    killed_plan = msgspec.structs.replace(plan, scanners=scanners)
    async with BenchApp(at.url) as app, worker_process(killed_plan) as first:
        await app.submit_many(app.hold, [()] * n)
        await first.events("started", n)
        async with worker_process(plan) as second:
            killed = time.monotonic_ns()
            first.process.kill()
            restarted = await second.events("started", n)
            at.progress.step(n)
    return (max(restarted) - killed) / 1e9
