"""Ends attempts that run too long, or retries them if the policy says so."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.due import DueScanner


class AttemptTimeout(DueScanner):
    """Expires executions whose current attempt passed its timeout."""

    name = index = "attempt_timeout"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.expire_execution(index.tag, ExpireReason.ATTEMPT_TIMEOUT, ids)
