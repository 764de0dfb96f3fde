"""Which lanes, partitions and namespaces are in use: scanners and listings look nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable

from flowfabric.core.ids import PartitionKey, validate_lanes
from flowfabric.core.keys import LANES, NAMESPACES, PARTITIONS
from flowfabric.engine.arguments import listed
from flowfabric.engine.calls import Calls
from flowfabric.valkey.transport import Transport

__all__ = ["Registration", "add_names"]

_REPEAT_S = 10.0
# A plain SADD is refused at the memory limit, and then no worker could start that frees memory.
_ADD = """#!lua flags=allow-oom
return redis.call('SADD', KEYS[1], unpack(ARGV))
"""


async def add_names(transport: Transport, key: str, names: Iterable[str | int]) -> None:
    """Add to one of the registries of names in use."""
    given = list(names)
    if given:
        await transport.call("EVAL", _ADD, 1, key, *given, key=key, replay_safe=True)


class Registration(Calls):
    """Registers places before their first use, and all of them again now and then.

    A failover to a replica that lags forgets registrations, and nobody is told: only repeating
    them brings them back.
    """

    # What this process has registered or seen in use.
    known_lanes: set[str]
    known_partitions: set[str]
    known_namespaces: set[str]

    _repeat_at: float | None = None
    """When, on the monotonic clock, to register everything again; None: at the next call."""

    async def register_places(self, lanes: Iterable[str], tags: Iterable[str]) -> None:
        """Make sure that scanners visit these lanes and partitions."""
        lanes = set(validate_lanes(lanes))
        tags = {self.checked_tag(tag, "tags") for tag in listed(tags, "tags")}
        if self._repeat_is_due():
            self.known_lanes |= lanes
            self.known_partitions |= tags
            await self.register_again()
            return
        lanes -= self.known_lanes
        tags -= self.known_partitions
        await add_names(self.transport, LANES, lanes)
        self.known_lanes |= lanes
        await add_names(self.transport, PARTITIONS, _numbers(tags))
        self.known_partitions |= tags

    async def register_again(self) -> None:
        """Register everything this process knows, whatever the server still remembers."""
        # Calls under way at the same time need not do the same.
        self._repeat_at = time.monotonic() + _REPEAT_S
        try:
            # Copies: the sets may be shared with another thread, which adds to them.
            await add_names(self.transport, LANES, self.known_lanes.copy())
            await add_names(self.transport, PARTITIONS, _numbers(self.known_partitions.copy()))
            await add_names(self.transport, NAMESPACES, self.known_namespaces.copy())
        except BaseException:
            self._repeat_at = None
            raise

    def _repeat_is_due(self) -> bool:
        return self._repeat_at is None or time.monotonic() >= self._repeat_at

    async def _register(self, tag: str, lanes: set[str]) -> None:
        """What every creation asks for, as cheaply as it can be answered."""
        if (
            tag not in self.known_partitions
            or not lanes <= self.known_lanes
            or self._repeat_is_due()
        ):
            await self.register_places(lanes, (tag,))


def _numbers(tags: Iterable[str]) -> list[int]:
    return [PartitionKey.trusted(tag).index_number for tag in tags]
