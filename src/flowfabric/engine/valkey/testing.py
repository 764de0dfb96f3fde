"""A deployment for tests: it can be emptied, and its clock can be moved."""

import secrets
from collections.abc import Sequence
from typing import cast

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.valkey import boot
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.library import include_test_clock
from flowfabric.valkey.address import Address

_COUNTS = PartitionCounts(flow=32)
"""As many as one sweep covers, so that a claim without a result has checked all partitions."""


class EngineClock:
    """Moves the clock of a deployment whose library has the functions for that."""

    def __init__(self, backend: Backend) -> None:
        self._calls = cast("ValkeyBackend", backend).calls
        self._offset_ms = 0

    async def advance(self, ms: int, live: Sequence[str] = ()) -> None:
        """Move it forward, or backward if negative; a stopped clock runs again.

        The worker instances that are `live` keep their leases.
        """
        await self._move(self._offset_ms + ms, live)

    async def reset(self) -> None:
        """Set it to the server's time."""
        await self._move(0)

    async def freeze(self, at_ms: int) -> None:
        """Stop it at this time."""
        await self._calls.fcall("ff_test_freeze", "{fp:0}", (at_ms,), op="test")

    async def _move(self, offset_ms: int, live: Sequence[str] = ()) -> None:
        args = (offset_ms, self._calls.counts.flow, *live)
        await self._calls.fcall("ff_test_clock", "{fp:0}", args, op="test")
        self._offset_ms = offset_ms


async def open_trial(address: Address) -> Backend:
    """A backend on a server whose data and functions may be replaced."""
    include_test_clock()
    return await ValkeyBackend.connect(
        address, prepare_with=_COUNTS, name="ff-testing", mint_secret=_new_secret
    )


async def empty(backend: Backend) -> None:
    """Delete everything and prepare the deployment again."""
    transport = cast("ValkeyBackend", backend).transport
    await transport.call("FLUSHALL")
    await boot.prepare(transport, backend.counts, mint_secret=_new_secret)


def _new_secret() -> str:
    return secrets.token_hex(32)
