"""The engine on Valkey: every operation, by concern, behind one object."""

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

from flowfabric.core.closing import ClosedOnce
from flowfabric.core.environment import whole_number
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine import metrics
from flowfabric.engine.api.backend import Backend, refuse_missing
from flowfabric.engine.events.subscription import FeedEvents
from flowfabric.engine.layers import tracing
from flowfabric.engine.layers.audit import audit
from flowfabric.engine.layers.metrics import measure
from flowfabric.engine.valkey import boot
from flowfabric.engine.valkey.admission import ValkeyAdmission
from flowfabric.engine.valkey.budgets import ValkeyBudgets
from flowfabric.engine.valkey.calls import FunctionCalls
from flowfabric.engine.valkey.claims import ValkeyClaims
from flowfabric.engine.valkey.drains import CascadeDrains
from flowfabric.engine.valkey.executions import ValkeyExecutions
from flowfabric.engine.valkey.feeds import ValkeyFeeds
from flowfabric.engine.valkey.flows import ValkeyFlows
from flowfabric.engine.valkey.lanes import ValkeyLanes
from flowfabric.engine.valkey.leases import ValkeyLeases
from flowfabric.engine.valkey.library import configured_library
from flowfabric.engine.valkey.listings import ValkeyListings
from flowfabric.engine.valkey.meta import ValkeyMeta
from flowfabric.engine.valkey.notes import ValkeyNotes
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.engine.valkey.quotas import ValkeyQuotas
from flowfabric.engine.valkey.reads import ValkeyReads
from flowfabric.engine.valkey.secrets import ValkeySecrets
from flowfabric.engine.valkey.steps import ValkeySteps
from flowfabric.engine.valkey.stream_pool import StreamPool, ceiling_from_env
from flowfabric.engine.valkey.streams import ValkeyStreams
from flowfabric.engine.valkey.suspensions import ValkeySuspensions
from flowfabric.engine.valkey.upkeep import ValkeyLeadership, ValkeyUpkeep
from flowfabric.engine.valkey.waitpoints import ValkeySignals, ValkeyWaitpoints
from flowfabric.engine.valkey.wakeups import ValkeyWakeups
from flowfabric.engine.valkey.workers import ValkeyWorkers
from flowfabric.valkey.address import Address
from flowfabric.valkey.connect import connect
from flowfabric.valkey.link import Revive
from flowfabric.valkey.transport import Transport


def _max_payload_bytes() -> int:
    return whole_number(os.environ, "FF_MAX_PAYLOAD_BYTES", 1 << 20, 1)


def check_settings() -> None:
    """Raise an error for wrong settings of a process that sets up a deployment."""
    _max_payload_bytes()
    ceiling_from_env()
    boot.configured_counts()
    boot.configured_lanes()
    boot.configured_secret()
    boot.configured_dev_mode()
    configured_library()


def _nothing() -> None: ...


class ValkeyBackend(ClosedOnce, Backend):
    """The engine on Valkey. One object per event loop; it owns its connections."""

    def __init__(self, transport: Transport, counts: PartitionCounts) -> None:
        super().__init__()
        self.on_closed: Callable[[], None] = _nothing
        self.max_payload_bytes = _max_payload_bytes()
        self.transport = transport
        self.counts = counts
        self.stream_pool = StreamPool(transport)
        calls = self.calls = FunctionCalls(transport, counts, self.max_payload_bytes)
        places = self.places = self._places = ValkeyPlaces(calls)
        drains = self.drains = CascadeDrains(calls)
        executions = self.executions = ValkeyExecutions(calls, places, drains)
        leases = self.leases = ValkeyLeases(calls, places)
        workers = self.workers = ValkeyWorkers(calls, places, leases)
        self.reads = ValkeyReads(calls, workers)
        feeds = ValkeyFeeds(calls, places)
        self.events = self._events = FeedEvents(feeds, counts, self.reads.read_execution_state)
        self.listings = ValkeyListings(calls, places, workers)
        self.budgets = ValkeyBudgets(calls, self.reads)
        self.quotas = self._quotas = ValkeyQuotas(calls)
        self.admission = ValkeyAdmission(calls, drains, self.budgets, self.quotas)
        leases.on_slots_renewed = self.admission.confirm_soon
        executions.on_place_changed = self.admission.change_place
        self.claims = ValkeyClaims(calls, executions, self.admission)
        self.wakeups = ValkeyWakeups(calls)
        self.lanes = ValkeyLanes(calls, places, self.listings)
        self.suspensions = ValkeySuspensions(calls, places, drains)
        self.waitpoints = ValkeyWaitpoints(calls)
        self.signals = ValkeySignals(calls)
        self.secrets = ValkeySecrets(calls)
        self.streams = ValkeyStreams(calls, self.stream_pool)
        self.upkeep = ValkeyUpkeep(calls, places, drains, workers)
        self.leadership = ValkeyLeadership(calls)
        self.meta = ValkeyMeta(calls, self.stream_pool, self)
        self.notes = ValkeyNotes(calls)
        self.flows = ValkeyFlows(calls, places, self._events, drains)
        self.steps = ValkeySteps(calls)
        refuse_missing(self)
        audit(self)
        if (meter := metrics.active()) is not None:
            measure(self, meter)
        if (spans := tracing.active()) is not None:
            tracing.trace(self, spans)

    @classmethod
    async def connect(
        cls,
        address: Address,
        *,
        prepare_with: PartitionCounts | None = None,
        request_timeout: float = 5.0,
        name: str = "flowfabric",
        revive: Revive | None = None,
        mint_secret: boot.MintSecret | None = None,
    ) -> Self:
        """Connect to a deployment and check that it fits; with `prepare_with`, set it up first.

        A caller that can `revive` the server owns it: no other project uses that server.
        """
        # Check settings before connecting.
        _max_payload_bytes()
        ceiling_from_env()
        if prepare_with is not None:
            boot.configured_lanes()
            boot.configured_secret()
        transport = await connect(
            address, request_timeout=request_timeout, name=name, revive=revive
        )
        owned = revive is not None
        try:
            if prepare_with is None:
                counts = await boot.join(transport, owned=owned)
            else:
                await boot.prepare(transport, prepare_with, owned=owned, mint_secret=mint_secret)
                await boot.report_collisions(transport, prepare_with)
                counts = prepare_with
        except BaseException:
            await transport.aclose()
            raise
        return cls(transport, counts)

    async def _close(self) -> None:
        """Close every connection; pending calls fail."""
        async with AsyncExitStack() as closing:
            closing.callback(self.on_closed)
            closing.push_async_callback(self.transport.aclose)
            closing.push_async_callback(self.stream_pool.aclose)
            closing.push_async_callback(self._events.aclose)
            closing.push_async_callback(self.drains.aclose)
            closing.push_async_callback(self._quotas.aclose)
            closing.push_async_callback(self._places.aclose)
