"""The engine as its callers see it: one attribute per concern."""

from __future__ import annotations

from typing import Protocol

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.capabilities import Absent
from flowfabric.engine.api.claims import Claims
from flowfabric.engine.api.events import Events
from flowfabric.engine.api.executions import Executions
from flowfabric.engine.api.lanes import Lanes
from flowfabric.engine.api.leases import Leases
from flowfabric.engine.api.listings import Listings
from flowfabric.engine.api.meta import Meta
from flowfabric.engine.api.places import Places
from flowfabric.engine.api.reads import Reads
from flowfabric.engine.api.secrets import Secrets
from flowfabric.engine.api.signals import Signals
from flowfabric.engine.api.streams import Streams
from flowfabric.engine.api.suspensions import Suspensions
from flowfabric.engine.api.upkeep import Leadership, Upkeep
from flowfabric.engine.api.waitpoints import Waitpoints
from flowfabric.engine.api.wakeups import Wakeups
from flowfabric.engine.api.workers import Workers


class Backend(Protocol):
    """Every engine operation, by noun: `backend.leases.renew(handle)`.

    One object per event loop. A second store implements the same concerns and passes
    `tests/conformance`.
    """

    counts: PartitionCounts
    max_payload_bytes: int
    executions: Executions
    reads: Reads
    listings: Listings
    claims: Claims
    leases: Leases
    lanes: Lanes
    wakeups: Wakeups
    places: Places
    workers: Workers
    suspensions: Suspensions
    waitpoints: Waitpoints
    signals: Signals
    secrets: Secrets
    streams: Streams
    events: Events
    upkeep: Upkeep
    leadership: Leadership
    meta: Meta
    flows: Absent
    steps: Absent
    budgets: Absent
    quotas: Absent

    @property
    def closed(self) -> bool:
        """Whether the backend was closed."""
        ...

    async def aclose(self) -> None:
        """Close every connection; calls under way fail."""
        ...
