"""What the engine's functions alone allow: raw batched calls, nothing else in the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from flowfabric.bench.arena import LANE, arena
from flowfabric.bench.report import Figures, Options, Progress
from flowfabric.engine.valkey.raw import RawCalls

_WARM_UP = 1024


async def run(options: Options, progress: Progress) -> Figures:
    """Create, claim and complete `n` executions, each transition as one timed block."""
    n = options.n
    async with arena(options.aof) as at:
        raw = RawCalls(at.backend, LANE, at.tag, progress.advance)
        progress.begin("floor: warm-up", 3 * _WARM_UP)
        await raw.warm_up(_WARM_UP)
        progress.begin("floor: create, claim, complete", 3 * n)
        cpu = await at.server_cpu_s()
        create_s, _ = await _timed(raw, raw.creations(n))
        claim_s, rows = await _timed(raw, raw.claims(n))
        complete_s, _ = await _timed(raw, raw.completions(rows))
        cpu = await at.server_cpu_s() - cpu
    return {
        "submit_per_s": n / create_s,
        "claim_per_s": n / claim_s,
        "complete_per_s": n / complete_s,
        "lifecycle_per_s": n / (create_s + claim_s + complete_s),
        "server_us": cpu / n * 1e6,
    }


async def _timed(raw: RawCalls, calls: Sequence[Any]) -> tuple[float, list[Any]]:
    start = time.perf_counter()
    answers = await raw.send(calls)
    return time.perf_counter() - start, answers
