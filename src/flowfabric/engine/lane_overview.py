"""The lanes of a deployment and their work; the cost of reading does not grow with the work."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec

from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.places import LaneSettings


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
    """Executions that wait for dependencies, limits, capabilities, an operator or the lane."""
    no_worker: int
    """The blocked ones that no live worker can take."""
    finished: int
    workers: int
    oldest_ms: int | None
    """How long the longest-waiting claimable execution has been claimable."""

    @property
    def unfinished(self) -> int:
        return self.waiting + self.delayed + self.active + self.suspended + self.blocked


async def read_lanes(backend: Backend) -> list[LaneOverview]:
    """Every lane in use."""
    names = await backend.places.lanes_in_use()
    settings, counts, ages, live = await asyncio.gather(
        backend.lanes.read_settings(names),
        backend.listings.count_lanes(names),
        backend.listings.oldest_eligible(names),
        backend.workers.list_workers(None, limit=None),
    )
    serving = Counter(lane for worker in live for lane in worker.lanes)
    return [
        _overview(each, counts[each.lane_id], serving[each.lane_id], ages[each.lane_id])
        for each in settings
    ]


def _overview(
    settings: LaneSettings, counts: Mapping[str, int], workers: int, age_ms: int
) -> LaneOverview:
    return LaneOverview(
        lane=settings.lane_id,
        state=settings.state,
        reason=settings.reason,
        # An execution that lost its worker is in two indexes; count it as waiting.
        waiting=counts["eligible"] + counts["reclaimable"],
        delayed=counts["delayed"],
        active=max(0, counts["active"] - counts["reclaimable"]),
        suspended=counts["suspended"],
        blocked=sum(count for name, count in counts.items() if name.startswith("blocked_")),
        no_worker=counts["blocked_route"],
        finished=counts["terminal"],
        workers=workers,
        oldest_ms=age_ms if counts["eligible"] else None,
    )
