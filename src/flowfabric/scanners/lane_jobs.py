"""Background work for lanes and workers."""

from flowfabric.scanners.base import Cycle
from flowfabric.scanners.flow_jobs import QueueScanner


class LaneRescore(QueueScanner):
    """Sorts the executions that wait in a lane again after the lane's weight has changed."""

    def __init__(self) -> None:
        super().__init__("lane_rescore", ("rescore",), self._rescore)

    async def _rescore(self, cycle: Cycle, tag: str) -> None:
        more = True
        while more and not cycle.out_of_time():
            done, more = await cycle.backend.upkeep.rescore(tag)
            cycle.processed += done
            cycle.progress()


class WorkerDrain:
    """Refuses work to workers that are being drained, and revokes the leases they hold too long."""

    name = "worker_drain"

    async def scan(self, cycle: Cycle) -> None:
        for drain in await cycle.backend.upkeep.list_drains():
            if cycle.out_of_time():
                return
            with cycle.surviving("could not continue a drain", namespace=drain.namespace):
                cycle.processed += await cycle.backend.upkeep.continue_drain(drain)
                cycle.progress()
