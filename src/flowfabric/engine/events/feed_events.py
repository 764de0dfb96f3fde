"""`Events` on any source of feeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import ExecutionId, new_uuid, validate_namespace
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import PublicState
from flowfabric.engine.api import check
from flowfabric.engine.api.events import (
    EventFilter,
    Events,
    F,
    FeedRequest,
    Start,
    checked_options,
)
from flowfabric.engine.events.completions import CompletionWatch
from flowfabric.engine.events.groups import GroupMember
from flowfabric.engine.events.selection import FeedSelection
from flowfabric.engine.events.source import FeedSource
from flowfabric.engine.events.subscription import FeedSubscription


class FeedEvents(Events):
    """Subscriptions and waits over the feeds of one deployment."""

    def __init__(
        self,
        source: FeedSource,
        counts: PartitionCounts,
        read_state: Callable[[ExecutionId], Awaitable[PublicState]],
    ) -> None:
        self._source = source
        self._counts = counts
        self._watch = CompletionWatch(source, read_state)
        self._open: set[FeedSubscription[Any]] = set()

    async def _follow(self, request: FeedRequest[F], cursor: Start) -> FeedSubscription[F]:
        options, namespace = checked_options(request.options), request.namespace
        feeds = None if namespace is None else [f"worker:{validate_namespace(namespace)}"]
        if (partitions := options.get("partitions")) is not None:
            feeds = self._feeds(partitions)
        selection = FeedSelection(self._source, self._counts, feeds)
        start = await selection.cursor(cursor)
        member = None
        if (group := options.get("group")) is not None:
            name = options.get("member") or new_uuid()
            member = GroupMember(self._source, selection, group, name, start)
            await member.join()
        subscription = FeedSubscription(
            self._source,
            selection,
            start,
            families=request.families,
            form=request.form,
            where=options.get("where") or EventFilter(),
            member=member,
            # These positions come from the feeds as they are now.
            fresh=member is None and cursor in ("", b"", "now", "start"),
            on_close=self._open.discard,
        )
        self._open.add(subscription)
        return subscription

    def _feeds(self, partitions: Sequence[int]) -> list[str]:
        numbers = {
            check.partition(each, self._counts, "partitions")
            for each in check.listed(partitions, "partitions")
        }
        if not numbers:
            raise invalid_input("partitions", "must not be empty; omit it to read all of them")
        return [f"fp:{number}" for number in sorted(numbers)]

    async def wait_ended(self, execution_id: ExecutionId) -> None:
        if not isinstance(execution_id, ExecutionId):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            execution_id = ExecutionId.parse(execution_id)
        await self._watch.wait_ended(execution_id.check_partition(self._counts))

    async def aclose(self) -> None:
        """End every subscription and every wait."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self._watch.aclose)
            for subscription in list(self._open):
                closing.push_async_callback(subscription.aclose)
