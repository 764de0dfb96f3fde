"""`async with` for objects with an `aclose`, `with` for objects with a `close`."""

import asyncio
from abc import ABC, abstractmethod
from typing import Self


class AsyncClosing(ABC):
    """Leaving the block closes the object."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it; a second call does no harm."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class ClosedOnce(AsyncClosing):
    """Closes exactly once, even if the caller is cancelled while waiting."""

    _ending: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether closing has begun."""
        return self._ending is not None

    async def aclose(self) -> None:
        """Close it; every call returns once everything is closed."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._close())
        await asyncio.wait([self._ending])
        if not self._ending.cancelled():
            self._ending.result()

    @abstractmethod
    async def _close(self) -> None:
        """Close everything, even if a step is cancelled: a loop that ends cancels all tasks."""


class Closing(ABC):
    """`AsyncClosing` for code without `await`."""

    @abstractmethod
    def close(self) -> None:
        """Close it; a second call does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
