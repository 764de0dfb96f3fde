"""The scanner of executions that no worker could take."""

from flowfabric.engine.api.upkeep import Index
from flowfabric.scanners.base import Cycle
from flowfabric.scanners.watch import Territory
from flowfabric.scheduler.routes import BLOCKED, release_routes


class RouteUnblocker:
    """Lets executions go that were blocked for want of a capable worker, once there is one.

    A worker does so itself when it registers; this finds what it missed. A process that scans only
    some executions leaves this to one that scans all.
    """

    name = "route_unblocker"

    def indexes(self, territory: Territory) -> list[Index]:
        return [Index(tag, BLOCKED, lane) for tag, lanes in territory.items() for lane in lanes]

    async def scan(self, cycle: Cycle) -> None:
        if not cycle.where.is_empty:
            return
        indexes = self.indexes(cycle.territory)
        if not await cycle.backend.upkeep.any_exists(indexes):
            cycle.progress()
            if cycle.watch is not None:
                cycle.watch.learn_absent(indexes)
            return
        with cycle.surviving("could not unblock executions"):
            cycle.processed += await release_routes(cycle.backend, cycle.territory)
            cycle.progress()
