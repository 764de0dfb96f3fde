"""The engine itself: is it there, what can it do, what time is it."""

from __future__ import annotations

from flowfabric.engine.valkey.boot import prepare
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.collisions import report_collisions
from flowfabric.engine.valkey.health import log_findings


class ValkeyMeta:
    """`Meta` on Valkey."""

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    async def ping(self) -> None:
        await self._calls.transport.call("PING", key="")

    async def prepare(self) -> bool:
        calls = self._calls
        loaded = await prepare(calls.transport, calls.counts)
        await report_collisions(calls.transport, calls.counts)
        return loaded

    async def server_time_ms(self) -> int:
        return await self._calls.server_time_ms()

    async def log_findings(self) -> None:
        await log_findings(self._calls.transport)

    async def wait_ready(self, timeout_s: float) -> None:
        await self._calls.transport.wait_ready(timeout_s)

    def hurry(self, *, leaving: bool = True) -> None:
        self._calls.transport.hurry(leaving=leaving)
