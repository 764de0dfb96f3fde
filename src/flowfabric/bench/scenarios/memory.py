"""How much memory of the server an execution takes while it waits, runs and has finished."""

from __future__ import annotations

import asyncio

from flowfabric.bench.arena import LANE, Arena, arena
from flowfabric.bench.report import Figures, Options, Progress
from flowfabric.engine.valkey.raw import RawCalls

_PAYLOAD = b'{"text":"' + b"x" * 189 + b'"}'
_WARM_UP = 256
_SETTLED = 5
"""Equal readings in a row: the server no longer moves its tables to larger ones."""
_PAUSE_S = 0.05


async def run(options: Options, progress: Progress) -> Figures:
    """Create, claim and complete `n` executions with a payload of 200 bytes."""
    n = options.n
    async with arena(options.aof) as at:
        raw = RawCalls(at.backend, LANE, at.tag, progress.advance)
        progress.begin("memory: warm-up", 3 * _WARM_UP)
        await raw.warm_up(_WARM_UP, _PAYLOAD)
        progress.begin("memory: create, claim, complete", 3 * n)
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
        await asyncio.sleep(_PAUSE_S)
    return seen[-1]
