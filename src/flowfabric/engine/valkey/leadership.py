"""Which process runs the scanners."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric.core.text import lossless, shown
from flowfabric.engine.api.leadership import Leader, Leadership
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls

_TAG = keys.LEADERS_TAG
# Leaders acquire their lease again every minute, which lists them again.
_LISTED_MS = 300_000


class ValkeyLeadership(Leadership):
    """`Leadership` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def acquire(self, duty: str, identity: str, ttl_ms: int) -> bool:
        return await self._calls.ask(
            *("ff_lead", _TAG, (duty, identity, ttl_ms, _LISTED_MS)),
            lambda reply: reply[2] == 1,
            op="acquire",
        )

    async def renew(self, duty: str, identity: str, ttl_ms: int) -> bool:
        key = keys.leader(_TAG, duty)
        # Reads and renews in one command; renewing the lease of another process is harmless.
        owner: Any = await self._calls.transport.call(
            *("GETEX", key, "PX", ttl_ms), key=key, replay_safe=True
        )
        return owner == identity.encode()

    async def remaining_ms(self, duty: str) -> int | None:
        key = keys.leader(_TAG, duty)
        left: Any = await self._calls.transport.call("PTTL", key, key=key)
        return left if left >= 0 else None

    async def resign(self, duty: str, identity: str) -> None:
        await self._calls.fcall("ff_resign", _TAG, (duty, identity), op="resign")

    async def leaders(self) -> list[Leader]:
        duties = ["", *await self._calls.registered(keys.leaders(_TAG), str)]
        owners = await asyncio.gather(*(self._owner(duty) for duty in duties))
        return [
            Leader(shown(lossless(owner)).rpartition(":")[0], bool(duty))
            for duty, owner in zip(duties, owners, strict=True)
            if owner is not None
        ]

    async def _owner(self, duty: str) -> bytes | None:
        key = keys.leader(_TAG, duty)
        return await self._calls.read(key, "GET", key)
