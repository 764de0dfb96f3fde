"""Visits to places on several servers."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric.scheduler.visits import Visits

PLACE = ("default", "{fp:1}")


async def test_a_visit_is_over_as_soon_as_it_ends() -> None:
    """Before its callback runs, too: who took it as under way would drop the hint that it left."""
    ended: list[asyncio.Task[Any]] = []
    visits, answer = Visits(ended.append), asyncio.get_running_loop().create_future()

    async def visit() -> None:
        await answer

    first = await visits.begin(PLACE, visit())
    assert not first.done()
    assert PLACE in visits
    answer.set_result(None)
    await asyncio.sleep(0)
    assert first.done()
    assert ended == []
    assert PLACE not in visits
    second = await visits.begin(PLACE, visit())
    assert second.done()
    assert ended == [first, second]
    assert PLACE not in visits
