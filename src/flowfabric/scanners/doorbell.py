"""Rings again for work that waits, in case a ring was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flowfabric.core import keys
from flowfabric.engine.backend import Backend
from flowfabric.scanners.base import ScanResult, Scope
from flowfabric.scanners.due import lane_indexes

__all__ = ["Doorbell"]

_EXISTS_KEYS = 500
_CLAIMABLE = ("eligible", "reclaimable", "sigs")


class Doorbell:
    """The fast pass over claimable work: one EXISTS when there is none."""

    name = "doorbell"

    def indexes(self, lanes: Sequence[str]) -> list[str]:
        """Where claimable work stands; while nothing does, the watch asks for us."""
        return [index for name in _CLAIMABLE for index in lane_indexes(lanes, name)]

    async def scan(self, backend: Backend, scope: Scope) -> ScanResult:
        """Ring every lane and partition that holds claimable work."""
        tags, lanes = scope.territory.tags, scope.territory.lanes
        waiting = await self._waiting(backend, scope)
        scope.progress()
        if scope.watch is not None:
            scope.watch.absent(self.indexes(lanes), [tag for tag in tags if tag not in waiting])
        if not waiting or not lanes:
            return ScanResult()
        await backend.ring_waiting([tag for tag in tags if tag in waiting], lanes)
        # Ringing is no repair: it says nothing about whether the first ring was lost.
        return ScanResult()

    async def _waiting(self, backend: Backend, scope: Scope) -> set[str]:
        """The partitions that may hold claimable work."""
        tags, lanes = scope.territory.tags, scope.territory.lanes
        size = max(1, _EXISTS_KEYS // max(1, 3 * len(lanes)))
        if backend.transport.is_cluster:
            size = 1
        groups = [tags[start : start + size] for start in range(0, len(tags), size)]
        counts: list[Any] = await asyncio.gather(*(self._exists(backend, g, lanes) for g in groups))
        return {tag for group, count in zip(groups, counts, strict=True) if count for tag in group}

    async def _exists(
        self, backend: Backend, tags: tuple[str, ...], lanes: tuple[str, ...]
    ) -> object:
        names = [
            keys.lane(tag, lane, name) for tag in tags for lane in lanes for name in _CLAIMABLE
        ]
        if not names:
            return 0
        return await backend.transport.call("EXISTS", *names, key=names[0])
