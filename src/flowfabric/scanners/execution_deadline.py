"""Executions end when their total lifetime is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.due import DueScanner


class ExecutionDeadline(DueScanner):
    """Expires executions in any phase whose deadline passed."""

    name = "execution_deadline"
    settled = frozenset({"expired", "already_terminal", "not_found_cleaned"})
    left = frozenset({"not_yet_due"})

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:  # noqa: ARG002
        """One index for all lanes."""
        return {"execution_deadline": ""}

    async def act(
        self,
        backend: ValkeyBackend,
        tag: str,
        lane: str,  # noqa: ARG002
        ids: Sequence[str],
    ) -> list[str]:
        """Expire what is due."""
        return await backend.upkeep.expire_execution(tag, ExpireReason.EXECUTION_DEADLINE, ids)
