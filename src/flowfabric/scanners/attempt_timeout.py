"""Attempts that run too long end, or are retried where the policy says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.due import DueScanner


class AttemptTimeout(DueScanner):
    """Expires executions whose current attempt passed its timeout."""

    name = "attempt_timeout"
    settled = frozenset(
        {"expired", "retry_scheduled", "failed", "already_terminal", "not_found_cleaned"}
    )
    left = frozenset({"not_yet_due"})

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:  # noqa: ARG002
        """One index for all lanes."""
        return {"attempt_timeout": ""}

    async def act(
        self,
        backend: ValkeyBackend,
        tag: str,
        lane: str,  # noqa: ARG002
        ids: Sequence[str],
    ) -> list[str]:
        """Expire what is due."""
        return await backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, ids)
