"""Which lanes, partitions and namespaces are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from flowfabric.engine.api.concern import Concern


class Places(Concern, Protocol):
    """Which lanes, partitions and namespaces are in use. Malformed entries are logged once."""

    known_places: dict[str, set[str]]
    """The lanes of each partition that this process uses or has seen in use."""
    known_namespaces: set[str]

    async def register_places(self, places: Mapping[str, Iterable[str]]) -> None:
        """Make sure that scanners visit these lanes of these partitions.

        Raises `lane_limit_exceeded` for new lanes when the registry is full; registers the others.
        """
        ...

    async def register_again(self) -> None:
        """Register everything this process uses, even what the server still has."""
        ...

    async def lanes_by_partition(self) -> dict[str, frozenset[str]]:
        """The tag of every registered partition with the lanes registered there, in order."""
        ...

    async def used_partitions(self) -> list[str]:
        """The tags of partitions that hold or held work."""
        ...

    async def occupied_partitions(self, tags: Sequence[str]) -> list[str]:
        """The given partitions that hold executions, registered or not."""
        ...

    async def partitions_in_use(self) -> list[int]:
        """Registered partitions, in order."""
        ...

    async def lanes_in_use(self) -> list[str]:
        """Registered lanes, in order."""
        ...

    async def namespaces_in_use(self) -> list[str]:
        """Registered namespaces, in order."""
        ...
