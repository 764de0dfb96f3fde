"""`async with` for whatever has an `aclose`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["AsyncClosing"]


class AsyncClosing(ABC):
    """Leaving the block closes the object, whatever happened inside."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it; a second call does no harm."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
