"""The secrets that sign waitpoint tokens."""

from __future__ import annotations

from typing import Protocol

from flowfabric.core.contracts.suspension import (
    HmacKids,
    Rotation,
    RotationSummary,
    SeedOutcome,
    SeedResult,
)
from flowfabric.engine.api.concern import Concern

DEFAULT_GRACE_MS = 86_400_000


class Secrets(Concern, Protocol):
    """The secrets that sign waitpoint tokens."""

    async def seed_at_boot(self, secret_hex: str | None) -> SeedOutcome:
        """Install the configured secret where none is stored. A stored one always wins."""
        ...

    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> SeedResult:
        """For embedders, at every boot: install where empty; another current key is refused."""
        ...

    async def rotate_waitpoint_hmac_secret(
        self,
        partition: int,
        new_kid: str,
        new_secret_hex: str,
        grace_ms: int = DEFAULT_GRACE_MS,
    ) -> Rotation:
        """Make a new secret current on one partition; the old verifies until its grace ends."""
        ...

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int = DEFAULT_GRACE_MS
    ) -> RotationSummary:
        """Rotate every partition; one that fails never stops the others, and a re-run converges."""
        ...

    async def list_waitpoint_hmac_kids(self, partition: int = 0) -> HmacKids:
        """The keys of a partition that validate now, without their secrets."""
        ...
