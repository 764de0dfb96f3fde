"""Following the event feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from flowfabric.core.contracts.lease_events import EventFilter, LeaseEvent
from flowfabric.core.errors import CorruptionError
from flowfabric.engine.api.concern import Concern

Start = bytes | str | int
"""`now` (or empty), `start`, a time in milliseconds, or a cursor."""


class LeaseSubscription(Protocol):
    """Iterates over lease events; keep `cursor` to continue later."""

    @property
    def cursor(self) -> bytes:
        """The position after the last event given out."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> LeaseEvent | CorruptionError: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def aclose(self) -> None:
        """Stop reading; the iteration ends."""
        ...


class Events(Concern, Protocol):
    """Following the event feeds."""

    async def subscribe_lease_history(
        self,
        cursor: Start = "now",
        where: EventFilter | None = None,
        *,
        partitions: Sequence[int] | None = None,
    ) -> LeaseSubscription:
        """Every change of ownership from `cursor` on: of all partitions, or of those named.

        `cursor` is `now`, `start` (the oldest that is kept), a time in milliseconds, or the
        cursor of an earlier subscription to the same partitions. Where events behind it were
        trimmed, reading raises `cursor_expired` with the cursor of what is left.

        >>> async with await backend.subscribe_lease_history() as history:  # doctest: +SKIP
        ...     async for event in history:
        ...         print(event.kind, event.execution_id)
        """
        ...
