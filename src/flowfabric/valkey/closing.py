"""Closing that goes on to its end, whatever becomes of whoever asked for it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from flowfabric.core.closing import AsyncClosing


class ClosedOnce(AsyncClosing):
    """Closes once. A cancelled caller only stops waiting; a further call waits for the same end."""

    _ending: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether closing has begun."""
        return self._ending is not None

    async def aclose(self) -> None:
        """Close it; a second call does no harm, and returns when all is closed."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._close())
        await asyncio.wait([self._ending])
        if not self._ending.cancelled():
            self._ending.result()

    @abstractmethod
    async def _close(self) -> None:
        """Every step of closing, also when one is cancelled: the end of a loop cancels all."""
