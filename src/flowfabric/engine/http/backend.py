"""The engine behind a FlowFabric server: every operation, by concern, behind one object."""

from contextlib import AsyncExitStack
from typing import Self, cast

import msgspec

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.backend import Backend, refuse_missing, supported
from flowfabric.engine.api.meta import Capabilities
from flowfabric.engine.events.source import FeedSource
from flowfabric.engine.events.subscription import FeedEvents
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.concerns import HttpClaims, HttpFlows, HttpMeta, HttpPlaces, HttpWakeups
from flowfabric.engine.http.feeds import HttpFeeds
from flowfabric.engine.http.leases import HttpLeases
from flowfabric.engine.http.link import CONNECT_TIMEOUT_S, HttpLink
from flowfabric.engine.http.operations import ROOT
from flowfabric.engine.http.proxies import proxied
from flowfabric.engine.layers import tracing


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The server's answer to a connecting client."""

    version: str
    counts: PartitionCounts
    max_payload_bytes: int
    capabilities: Capabilities


class HttpBackend(ClosedOnce, Backend):
    """The engine behind a server. One object per event loop; it owns its connections."""

    remote = True

    def __init__(self, link: HttpLink, described: EngineDescription) -> None:
        self.link = link
        self.counts = described.counts
        self.max_payload_bytes = described.max_payload_bytes
        self.executions = proxied("executions")(link)
        self.reads = proxied("reads")(link)
        self.listings = proxied("listings")(link)
        self.claims = HttpClaims(link)
        self.admission = proxied("admission")(link)
        self.leases = HttpLeases(link)  # pyright: ignore[reportAbstractUsage] - the rest is proxied
        self.lanes = proxied("lanes")(link)
        self.workers = proxied("workers")(link)
        self.suspensions = proxied("suspensions")(link)
        self.waitpoints = proxied("waitpoints")(link)
        self.signals = proxied("signals")(link)
        self.secrets = proxied("secrets")(link)
        self.streams = proxied("streams")(link)
        self.upkeep = proxied("upkeep")(link)
        self.leadership = proxied("leadership")(link)
        self.notes = proxied("notes")(link)
        self.budgets = proxied("budgets")(link)
        self.quotas = proxied("quotas")(link)
        self.budgets.on_budget_opened = None
        self.meta = meta = HttpMeta(link, described.capabilities)
        self.places = HttpPlaces(link, self.lanes)
        self.wakeups = HttpWakeups()
        source = cast("FeedSource", HttpFeeds(proxied("feeds")(link)))
        events = FeedEvents(source, self.counts, self.reads.read_execution_state)
        self.events = self._events = events
        self.flows = HttpFlows(link, self.counts, events)
        self.steps = proxied("steps")(link)
        refuse_missing(self)
        meta.leave_only(supported(self))
        if (spans := tracing.active()) is not None:
            tracing.trace(self, spans)

    @classmethod
    async def connect(
        cls,
        address: ServerAddress,
        *,
        patient: bool = True,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Self:
        """Connect to a server and read its description."""
        link = HttpLink(address, patient=patient, connect_timeout_s=connect_timeout_s)
        try:
            described = await link.call("GET", ROOT, answer=EngineDescription, op="connect")
        except BaseException:
            await link.aclose()
            raise
        return cls(link, described)

    async def _close(self) -> None:
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.link.aclose)
            closing.push_async_callback(self._events.aclose)
