"""Batch requests: one row per item, with the status and body of a single call."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.server.problems import Problem, problem_of

Row = dict[str, Any]
_GROUPS_AT_ONCE = 16


def done(result: Any, status: int = 200) -> Row:
    """The row of an item that succeeded."""
    return {"status": status, "result": result}


def failed(error: Problem | EngineError, subject: str = "") -> Row:
    """The row of an item that was refused."""
    problem = problem_of(error, subject) if isinstance(error, EngineError) else error
    return {"status": problem.status, **problem.body()}


async def in_order(groups: Sequence[Sequence[int]], call: Callable[[int], Awaitable[None]]) -> None:
    """Each group in order, several groups at a time."""
    gate = asyncio.Semaphore(_GROUPS_AT_ONCE)

    async def one(group: Sequence[int]) -> None:
        async with gate:
            for position in group:
                await call(position)

    await asyncio.gather(*map(one, groups))
