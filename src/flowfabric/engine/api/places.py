"""Which lanes, partitions and namespaces are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from flowfabric.engine.api.concern import Concern


class Places(Concern, Protocol):
    """Which lanes, partitions and namespaces are in use."""

    known_places: dict[str, set[str]]
    """The lanes of each partition that this process uses or has seen in use."""
    known_namespaces: set[str]

    async def register_places(self, places: Mapping[str, Iterable[str]]) -> None:
        """Make sure that scanners visit these lanes of these partitions.

        `lane_limit_exceeded` when a lane is new and the registry is full; the others are
        registered.
        """
        ...

    async def register_again(self) -> None:
        """Register everything this process uses, whatever the server still remembers."""
        ...

    async def lanes_by_partition(self) -> dict[str, frozenset[str]]:
        """The tag of every registered partition with the lanes registered there, in order."""
        ...

    async def used_partitions(self) -> list[str]:
        """The tags of partitions that hold or held work."""
        ...

    async def occupied_partitions(self, tags: Sequence[str]) -> list[str]:
        """Those of the partitions that hold executions, registered or not.

        On a single server one command tells that none does.
        """
        ...

    async def partitions_in_use(self) -> list[int]:
        """Registered partitions, in order. An entry that is none is told of once and left out."""
        ...

    async def lanes_in_use(self) -> list[str]:
        """Registered lanes, in order. An entry that is none is told of once and left out."""
        ...

    async def namespaces_in_use(self) -> list[str]:
        """Registered namespaces, in order. An entry that is none is told of once and left out."""
        ...
