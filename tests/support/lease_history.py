"""Following lease history in tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.events import EventFilter, LeaseEvent, Subscription
from tests.support.engine import LANE, Engine

LANES = ("alpha", "beta", "gamma")
RETRY: dict[str, Any] = {
    "max_reclaim_count": 9,
    "retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 5}},
}


@asynccontextmanager
async def following(
    backend: Backend, cursor: Any = "now", where: EventFilter | None = None, **options: Any
) -> AsyncGenerator[Subscription[LeaseEvent]]:
    history = await backend.events.subscribe_lease_history(cursor, where=where, **options)
    try:
        yield history
    finally:
        await history.aclose()


async def take(history: Subscription[LeaseEvent], count: int) -> list[LeaseEvent]:
    found: list[LeaseEvent] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            event = await anext(history)
            assert isinstance(event, LeaseEvent), event
            found.append(event)
    return found


async def nothing_more(history: Subscription[LeaseEvent], engine: Engine) -> None:
    """What comes next is what happens next, and not anything from before."""
    handle = await engine.running(lane="marker")
    (event,) = await take(history, 1)
    assert event.execution_id == handle.execution_id


async def lived(engine: Engine, lane: str = LANE, **create: Any) -> ExecutionId:
    """One short life: acquired, then released by its completion."""
    handle = await engine.running(lane=lane, **create)
    await engine.backend.executions.complete(handle)
    return handle.execution_id
