"""Waitpoints that no suspension used in time are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import is_uuid
from flowfabric.core.text import lossless
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.base import Scope
from flowfabric.scanners.due import DueScanner


class PendingWpExpiry(DueScanner):
    """Closes pending waitpoints; the members of its index are waitpoints, not executions."""

    name = "pending_wp_expiry"
    page = 100
    settled = frozenset({"closed", "not_pending_cleaned", "not_found_cleaned"})
    left = frozenset({"not_yet_due"})

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:  # noqa: ARG002
        """One index for all lanes."""
        return {"pending_waitpoint_expiry": ""}

    def is_member(self, tag: str, member: str) -> bool:  # noqa: ARG002
        """Members are UUIDs."""
        return is_uuid(member)

    async def accepted(
        self, backend: ValkeyBackend, scope: Scope, tag: str, ids: Sequence[str]
    ) -> list[str]:
        """A waitpoint is ours when its execution is."""
        if scope.filter.is_empty:
            return list(ids)
        owners = await asyncio.gather(*(_owner(backend, tag, member) for member in ids))
        ours = set(await scope.filter.accepted(backend, sorted(set(owners))))
        return [member for member, owner in zip(ids, owners, strict=True) if owner in ours]

    async def act(
        self,
        backend: ValkeyBackend,
        tag: str,
        lane: str,  # noqa: ARG002
        ids: Sequence[str],
    ) -> list[str]:
        """Close what is due."""
        return await backend.suspensions.expire_waitpoints(tag, ids)


async def _owner(backend: ValkeyBackend, tag: str, waitpoint_id: str) -> str:
    if not is_uuid(waitpoint_id):
        return ""
    key = keys.waitpoint(tag, waitpoint_id)
    try:
        stored: Any = await backend.transport.call("HGET", key, "execution_id", key=key)
    except EngineError:
        # What cannot be read is not ours; the next cycle looks again.
        return ""
    return "" if stored is None else lossless(stored)
