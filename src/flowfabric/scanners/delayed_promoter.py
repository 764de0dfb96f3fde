"""Makes delayed executions and retries claimable when they are due."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.due import DueScanner


class DelayedPromoter(DueScanner):
    """Promotes the due members of each lane's delayed index."""

    name = "delayed_promoter"
    index = "delayed"
    per_lane = True

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.promote_delayed(index.tag, index.lane, ids)
