"""What storage provides so that the readers of this folder work on it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from flowfabric.engine.api.events import Event
from flowfabric.engine.events.cursor import Position

StoredEntry = Any
"""An entry as storage returns it; only its source takes it apart."""
Pages = Mapping[str, Sequence[StoredEntry]]
"""New entries by feed, oldest first."""
Stop = tuple[str, Literal["ended", "suspended"]]
"""An execution that stopped, and how."""


class FeedState(msgspec.Struct, frozen=True):
    """How far a feed reaches."""

    last: Position
    oldest: Position
    """Just before the oldest entry that is left, or `last` if none is."""
    trimmed: Position
    """The newest entry that was trimmed, as far as storage can tell."""


class FeedLink(Protocol):
    """A connection that waits for entries. It dials when it is first used."""

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
        """Whether calls that leave together are answered in this order."""
        ...

    def open(self) -> FeedLink: ...
    def position(self, entry: StoredEntry) -> Position: ...
    def stop(self, entry: StoredEntry) -> Stop | None: ...  # If an execution or flow stopped.
    def decode(self, feed: str, entry: StoredEntry) -> Event: ...  # Or `CorruptionError`.

    async def partition_feeds(self, *, of_operators: bool = False) -> Sequence[str]:
        """Those that may have entries; by default only those of partitions of executions."""
        ...

    async def worker_feeds(self) -> Sequence[str]:
        """Those of the worker registries of all namespaces in use."""
        ...

    async def tagged(self, ids: Collection[str], tags: Mapping[str, str]) -> set[str]: ...

    async def clock_ms(self) -> int: ...  # Of the slowest clock that stamps entries.
    async def states(self, feeds: Sequence[str]) -> list[FeedState | None]: ...  # None: unwritten.

    async def last_position(self, feed: str) -> Position:
        """The newest entry of a feed, or `BEGINNING`. Its call leaves before it first waits."""
        ...

    async def join_group(
        self, group: str, member: str, lease_ms: int, start: str
    ) -> tuple[str, list[str]]:
        """Enter, stay or (0 ms) leave; the cursor the group started from and its live members."""
        ...

    async def lease_feed(
        self, feed: str, group: str, member: str, lease_ms: int, done: Position | None
    ) -> tuple[bool, Position | None]:
        """Take or renew a feed for a member of a group, and store what it has processed.

        Whether the member has the feed now, and the position to continue from, if one is stored.
        A lease of 0 ms returns the feed.
        """
        ...
