"""The engine itself: is it there, what can it do, what time is it."""

from __future__ import annotations

from typing import Protocol


class Meta(Protocol):
    """The engine itself: is it there, what can it do, what time is it."""

    async def ping(self) -> None:
        """One round trip."""
        ...

    async def prepare(self) -> bool:
        """Set the deployment up; True if the function library was loaded. Safe to repeat."""
        ...

    async def server_time_ms(self) -> int:
        """The engine's clock."""
        ...

    async def log_findings(self) -> None:
        """Warn of server settings that put work at risk."""
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as the store is reachable; raises when it is not in time."""
        ...

    def hurry(self, *, leaving: bool = True) -> None:
        """While leaving, calls fail at once instead of waiting for the store."""
        ...
