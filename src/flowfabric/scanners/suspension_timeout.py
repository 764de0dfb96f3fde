"""Suspensions end as they asked to when their time is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.due import DueScanner


class SuspensionTimeout(DueScanner):
    """Fails, cancels, expires, resumes or escalates suspensions whose timeout passed."""

    name = "suspension_timeout"
    settled = frozenset(
        {
            *("fail", "cancel", "expire", "auto_resume", "escalate"),
            *("not_found_cleaned", "not_suspended_cleaned", "no_active_suspension_cleaned"),
        }
    )
    left = frozenset({"not_yet_due"})

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:  # noqa: ARG002
        """One index for all lanes."""
        return {"suspension_timeout": ""}

    async def act(
        self,
        backend: ValkeyBackend,
        tag: str,
        lane: str,  # noqa: ARG002
        ids: Sequence[str],
    ) -> list[str]:
        """Carry out what is due."""
        return await backend.suspensions.expire_suspension(tag, ids)
