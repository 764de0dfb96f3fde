"""The engine's calls without the SDK: arguments built beforehand, batches, several in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flowfabric.bench.arena import LANE, Arena
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.claim_rows import claim_args

BATCH = 128
DEPTH = 3
"""Calls in flight: the server never waits for the next one, and no queue builds up."""

Call = tuple[str, Sequence[Any]]
Row = Sequence[Any]


class Raw:
    """Whole transitions of many executions of one lane."""

    def __init__(self, arena: Arena, advance: Callable[[int], None]) -> None:
        self._arena = arena
        self._advance = advance
        self._want = ClaimRequest(LANE, "bench", f"bench-{new_uuid()}")

    def creations(self, n: int, payload: bytes = b"") -> list[Call]:
        """The calls that create `n` executions."""
        ids = ExecutionId.mint_solo_many(LANE, self._arena.backend.counts, n)
        return [
            (
                "ff_create",
                [b""] + [part for eid in some for part in (eid, "noop", payload, "json", b"")],
            )
            for some in _batches(ids)
        ]

    def claims(self, n: int) -> list[Call]:
        """The calls that claim `n` executions."""
        return [
            ("ff_claim_many", claim_args(self._want, size, new_uuid()))
            for size in (min(BATCH, n - start) for start in range(0, n, BATCH))
        ]

    def completions(self, rows: Sequence[Row]) -> list[Call]:
        """The calls that complete what was claimed."""
        return [
            (
                "ff_complete",
                [len(some)]
                + [
                    part
                    for row in some
                    for part in (row[0], b"%b/%b" % (row[3], row[4]), "lease_holder", "0", b"")
                ],
            )
            for some in _batches(rows)
        ]

    async def send(self, calls: Iterable[Call]) -> list[Any]:
        """Make the calls, a few at a time; the item answers of all of them in order."""
        waiting = iter(list(enumerate(calls)))
        replies: dict[int, list[Any]] = {}
        await asyncio.gather(*(self._send_some(waiting, replies) for _ in range(DEPTH)))
        return [answer for _, answers in sorted(replies.items()) for answer in answers]

    async def _send_some(
        self, waiting: Iterator[tuple[int, Call]], replies: dict[int, list[Any]]
    ) -> None:
        backend, tag = self._arena.backend, self._arena.tag
        for number, (function, args) in waiting:
            reply = await backend.calls.fcall(function, tag, args, op="bench")
            replies[number] = reply[2]
            self._advance(len(reply[2]))


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
