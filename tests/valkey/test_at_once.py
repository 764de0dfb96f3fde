"""Several calls under way at once."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.engine.valkey.calls import at_once


async def test_calls_cancelled_before_they_begin_leave_nothing_unawaited() -> None:
    begun: list[int] = []

    async def call(item: int) -> int:
        begun.append(item)
        return item

    batch = asyncio.create_task(at_once(1, call, [1, 2]))
    await asyncio.sleep(0)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert begun == []
    assert await at_once(1, call, [3, 4]) == [3, 4]
