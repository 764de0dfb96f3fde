"""Looking for work that nobody announced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scheduler.hints import LaneHints


async def find_work(backend: ValkeyBackend, lane: LaneHints) -> list[str]:
    """The partitions of the lane's next window that hold claimable work, besides hinted ones.

    One command when there is none, which is the rule.
    """
    home, *window = lane.sweep()
    unknown = [tag for tag in (home, *window) if tag not in lane]
    if not unknown or not await backend.claims.any_work(lane.lane_id, unknown):
        return []
    if backend.transport.is_cluster:
        return unknown
    # Most often it is the lane's own partition.
    found = await asyncio.gather(
        *(_narrow(backend, lane.lane_id, part) for part in ([home], window))
    )
    return [tag for part in found for tag in part if tag not in lane]


async def _narrow(backend: ValkeyBackend, lane_id: str, tags: Sequence[str]) -> Sequence[str]:
    if not tags or not await backend.claims.any_work(lane_id, tags):
        return ()
    if len(tags) == 1:
        return tags
    middle = len(tags) // 2
    first, second = await asyncio.gather(
        _narrow(backend, lane_id, tags[:middle]), _narrow(backend, lane_id, tags[middle:])
    )
    return (*first, *second)
