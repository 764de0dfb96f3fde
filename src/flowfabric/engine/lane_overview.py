"""The lanes of a deployment with their work, read at a cost that does not grow with the work."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec

from flowfabric.core.ids import PartitionKey
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.places import LaneSettings

_AT_ONCE = 16
_MAX_PLACES = 256


class LaneOverview(msgspec.Struct, frozen=True, kw_only=True):
    """One lane: its state, its work by what it waits for, and how many workers serve it."""

    lane: str
    state: str
    reason: str
    waiting: int
    delayed: int
    active: int
    suspended: int
    blocked: int
    """Those that wait for dependencies, budgets, quotas, capabilities, an operator or the lane."""
    no_worker: int
    """Those of them that no live worker can take."""
    finished: int
    workers: int
    oldest_ms: int | None
    """How long the longest-waiting of those that are next in line has existed."""

    @property
    def unfinished(self) -> int:
        return self.waiting + self.delayed + self.active + self.suspended + self.blocked


async def read_lanes(backend: Backend) -> list[LaneOverview]:
    """Every lane in use."""
    names = await backend.places.lanes_in_use()
    settings, counts, live = await asyncio.gather(
        backend.lanes.read_settings(names),
        backend.listings.count_lanes(names),
        backend.workers.list_workers(None, limit=None),
    )
    oldest = await _oldest(backend, {name for name in names if counts[name]["eligible"]})
    serving = Counter(lane for worker in live for lane in worker.lanes)
    return [
        _overview(each, counts[each.lane_id], serving[each.lane_id], oldest.get(each.lane_id))
        for each in settings
    ]


async def _oldest(backend: Backend, lanes: set[str]) -> dict[str, int]:
    """The age in ms of the first execution in line of each lane; the largest of all partitions."""
    if not lanes:
        return {}
    now, used = await asyncio.gather(
        backend.meta.server_time_ms(), backend.places.lanes_by_partition()
    )
    places = [(lane, tag) for tag, here in used.items() for lane in here & lanes]
    ages, gate = dict[str, int](), asyncio.Semaphore(_AT_ONCE)

    async def read(lane: str, tag: str) -> None:
        async with gate:
            partition = PartitionKey(tag).index_number
            page = await backend.listings.list_lane(lane, "eligible", partition=partition, limit=1)
        for first in page.executions:
            ages[lane] = max(ages.get(lane, 0), now - int(first.created_at))

    await asyncio.gather(*(read(*place) for place in places[:_MAX_PLACES]))
    return ages


def _overview(
    settings: LaneSettings, counts: Mapping[str, int], workers: int, oldest_ms: int | None
) -> LaneOverview:
    return LaneOverview(
        lane=settings.lane_id,
        state=settings.state,
        reason=settings.reason,
        # What lost its worker is in two indexes; it waits for another one.
        waiting=counts["eligible"] + counts["reclaimable"],
        delayed=counts["delayed"],
        active=max(0, counts["active"] - counts["reclaimable"]),
        suspended=counts["suspended"],
        blocked=sum(count for name, count in counts.items() if name.startswith("blocked_")),
        no_worker=counts["blocked_route"],
        finished=counts["terminal"],
        workers=workers,
        oldest_ms=oldest_ms,
    )
