"""Shorthands for scanner tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners import ScannerFilter, ScannerSettings, ScannerSupervisor
from tests.support.engine import LANE, Engine

QUICK = ScannerSettings(
    intervals_s={
        "lease_expiry": 0.1,
        "delayed_promoter": 0.1,
        "attempt_timeout": 0.1,
        "execution_deadline": 0.1,
        "suspension_timeout": 0.1,
        "pending_wp_expiry": 0.1,
        "doorbell": 0.1,
    },
    restart_backoff_s=0.05,
    # The test clock jumps, which a server's clock does not.
    clock_trust_s=0,
)
DEFAULTS = ScannerSettings()


def idle(
    engine: Engine,
    settings: ScannerSettings = DEFAULTS,
    accept: ScannerFilter | None = None,
) -> ScannerSupervisor:
    """A supervisor that is not started: only `scan_once` makes it do anything."""
    if accept is not None:
        settings = msgspec.structs.replace(settings, filter=accept)
    return ScannerSupervisor(engine.backend, settings)


@asynccontextmanager
async def running(
    backend: ValkeyBackend, settings: ScannerSettings = QUICK
) -> AsyncGenerator[ScannerSupervisor]:
    """A started supervisor."""
    supervisor = ScannerSupervisor(backend, settings)
    supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def members(engine: Engine, tag: str, index: str) -> list[str]:
    """What an index holds, in its order."""
    found: Any = await engine.backend.transport.call("ZRANGE", keys.index(tag, index), 0, -1)
    return [member.decode() for member in found]


async def plant(engine: Engine, tag: str, index: str, member: str, score: int = 1) -> None:
    """Put a member into an index behind the engine's back."""
    await engine.backend.transport.call("ZADD", keys.index(tag, index), score, member)


async def create_delayed(engine: Engine, count: int, *, in_ms: int = 1000) -> list[ExecutionId]:
    """Many delayed executions of one lane, due at the same time, in id order."""
    due = await engine.now() + in_ms
    new = [
        NewExecution(execution_id=engine.new_id(), execution_kind="job", delay_until=due)
        for _ in range(count)
    ]
    await engine.backend.executions.create_many(new)
    return sorted(item.execution_id for item in new)


async def rings(engine: Engine, lane: str = LANE) -> list[bytes]:
    """Partitions whose doorbell rings."""
    found: Any = await engine.backend.transport.call("ZRANGE", keys.wake(lane), 0, -1)
    return found


async def break_record(engine: Engine, execution_id: ExecutionId) -> None:
    """Make one record unreadable for the engine's functions."""
    key = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "garbage")
