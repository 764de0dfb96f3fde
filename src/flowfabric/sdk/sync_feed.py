"""Lease history for code without an event loop."""

from __future__ import annotations

import contextlib
from typing import Self

from flowfabric.core.closing import Closing
from flowfabric.core.contracts.lease_events import LeaseEvent
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.sdk.blocking import Caller, SyncTwin, iterate
from flowfabric.sdk.lease_feed import LeaseFeed
from flowfabric.sdk.portal import PortalClosed


class SyncLeaseFeed(SyncTwin[LeaseFeed], Closing):
    """`LeaseFeed` without `await`: iterate over it, keep its `cursor`, leave the block to close it.

    Any thread may close it; an iteration that waits then ends.
    """

    def __init__(self, feed: LeaseFeed, caller: Caller) -> None:
        super().__init__(feed, caller)
        self._closed = False

    @property
    def cursor(self) -> bytes:
        """The position after every event returned so far."""
        return self._target.cursor

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LeaseEvent | CorruptionError:
        """The next event; waits for it, also through outages of the server."""
        try:
            return next(iterate(self._target, self._caller))
        except EngineError:
            if self._closed:
                raise StopIteration from None
            raise

    def close(self) -> None:
        """Stop reading. A second call, or one after the client was closed, does nothing."""
        self._closed = True
        with contextlib.suppress(PortalClosed):
            self._call(LeaseFeed.aclose)
