"""Shorthands for tests of handlers that wait."""

from __future__ import annotations

from typing import Any

import flowfabric as ff
from flowfabric.core.contracts.suspension import OpenWaitpoint
from tests.support.engine import Engine
from tests.support.sdk import until

SECRET = "ab" * 32


async def parked(engine: Engine, run: ff.Run[Any], key: str | None = None) -> OpenWaitpoint:
    """Wait until the handler waits (for this key); the first of the waitpoints."""
    found: list[OpenWaitpoint] = []

    async def waits() -> bool:
        if (await run.state()).value != "suspended":
            return False
        page = await engine.backend.waitpoints.list_pending_waitpoints(run.id)
        found[:] = [
            e for e in page.entries if e.state == "active" and key in (None, e.waitpoint_key)
        ]
        return bool(found)

    await until(waits, f"a wait for {key or 'something'}")
    return found[0]
