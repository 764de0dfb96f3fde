"""The client's methods for lanes and workers."""

from flowfabric.core.closing import ClosedOnce
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.api.places import Lanes
from flowfabric.engine.api.workers import Workers
from flowfabric.sdk.engine_calls import engine_call


class FleetCalls(ClosedOnce):
    """Lanes and workers as an operator sees them.

    >>> await client.set_lane_state("mails", "paused", "provider is down")  # doctest: +SKIP
    """

    backend: Backend

    lanes = engine_call(Lanes.list_lanes)
    lane = engine_call(Lanes.get_lane)
    busiest_partitions = engine_call(Lanes.busiest_partitions)
    set_lane_state = engine_call(Lanes.set_lane_state)
    set_lane_config = engine_call(Lanes.set_lane_config)
    workers = engine_call(Workers.list_workers)
    drain_worker = engine_call(Workers.drain_worker)
    mark_worker_dead = engine_call(Workers.mark_worker_dead)
    list_worker_leases = engine_call(Workers.list_worker_leases)
    list_expired_leases = engine_call(Leases.list_expired_leases)
