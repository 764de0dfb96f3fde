"""Closes waitpoints that no suspension used in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.core.ids import is_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle
from flowfabric.scanners.due import DueScanner


class PendingWpExpiry(DueScanner):
    """Closes pending waitpoints; the members of its index are waitpoints, not executions."""

    name = "pending_wp_expiry"
    index = "pending_waitpoint_expiry"
    page = 100

    def is_member(self, tag: str, member: str) -> bool:  # noqa: ARG002
        return is_uuid(member)

    async def accepted(self, cycle: Cycle, tag: str, ids: Sequence[str]) -> list[str]:
        if cycle.where.is_empty:
            return list(ids)
        upkeep = cycle.backend.upkeep
        owners = await asyncio.gather(*(upkeep.waitpoint_owner(tag, each) for each in ids))
        ours = set(await cycle.where.accepted(cycle.backend, sorted(set(owners))))
        return [each for each, owner in zip(ids, owners, strict=True) if owner in ours]

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.suspensions.expire_waitpoints(index.tag, ids)
