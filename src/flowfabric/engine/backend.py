"""The engine on Valkey: every operation, by concern, behind one object."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from flowfabric.core.environment import whole_number
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.appends import Summaries
from flowfabric.engine.audit_trail import AuditTrail
from flowfabric.engine.boot import (
    MintSecret,
    configured_counts,
    configured_lanes,
    configured_secret,
    join,
    prepare,
)
from flowfabric.engine.calls import Limits
from flowfabric.engine.collisions import report_collisions
from flowfabric.engine.expired_leases import LeaseReads
from flowfabric.engine.lease_history import Subscriptions
from flowfabric.engine.listing import Listing
from flowfabric.engine.reads import Reads
from flowfabric.engine.secrets import Secrets
from flowfabric.engine.stream_pool import StreamPool, ceiling_from_env
from flowfabric.engine.streams import Streams
from flowfabric.engine.waitpoints import Waitpoints
from flowfabric.valkey.address import Address
from flowfabric.valkey.closing import ClosedOnce
from flowfabric.valkey.connect import connect
from flowfabric.valkey.transport import Revive, Transport

__all__ = ["Backend", "check_settings", "limits_from_env"]


def limits_from_env() -> Limits:
    """Size limits as the environment sets them."""
    return Limits(max_payload_bytes=whole_number(os.environ, "FF_MAX_PAYLOAD_BYTES", 1 << 20, 1))


def check_settings() -> None:
    """Raise what is wrong in the environment of a process that sets up a deployment."""
    limits_from_env()
    ceiling_from_env()
    configured_counts()
    configured_lanes()
    configured_secret()


class Backend(
    ClosedOnce,
    AuditTrail,
    Reads,
    Listing,
    LeaseReads,
    Subscriptions,
    Waitpoints,
    Secrets,
    Streams,
):
    """Every engine operation. One object per event loop; it owns its connection."""

    def __init__(
        self,
        transport: Transport,
        counts: PartitionCounts,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(transport, counts, limits or limits_from_env())
        self.known_places = {}
        self._older_places = {}
        self.known_namespaces = set()
        self.subscribed = set()
        self.stream_pool = StreamPool(transport)
        self.summaries = Summaries()

    @classmethod
    async def connect(
        cls,
        address: Address,
        *,
        prepare_with: PartitionCounts | None = None,
        limits: Limits | None = None,
        request_timeout: float = 5.0,
        name: str = "flowfabric",
        revive: Revive | None = None,
        mint_secret: MintSecret | None = None,
    ) -> Backend:
        """Dial a deployment and check that it fits; with `prepare_with` set it up first.

        Who can `revive` the server owns it: it is the private one of this project.
        """
        # Local mistakes first: they must not cost a connection, nor wait for one.
        limits = limits or limits_from_env()
        ceiling_from_env()
        if prepare_with is not None:
            configured_lanes()
            configured_secret()
        transport = await connect(
            address, request_timeout=request_timeout, name=name, revive=revive
        )
        owned = revive is not None
        try:
            if prepare_with is None:
                counts = await join(transport, owned=owned)
            else:
                await prepare(
                    transport,
                    prepare_with,
                    owned=owned,
                    mint_secret=mint_secret,
                )
                await report_collisions(transport, prepare_with)
                counts = prepare_with
        except BaseException:
            await transport.aclose()
            raise
        return cls(transport, counts, limits)

    @classmethod
    async def connect_and_prepare(
        cls,
        address: Address,
        *,
        name: str = "flowfabric",
        revive: Revive | None = None,
        mint_secret: MintSecret | None = None,
    ) -> Backend:
        """Dial and set up with the counts of the environment, as the owner of a server does."""
        return await cls.connect(
            address,
            prepare_with=configured_counts(),
            name=name,
            revive=revive,
            mint_secret=mint_secret,
        )

    async def prepare(self) -> bool:
        """Version gate, counts, library, secret, lanes; True when the library was loaded."""
        loaded = await prepare(self.transport, self.counts)
        await report_collisions(self.transport, self.counts)
        return loaded

    async def ping(self) -> None:
        """One round trip."""
        await self.transport.call("PING", key="")

    async def _close(self) -> None:
        """Close every connection; pending calls fail."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.transport.aclose)
            closing.push_async_callback(self.stream_pool.aclose)
            for history in list(self.subscribed):
                closing.push_async_callback(history.aclose)
