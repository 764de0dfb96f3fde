"""The engine's functions without checks or typed results, as a baseline for measurements."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.claims import claim_args
from flowfabric.engine.valkey.pages import chunks

_BATCH = 128
_DEPTH = 3
"""Calls in flight: enough to keep the server busy, few enough that no queue builds up."""

Call = tuple[str, Sequence[Any]]
Row = Sequence[Any]


class RawCalls:
    """Creates, claims and completes many executions in one partition of a lane."""

    def __init__(
        self, backend: Backend, lane_id: str, tag: str, advance: Callable[[int], None]
    ) -> None:
        self._calls = cast("ValkeyBackend", backend).calls
        self._tag = tag
        self._advance = advance
        self._request = ClaimRequest(lane_id, "bench", f"bench-{new_uuid()}")

    def creations(self, n: int, payload: bytes = b"") -> list[Call]:
        ids = ExecutionId.mint_solo_many(self._request.lane_id, self._calls.counts, n)

        def args(some: Sequence[ExecutionId]) -> list[Any]:
            return [b"", *(part for i in some for part in (i, "noop", payload, "json", b""))]

        return [("ff_create", args(some)) for some in chunks(ids, _BATCH)]

    def claims(self, n: int) -> list[Call]:
        return [
            ("ff_claim_many", claim_args(self._request, len(some), new_uuid()))
            for some in chunks(range(n), _BATCH)
        ]

    def completions(self, rows: Sequence[Row]) -> list[Call]:
        def parts(row: Row) -> Row:
            return row[0], b"%b/%b" % (row[3], row[4]), "lease_holder", "0", b""

        return [
            ("ff_complete", [len(some), *(part for row in some for part in parts(row))])
            for some in chunks(rows, _BATCH)
        ]

    async def send(self, calls: Sequence[Call]) -> list[Any]:
        """Make the calls, a few at a time; returns the answers of all items in order."""
        waiting, replies = iter(enumerate(calls)), dict[int, list[Any]]()
        await asyncio.gather(*(self._send_some(waiting, replies) for _ in range(_DEPTH)))
        return [answer for _, answers in sorted(replies.items()) for answer in answers]

    async def _send_some(
        self, waiting: Iterator[tuple[int, Call]], replies: dict[int, list[Any]]
    ) -> None:
        for number, (function, args) in waiting:
            reply = await self._calls.fcall(function, self._tag, args, op="bench")
            replies[number] = reply[2]
            self._advance(len(reply[2]))

    async def warm_up(self, n: int, payload: bytes = b"") -> None:
        await self.send(self.creations(n, payload))
        await self.send(self.completions(await self.send(self.claims(n))))
