"""Whether a claim takes longer the more executions wait."""

from __future__ import annotations

import time

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.report import Figures, Options, Progress, percentile, percentiles
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey.raw import RawCalls

_SMALL = 1_000
_BLOCK = 50
_BLOCKS = 60
_SLICE = 16_384
"""Creations built at a time, to keep this process small."""


async def run(options: Options, progress: Progress) -> Figures:
    """Claim one execution at a time with a thousand waiting, and with `n` on another server."""
    async with arena(options.aof) as at, arena(options.aof) as at_large:
        backlogs = _Backlog(at, progress), _Backlog(at_large, progress)
        for backlog, wanted in zip(backlogs, (min(_SMALL, options.n), options.n), strict=True):
            await backlog.grow(wanted)
        few, many = list[float](), list[float]()
        progress.begin("backlog: claim", _BLOCKS + 1)
        # In turns, so that other load on the machine affects both alike.
        for block in range(_BLOCKS + 1):
            small, large = await backlogs[0].claim_block(), await backlogs[1].claim_block()
            if block:  # The first one warms up.
                few += small
                many += large
            progress.advance()
    return {
        **percentiles(few, "claim_", "_1e3"),
        **percentiles(many, "claim_", "_1e6"),
        "ratio_p99": percentile(many, 99) / percentile(few, 99),
    }


class _Backlog:
    """Executions that wait on one server."""

    def __init__(self, at: Arena, progress: Progress) -> None:
        self._at = at
        self._progress = progress
        self._block = _BLOCK
        self._request = ClaimRequest(LANE, "bench", f"bench-{new_uuid()}")

    async def grow(self, wanted: int) -> None:
        """Create so many executions."""
        self._progress.begin(f"backlog: create {wanted:,}", wanted)
        self._block = min(_BLOCK, wanted)
        raw = RawCalls(self._at.backend, LANE, self._at.tag, self._progress.advance)
        for start in range(0, wanted, _SLICE):
            await raw.send(raw.creations(min(_SLICE, wanted - start)))

    async def claim_block(self) -> list[float]:
        """Milliseconds of some claims; what they took is completed and replaced afterwards."""
        at, taken, times = self._at, list[Completion](), list[float]()
        for _ in range(self._block):
            start = time.perf_counter_ns()
            claimed = await at.backend.claims.claim_many(self._request, at.tag, 1)
            times.append((time.perf_counter_ns() - start) / 1e6)
            taken += [Completion(claim.handle) for claim in claimed.claims]
        await at.backend.executions.complete_many(taken)
        raw = RawCalls(at.backend, LANE, at.tag, lambda _: None)
        await raw.send(raw.creations(len(taken)))
        return times
