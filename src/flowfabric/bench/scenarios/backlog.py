"""Whether a claim takes longer the more executions wait."""

from __future__ import annotations

import time

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.raw import Raw
from flowfabric.bench.statistics import percentile
from flowfabric.core.ids import new_uuid
from flowfabric.engine.executions import Completion
from flowfabric.engine.scheduling import Want

__all__ = ["run"]

_SMALL = 1_000
_SAMPLES = 3_000
_BLOCK = 100
_SLICE = 16_384
"""So many creations are built at a time, to keep this process small."""


async def run(options: Options, progress: Progress) -> Figures:
    """Claim one execution at a time with a thousand waiting, then with `n`."""
    async with arena(options.aof) as at:
        raw = Raw(at, progress.advance)
        small = min(_SMALL, options.n)
        await _grow(raw, 0, small, progress)
        few = await _claim(at, raw, small, progress)
        await _grow(raw, small, options.n, progress)
        many = await _claim(at, raw, options.n, progress)
    return {
        "claim_p50_ms_1e3": percentile(few, 50),
        "claim_p99_ms_1e3": percentile(few, 99),
        "claim_p50_ms_1e6": percentile(many, 50),
        "claim_p99_ms_1e6": percentile(many, 99),
        "ratio_p99": percentile(many, 99) / percentile(few, 99),
    }


async def _grow(raw: Raw, have: int, wanted: int, progress: Progress) -> None:
    progress.begin(f"backlog: create {wanted:,}", wanted - have)
    for start in range(have, wanted, _SLICE):
        await raw.send(raw.creations(min(_SLICE, wanted - start)))


async def _claim(at: Arena, raw: Raw, waiting: int, progress: Progress) -> list[float]:
    """Milliseconds of each claim; what was taken is completed and replaced after every block."""
    want = Want.of(LANE, "bench", f"bench-{new_uuid()}")
    block = min(_BLOCK, waiting)
    times: list[float] = []
    for _ in range(_SAMPLES // _BLOCK + 1):
        taken: list[Completion] = []
        progress.begin(f"backlog: claim with {waiting:,} waiting", 2 * block)
        for _ in range(block):
            start = time.perf_counter_ns()
            claimed = await at.backend.claim_many(want, at.tag, 1)
            times.append((time.perf_counter_ns() - start) / 1e6)
            taken += [Completion(claim.handle) for claim in claimed.claims]
            progress.advance()
        await at.backend.complete_many(taken)
        await raw.send(raw.creations(len(taken)))
    # The first block warms up.
    return times[block:]
