"""Visits to places on several servers: one that is slow or away holds up no visit elsewhere."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from flowfabric.engine.api.places import WorkPlace

T = TypeVar("T")

_SLOW_S = 0.05
"""After how long a visit no longer holds up those to other servers."""


class Visits:
    """The visits under way, at most one per place.

    At most one is waited for, the others are slow or pause.
    """

    def __init__(self, on_end: Callable[[asyncio.Task[Any]], None]) -> None:
        self._on_end = on_end
        self._under_way: dict[WorkPlace, asyncio.Task[Any]] = {}

    def __contains__(self, place: WorkPlace) -> bool:
        # One that has ended may still be waiting for its callback, but its hint is there.
        visit = self._under_way.get(place)
        return visit is not None and not visit.done()

    async def begin(self, place: WorkPlace, visit: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a visit; it is done when this returns, unless the server is slow."""
        task = self._under_way[place] = asyncio.create_task(visit)
        task.add_done_callback(partial(self._ended, place))
        try:
            await asyncio.wait([task], timeout=_SLOW_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task

    def _ended(self, place: WorkPlace, task: asyncio.Task[Any]) -> None:
        if self._under_way.get(place) is task:
            del self._under_way[place]
        self._on_end(task)

    def cancel(self) -> None:
        """Cut them short."""
        for task in self._under_way.values():
            task.cancel()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all have ended."""
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=timeout_s)
