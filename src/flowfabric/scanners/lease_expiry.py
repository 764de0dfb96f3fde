"""Makes expired leases reclaimable, so that the next claim takes them over."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.due import DueScanner


class LeaseExpiry(DueScanner):
    """Marks leases that their worker no longer renews, and rings the doorbell of the lane."""

    name = index = "lease_expiry"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.mark_lease_expired_if_due(index.tag, ids)
