"""The cost of scale: many executions in memory, a long backlog, a hundred idle workers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from statistics import median
from typing import NamedTuple

from flowfabric.bench.arena import LANE, Arena, arena, timed
from flowfabric.bench.report import Figures, percentile, percentiles
from flowfabric.bench.workers import BenchApp, worker_process
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion

_PAYLOAD = b'{"text":"' + b"x" * 189 + b'"}'
_MEMORY_WARM_UP = 256
_SETTLED = 5
"""Equal readings in a row after which the server has finished resizing its tables."""
_READ_PAUSE_S = 0.05

_CLAIM = ClaimRequest(LANE, "bench", "bench-backlog")
_SMALL = 1_000
_BLOCK = 50
_BLOCKS = 60
_SLICE = 16_384
"""How many requests to build at a time, to keep this process small."""

_OTHER_LANE = "elsewhere"
_PROCESSES = 2
_ROUNDS = 3
_TURNS = 40
_SUBMIT_WARM_UP = 50
_SETTLE_S = 1.5


async def memory(at: Arena) -> Figures:
    """Create, claim and complete `n` executions with a payload of 200 bytes."""
    n, raw = at.options.n, at.raw
    at.progress.begin("memory: warm-up", 3 * _MEMORY_WARM_UP)
    await raw.warm_up(_MEMORY_WARM_UP, _PAYLOAD)
    at.progress.begin("memory: create, claim, complete", 3 * n)
    empty, _ = await _used(at)
    await raw.send(raw.creations(n, _PAYLOAD))
    waiting, _ = await _used(at)
    rows = await raw.send(raw.claims(n))
    active, _ = await _used(at)
    await raw.send(raw.completions(rows))
    finished, feed = await _used(at)
    entries, _ = await at.backend.meta.feed_size(at.partition)
    return {
        "bytes_waiting": (waiting - empty) / n,
        "bytes_active": (active - empty) / n,
        "bytes_finished": (finished - empty) / n,
        "bytes_feed": feed,
        "feed_entries": entries,
    }


async def _used(at: Arena) -> tuple[int, int]:
    """Bytes of data without the event feed, and of that feed."""
    seen: list[tuple[int, int]] = []
    while len(seen) < _SETTLED or len(set(seen[-_SETTLED:])) > 1:
        used = (await at.backend.meta.usage()).data_bytes
        _, feed = await at.backend.meta.feed_size(at.partition)
        seen.append((used - feed, feed))
        await asyncio.sleep(_READ_PAUSE_S)
    return seen[-1]


async def backlog(at: Arena) -> Figures:
    """Claim one execution at a time with a thousand waiting, and with `n` on another server."""
    n = at.options.n
    few, many = list[float](), list[float]()
    async with arena(at.options, at.progress) as at_large:
        await _grow(at, min(_SMALL, n))
        await _grow(at_large, n)
        at.progress.begin("backlog: claim", 2 * (_BLOCKS + 1) * min(_BLOCK, n))
        # In turns, so that other load on the machine affects both alike.
        for block in range(_BLOCKS + 1):
            small, large = await _claim_block(at), await _claim_block(at_large)
            if block:  # The first one warms up.
                few += small
                many += large
    return {
        **percentiles(few, "claim_", "_1e3"),
        **percentiles(many, "claim_", "_1e6"),
        "ratio_p99": percentile(many, 99) / percentile(few, 99),
    }


async def _grow(at: Arena, wanted: int) -> None:
    """Create this many executions."""
    at.progress.begin(f"backlog: create {wanted:,}", wanted)
    for start in range(0, wanted, _SLICE):
        await at.raw.send(at.raw.creations(min(_SLICE, wanted - start)))


async def _claim_block(at: Arena) -> list[float]:
    """Milliseconds of some claims; then completes and replaces what they claimed."""
    taken, times = list[Completion](), list[float]()
    for _ in range(min(_BLOCK, at.options.n)):
        start = time.perf_counter_ns()
        claimed = await at.backend.claims.claim_many(_CLAIM, at.tag, 1)
        times.append((time.perf_counter_ns() - start) / 1e6)
        taken += [Completion(claim.handle) for claim in claimed.claims]
    await at.backend.executions.complete_many(taken)
    await at.raw.send(at.raw.creations(len(taken)))
    return times


async def idle(at: Arena) -> Figures:
    """Count the commands of one and of many idle workers, and how much these slow a submitter."""
    workers = at.options.workers
    async with _idle_workers(at, 1, LANE):
        one = await commands_per_s(at)
    async with _idle_workers(at, workers, _OTHER_LANE):
        many = await commands_per_s(at)
    alone, beside = list[_Cost](), {_OTHER_LANE: list[_Cost](), LANE: list[_Cost]()}
    async with BenchApp(at.url) as app:
        await _submit_some(app, _SUBMIT_WARM_UP)
        alone.append(await _submit_cost(at, app))
        for _ in range(_ROUNDS):
            for lane, costs in beside.items():
                async with _idle_workers(at, workers, lane):
                    costs.append(await _submit_cost(at, app))
                alone.append(await _submit_cost(at, app))
    elsewhere, same = beside.values()
    return {
        "commands_per_s": one,
        "commands_per_s_100": many,
        "submit_per_s": 1 / median(cost.wall_s for cost in alone),
        "submit_slowdown_pct": _slowdown_pct(alone[0::2], elsewhere, alone[1::2]),
        "submit_slowdown_same_lane_pct": _slowdown_pct(alone[1::2], same, alone[2::2]),
        "submit_server_us": 1e6 * median(cost.server_s for cost in alone),
        "submit_server_us_same_lane": 1e6 * median(cost.server_s for cost in same),
    }


class _Cost(NamedTuple):
    """What one submit takes: time, and processor time of the server."""

    wall_s: float
    server_s: float


async def _submit_cost(at: Arena, app: BenchApp) -> _Cost:
    """Submit `n` executions, one after the other, of a task that no worker can run.

    The median turn counts, so that other load on the machine matters little.
    """
    at.progress.begin("idle: submit", _TURNS)
    size = -(-at.options.n // _TURNS)
    turns: list[_Cost] = []
    for _ in range(_TURNS):
        before = await at.server_cpu_s()
        wall_s, _ = await timed(_submit_some(app, size))
        turns.append(_Cost(wall_s / size, (await at.server_cpu_s() - before) / size))
        at.progress.step()
    return _Cost(median(turn.wall_s for turn in turns), median(turn.server_s for turn in turns))


def _slowdown_pct(
    before: Sequence[_Cost], crowded: Sequence[_Cost], after: Sequence[_Cost]
) -> float:
    """How much less is submitted per second beside a crowd than right before and after it."""
    # The machine's own speed changes within a minute.
    rounds = zip(before, crowded, after, strict=False)
    return median(
        100 * (1 - (first.wall_s + last.wall_s) / 2 / crowd.wall_s) for first, crowd, last in rounds
    )


@contextlib.asynccontextmanager
async def _idle_workers(at: Arena, workers: int, lane: str) -> AsyncGenerator[None]:
    """Workers of a lane, spread over a few processes, each with its own connections."""
    processes = min(_PROCESSES, workers)
    async with contextlib.AsyncExitStack() as stack:
        for index in range(processes):
            share = workers // processes + (index < workers % processes)
            process = worker_process(at.url, workers=share, concurrency=1, lanes=[lane])
            await stack.enter_async_context(process)
        await asyncio.sleep(min(at.options.seconds, _SETTLE_S))
        yield


async def commands_per_s(at: Arena) -> float:
    """Commands that the server ran for the workers, those inside functions included."""
    at.progress.begin("idle: count commands", 10)
    before, start = (await at.backend.meta.usage()).commands, time.perf_counter()
    for _ in range(10):
        await asyncio.sleep(at.options.seconds / 10)
        at.progress.step()
    after, end = (await at.backend.meta.usage()).commands, time.perf_counter()
    # One of them was our own command that read the first figure.
    return (after - before - 1) / (end - start)


async def _submit_some(app: BenchApp, count: int) -> None:
    for _ in range(count):
        await app.submit(app.unwanted)
