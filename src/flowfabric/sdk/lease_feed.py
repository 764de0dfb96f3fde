"""Lease history that goes on over lost connections."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Self

from flowfabric.core.closing import AsyncClosing
from flowfabric.core.contracts.lease_events import EventFilter, LeaseEvent
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.engine.api.events import LeaseSubscription, Start
from flowfabric.engine.valkey.backend import ValkeyBackend

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0


class LeaseFeed(AsyncClosing):
    """Iterates over lease events; after an outage it goes on where it was.

    Keep `cursor` and pass it to a later subscription to go on there. An event that is given
    twice, which only an outage may cause, has the same `event_id`.
    """

    def __init__(
        self, backend: ValkeyBackend, where: EventFilter | None, partitions: Sequence[int] | None
    ) -> None:
        self._backend = backend
        self._where = where
        self._partitions = partitions
        self._history: LeaseSubscription | None = None
        self._closed = False
        self.cursor = b""
        """Where to go on: behind everything that was given out."""

    async def begin(self, start: Start) -> Self:
        """Take the starting position now, not with the first event."""
        self._history = await self._backend.events.subscribe_lease_history(
            start, self._where, partitions=self._partitions
        )
        self.cursor = self._history.cursor
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LeaseEvent | CorruptionError:
        """The next event; waits for it, over outages of the server too."""
        pause = _FIRST_PAUSE_S
        while not self._closed:
            try:
                if self._history is None:
                    await self.begin(self.cursor)
                if (history := self._history) is not None:
                    event = await anext(history)
                    self.cursor = history.cursor
                    return event
            except EngineError as error:
                self._history = None
                if not error.retryable or self._closed:
                    raise
                log.debug("lease history goes on after: %s", error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LAST_PAUSE_S)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading; the iteration ends."""
        self._closed = True
        if self._history is not None:
            await self._history.aclose()
