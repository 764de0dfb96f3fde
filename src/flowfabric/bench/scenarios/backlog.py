"""Whether a claim takes longer the more executions wait."""

from __future__ import annotations

import time

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.raw import Raw
from flowfabric.bench.statistics import percentile
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion

_SMALL = 1_000
_BLOCK = 50
_BLOCKS = 60
_SLICE = 16_384
"""So many creations are built at a time, to keep this process small."""


async def run(options: Options, progress: Progress) -> Figures:
    """Claim one execution at a time with a thousand waiting, and with `n` on another server."""
    async with arena(options.aof) as at, arena(options.aof) as at_large:
        small = await _grown(at, min(_SMALL, options.n), progress)
        large = await _grown(at_large, options.n, progress)
        progress.begin("backlog: claim", 2 * (_BLOCKS + 1))
        # In turns, so that whatever else the machine does touches both alike.
        for _ in range(_BLOCKS + 1):
            await small.claim_block()
            progress.advance()
            await large.claim_block()
            progress.advance()
    few, many = small.times(), large.times()
    return {
        "claim_p50_ms_1e3": percentile(few, 50),
        "claim_p99_ms_1e3": percentile(few, 99),
        "claim_p50_ms_1e6": percentile(many, 50),
        "claim_p99_ms_1e6": percentile(many, 99),
        "ratio_p99": percentile(many, 99) / percentile(few, 99),
    }


async def _grown(at: Arena, wanted: int, progress: Progress) -> _Backlog:
    progress.begin(f"backlog: create {wanted:,}", wanted)
    raw = Raw(at, progress.advance)
    for start in range(0, wanted, _SLICE):
        await raw.send(raw.creations(min(_SLICE, wanted - start)))
    return _Backlog(at, min(_BLOCK, wanted))


class _Backlog:
    """Executions that wait on one server."""

    def __init__(self, at: Arena, block: int) -> None:
        self._at = at
        self._block = block
        self._raw = Raw(at, lambda _: None)
        self._want = ClaimRequest(LANE, "bench", f"bench-{new_uuid()}")
        self._times: list[float] = []

    async def claim_block(self) -> None:
        """Time some claims; what they took is completed and replaced afterwards."""
        at, taken = self._at, list[Completion]()
        for _ in range(self._block):
            start = time.perf_counter_ns()
            claimed = await at.backend.claims.claim_many(self._want, at.tag, 1)
            self._times.append((time.perf_counter_ns() - start) / 1e6)
            taken += [Completion(claim.handle) for claim in claimed.claims]
        await at.backend.executions.complete_many(taken)
        await self._raw.send(self._raw.creations(len(taken)))

    def times(self) -> list[float]:
        """Milliseconds of every claim but those of the first block, which warms up."""
        return self._times[self._block :]
