"""What storage provides so that the readers of this folder work on it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from flowfabric.engine.api.events import Event
from flowfabric.engine.events.cursor import Position

StoredEntry = Any
"""An entry as storage returns it; only its source can decode it."""
Pages = Mapping[str, Sequence[StoredEntry]]
"""New entries by feed, oldest first."""
Stop = tuple[str, Literal["ended", "suspended"]]
"""An execution, and how it stopped."""


class FeedState(msgspec.Struct, frozen=True):
    """The range of a feed."""

    last: Position
    oldest: Position
    """The position just before the oldest remaining entry; `last` if there is none."""
    trimmed: Position
    """The newest entry that was trimmed, as far as storage knows."""


class FeedLink(Protocol):
    """A connection that waits for entries; connects on first use."""

    async def read(self, positions: Mapping[str, Position], count: int, wait_s: float) -> Pages:
        """At most `count` entries per feed; waits for the first. After an error it dials again."""
        ...

    async def interrupt(self) -> None:
        """End the wait of a read early, so that the next one covers other feeds."""

    def close(self) -> None:
        """Drop the connection for good; a read fails."""


class FeedSource(Protocol):
    """The feeds of a deployment: `fp:7` of a partition, `worker:<namespace>` of a registry.

    `b:7` and `q:7` are those of partitions of budgets and quotas, which only operators change.
    """

    @property
    def waits_across_feeds(self) -> bool:
        """Whether one blocking read covers several feeds."""
        ...

    @property
    def answers_in_order(self) -> bool:
        """Whether calls that are sent together are answered in this order."""
        ...

    def open(self) -> FeedLink: ...
    def position(self, entry: StoredEntry) -> Position: ...
    def stop(self, entry: StoredEntry) -> Stop | None: ...  # If an execution or flow stopped.
    def decode(self, feed: str, entry: StoredEntry) -> Event: ...  # Or `CorruptionError`.

    async def partition_feeds(self, *, of_operators: bool = False) -> Sequence[str]:
        """The feeds that may have entries; by default only those of execution partitions."""
        ...

    async def worker_feeds(self) -> Sequence[str]:
        """The feeds of the worker registries of all namespaces in use."""
        ...

    async def tagged(self, ids: Collection[str], tags: Mapping[str, str]) -> set[str]: ...

    async def clock_ms(self) -> int: ...  # Of the slowest clock that stamps entries.
    async def states(self, feeds: Sequence[str]) -> list[FeedState | None]: ...  # None: unwritten.

    async def last_position(self, feed: str) -> Position:
        """The newest entry of a feed, or `BEGINNING`. Sends its call before it first awaits."""
        ...

    async def join_group(
        self, group: str, member: str, lease_ms: int, start: str
    ) -> tuple[str, list[str]]:
        """Join a group, stay in it or (0 ms) leave; returns its first cursor and live members."""
        ...

    async def lease_feed(
        self, feed: str, group: str, member: str, lease_ms: int, done: Position | None
    ) -> tuple[bool, Position | None]:
        """Lease a feed to a member of a group, or renew that, and store what it has processed.

        Returns whether the member holds the feed, and the stored position to continue from. A lease
        of 0 ms releases the feed.
        """
        ...
