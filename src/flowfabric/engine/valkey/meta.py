"""The engine itself: health, capabilities, clock."""

import asyncio

from flowfabric.core.errors import TimeoutError_
from flowfabric.core.version import VERSION
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend, supported
from flowfabric.engine.api.meta import (
    Applied,
    Capabilities,
    Finding,
    Identity,
    Meta,
    NoOp,
    StoreUsage,
    Version,
)
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.boot import prepare, report_collisions
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.diagnosis import check_deployment, check_server
from flowfabric.engine.valkey.health import log_findings, server_facts
from flowfabric.engine.valkey.library import LIBRARY_VERSION
from flowfabric.engine.valkey.stream_pool import StreamPool

_IDENTITY = Identity("valkey", Version(*VERSION), "beta")


class ValkeyMeta(Meta):
    """`Meta` on Valkey."""

    def __init__(self, calls: FunctionCalls, pool: StreamPool, backend: Backend) -> None:
        self._calls = calls
        self._pool = pool
        self._backend = backend

    async def ping(self) -> None:
        await self._calls.transport.call("PING", key="")

    async def prepare(self) -> NoOp | Applied:
        calls = self._calls
        loaded = await prepare(calls.transport, calls.counts)
        await report_collisions(calls.transport, calls.counts)
        return Applied(f"function library version {LIBRARY_VERSION}") if loaded else NoOp()

    async def shutdown_prepare(self, grace_s: float) -> None:
        grace_s = check.seconds(grace_s, "grace_s")
        op, loop = "shutdown_prepare", asyncio.get_running_loop()
        started = loop.time()
        if not await self._pool.drain(grace_s):
            elapsed = round((loop.time() - started) * 1000)
            raise TimeoutError_("timeout", op, f"elapsed_ms={elapsed}", op=op)

    def capabilities(self) -> Capabilities:
        return Capabilities(_IDENTITY, supported(self._backend))

    def backend_label(self) -> str:
        return _IDENTITY.family

    async def server_time_ms(self) -> int:
        return await self._calls.server_time_ms()

    async def log_findings(self) -> None:
        await log_findings(self._calls.transport)

    async def usage(self) -> StoreUsage:
        sections = ("cpu", "stats", "memory", "clients")
        nodes = (await server_facts(self._calls.transport, *sections)).values()

        def total(*names: str) -> float:
            return sum(float(facts[name]) for facts in nodes for name in names)

        return StoreUsage(
            cpu_s=total("used_cpu_user_main_thread", "used_cpu_sys_main_thread"),
            commands=round(total("total_commands_processed")),
            data_bytes=round(total("used_memory") - total("mem_clients_normal", "mem_aof_buffer")),
            blocked=round(total("blocked_clients")),
        )

    async def feed_size(self, partition: int) -> tuple[int, int]:
        calls = self._calls
        feed = keys.events(f"{{fp:{check.partition(partition, calls.counts)}}}")
        place = f"{feed}: event feed"
        used = await calls.transport.call("MEMORY", "USAGE", feed, "SAMPLES", 0, key=feed)
        return await calls.read(place, "XLEN", feed), used or 0

    async def diagnose(self, namespace: str | None = None) -> list[Finding]:
        transport = self._calls.transport
        return [
            *await check_server(transport, owned=False),
            *await check_deployment(self._backend, transport, namespace),
        ]

    async def wait_ready(self, timeout_s: float) -> None:
        await self._calls.transport.wait_ready(timeout_s)

    def hurry(self, *, leaving: bool = True) -> None:
        self._calls.transport.hurry(leaving=leaving)
