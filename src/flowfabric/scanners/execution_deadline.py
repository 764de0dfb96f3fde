"""Ends executions whose deadline passed."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.due import DueScanner


class ExecutionDeadline(DueScanner):
    """Expires executions in any phase whose deadline passed."""

    name = index = "execution_deadline"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.upkeep.expire_execution(
            index.tag, ExpireReason.EXECUTION_DEADLINE, ids
        )
