"""Lapsed leases become reclaimable, and the next claim takes them over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.due import DueScanner


class LeaseExpiry(DueScanner):
    """Marks leases whose worker no longer renews them; marking rings the lane's doorbell."""

    name = "lease_expiry"
    settled = frozenset(
        {
            "marked_expired",
            "execution_not_found",
            "not_active",
            "already_expired",
            "already_revoked",
            "unowned",
        }
    )
    left = frozenset({"not_yet_expired"})

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:  # noqa: ARG002
        """One index for all lanes."""
        return {"lease_expiry": ""}

    async def act(
        self,
        backend: ValkeyBackend,
        tag: str,
        lane: str,  # noqa: ARG002
        ids: Sequence[str],
    ) -> list[str]:
        """Mark what is due."""
        return await backend.upkeep.mark_lease_expired_if_due(tag, ids)
