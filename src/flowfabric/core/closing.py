"""`async with` for whatever has an `aclose`, `with` for whatever has a `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class AsyncClosing(ABC):
    """Leaving the block closes the object, whatever happened inside."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it; a second call does no harm."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Closing(ABC):
    """The same for ordinary code."""

    @abstractmethod
    def close(self) -> None:
        """Close it; a second call does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
