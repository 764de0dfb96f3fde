"""Lease history for ordinary, blocking code."""

from __future__ import annotations

import contextlib
from typing import Self

from flowfabric.core.closing import Closing
from flowfabric.core.contracts.lease_events import LeaseEvent
from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.sdk.lease_feed import LeaseFeed
from flowfabric.sdk.portal import Portal, PortalClosed, take

__all__ = ["SyncLeaseFeed"]


class SyncLeaseFeed(Closing):
    """`LeaseFeed` without `await`: iterate over it, keep its `cursor`, leave the block to close it.

    Any thread may close it: the iteration ends, also where it waits.
    """

    def __init__(self, feed: LeaseFeed, portal: Portal) -> None:
        self._feed = feed
        self._portal = portal
        self._closed = False

    @property
    def cursor(self) -> bytes:
        """Where to go on: behind everything that was given out."""
        return self._feed.cursor

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LeaseEvent | CorruptionError:
        """The next event; waits for it, over outages of the server too."""
        try:
            found = take(self._feed, self._portal.call)
        except EngineError:
            if not self._closed:
                raise
            found = []
        if not found:
            raise StopIteration
        return found[0]

    def close(self) -> None:
        """Stop reading. A second call, or one after the client was closed, does no harm."""
        self._closed = True
        with contextlib.suppress(PortalClosed):
            self._portal.call(self._feed.aclose)
