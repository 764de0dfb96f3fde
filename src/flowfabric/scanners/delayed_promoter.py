"""Delayed executions and retries become eligible when their time has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.due import DueScanner, lane_indexes


class DelayedPromoter(DueScanner):
    """Promotes due members of every lane's delayed index."""

    name = "delayed_promoter"
    settled = frozenset(
        {"promoted", "not_found_cleaned", "not_runnable_cleaned", "not_delayed_cleaned"}
    )
    left = frozenset({"not_yet_due"})

    def indexes(self, lanes: Iterable[str]) -> Mapping[str, str]:
        """One index per lane."""
        return lane_indexes(lanes, "delayed")

    async def act(
        self, backend: ValkeyBackend, tag: str, lane: str, ids: Sequence[str]
    ) -> list[str]:
        """Promote what is due."""
        return await backend.upkeep.promote_delayed(tag, lane, ids)
