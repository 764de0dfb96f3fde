"""Ends suspensions that time out, in the way each of them asked for."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.due import DueScanner


class SuspensionTimeout(DueScanner):
    """Fails, cancels, expires, resumes or escalates suspensions whose timeout passed."""

    name = index = "suspension_timeout"

    async def act(self, backend: Backend, index: Index, ids: Sequence[str]) -> list[str]:
        return await backend.suspensions.expire_suspension(index.tag, ids)
