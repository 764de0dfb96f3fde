"""How much memory of the server an execution takes while it waits, runs and has ended."""

from __future__ import annotations

import asyncio

from flowfabric.bench.arena import Arena, arena
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.raw import Raw
from flowfabric.engine.valkey import keys

_PAYLOAD = b'{"text":"' + b"x" * 189 + b'"}'
_WARM_UP = 256
_SETTLED = 5
"""So many equal readings in a row: tables are no longer being moved to larger ones."""
_PAUSE_S = 0.05


async def run(options: Options, progress: Progress) -> Figures:
    """Create, claim and complete `n` executions with a payload of 200 bytes."""
    n = options.n
    async with arena(options.aof) as at:
        raw = Raw(at, progress.advance)
        progress.begin("memory: warm-up", 3 * _WARM_UP)
        await raw.send(raw.creations(_WARM_UP, _PAYLOAD))
        await raw.send(raw.completions(await raw.send(raw.claims(_WARM_UP))))
        progress.begin("memory: create, claim, complete", 3 * n)
        empty, _ = await _used(at)
        await raw.send(raw.creations(n, _PAYLOAD))
        waiting, _ = await _used(at)
        rows = await raw.send(raw.claims(n))
        active, _ = await _used(at)
        await raw.send(raw.completions(rows))
        finished, feed = await _used(at)
        events = keys.events(at.tag)
        entries: int = await at.backend.transport.call("XLEN", events, key=events)
    return {
        "bytes_waiting": (waiting - empty) / n,
        "bytes_active": (active - empty) / n,
        "bytes_finished": (finished - empty) / n,
        "bytes_feed": feed,
        "feed_entries": entries,
    }


async def _used(at: Arena) -> tuple[int, int]:
    """Bytes of data without connections, log buffers and the event feed; and of that feed."""
    transport, feed_key = at.backend.transport, keys.events(at.tag)
    seen: list[tuple[int, int]] = []
    while len(seen) < _SETTLED or len(set(seen[-_SETTLED:])) > 1:
        memory = await at.info("memory")
        feed: int | None = await transport.call(
            "MEMORY", "USAGE", feed_key, "SAMPLES", 0, key=feed_key
        )
        beside = ("mem_clients_normal", "mem_aof_buffer")
        used = int(memory["used_memory"]) - sum(int(memory[name]) for name in beside)
        seen.append((used - (feed or 0), feed or 0))
        await asyncio.sleep(_PAUSE_S)
    return seen[-1]
