"""Which process runs the scanners: an advisory lease that saves commands, nothing more."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flowfabric.engine.api.concern import Concern


class Leader(msgspec.Struct, frozen=True):
    """A process that runs scanners."""

    process: str
    """`<host>:<pid>`"""
    partial: bool
    """It has a filter, or some of its scanners are disabled."""


class Leadership(Concern, Protocol):
    """The leases of the processes that run scanners, one lease per duty.

    A duty is what a process would scan; the empty one is everything. An identity is
    `<host>:<pid>:<anything unique>`.
    """

    async def acquire(self, duty: str, identity: str, ttl_ms: int) -> bool:
        """Take the lease if it is free, renew it if it is ours; whether we have it now."""
        ...

    async def renew(self, duty: str, identity: str, ttl_ms: int) -> bool:
        """Renew the lease with one cheap command; whether it is ours."""
        ...

    async def remaining_ms(self, duty: str) -> int | None:
        """How long the lease lasts, whoever has it; None if it is free."""
        ...

    async def resign(self, duty: str, identity: str) -> None:
        """Give the lease up if it is ours."""
        ...

    async def leaders(self) -> list[Leader]:
        """The processes that run scanners now, those with every duty first."""
        ...
