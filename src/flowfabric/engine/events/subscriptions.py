"""`Events` on any source of feeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar, Unpack, get_args

from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import ExecutionId, new_uuid, validate_namespace
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import PublicState
from flowfabric.engine.api.arguments import listed, one_of, partition_number
from flowfabric.engine.api.events import (
    CompletionEvent,
    Event,
    EventFilter,
    Events,
    Family,
    LeaseEvent,
    SignalEvent,
    Start,
    SubscribeOptions,
    WorkerEvent,
    checked_options,
)
from flowfabric.engine.events import families as shapes
from flowfabric.engine.events.completions import CompletionWatch
from flowfabric.engine.events.groups import GroupMember
from flowfabric.engine.events.selection import FeedSelection
from flowfabric.engine.events.source import FeedSource
from flowfabric.engine.events.subscription import FeedSubscription

_PARTITION_FAMILIES = tuple(family for family in get_args(Family) if family != "worker")
T = TypeVar("T")


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

    async def subscribe(
        self,
        families: Sequence[Family],
        cursor: Start = "now",
        **options: Unpack[SubscribeOptions],
    ) -> FeedSubscription[Event]:
        chosen = [
            one_of(each, "families", _PARTITION_FAMILIES) for each in listed(families, "families")
        ]
        return await self._subscribe(chosen, shapes.plain, cursor, options)

    async def subscribe_completion(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> FeedSubscription[CompletionEvent]:
        return await self._subscribe(["completion"], shapes.completion, cursor, options)

    async def subscribe_lease_history(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> FeedSubscription[LeaseEvent]:
        return await self._subscribe(["lease"], shapes.lease, cursor, options)

    async def subscribe_signal_delivery(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> FeedSubscription[SignalEvent]:
        return await self._subscribe(["signal"], shapes.signal, cursor, options)

    async def subscribe_operator_events(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> FeedSubscription[Event]:
        return await self._subscribe(["operator"], shapes.plain, cursor, options)

    async def subscribe_worker_events(
        self, namespace: str = "default", cursor: Start = "now"
    ) -> FeedSubscription[WorkerEvent]:
        feeds = [f"worker:{validate_namespace(namespace)}"]
        return await self._subscribe(["worker"], shapes.worker, cursor, {}, feeds)

    async def _subscribe(
        self,
        families: Collection[str],
        shape: shapes.Shape[T],
        start: Start,
        options: SubscribeOptions,
        feeds: Sequence[str] | None = None,
    ) -> FeedSubscription[T]:
        options = checked_options(options)
        partitions, group = options.get("partitions"), options.get("group")
        if partitions is not None:
            feeds = self._feeds(partitions)
        selection = FeedSelection(self._source, self._counts, feeds)
        cursor = await selection.cursor(start)
        member = None
        if group is not None:
            name = options.get("member") or new_uuid()
            member = GroupMember(self._source, selection, group, name, cursor)
            await member.join()
        subscription = FeedSubscription(
            self._source,
            selection,
            cursor,
            families=families,
            shape=shape,
            where=options.get("where") or EventFilter(),
            member=member,
            on_close=self._open.discard,
        )
        self._open.add(subscription)
        return subscription

    def _feeds(self, partitions: Sequence[int]) -> list[str]:
        numbers = {
            partition_number(each, self._counts, "partitions")
            for each in listed(partitions, "partitions")
        }
        if not numbers:
            raise invalid_input("partitions", "must not be empty; omit it to read all of them")
        return [f"fp:{number}" for number in sorted(numbers)]

    async def wait_ended(self, execution_id: ExecutionId) -> None:
        if not isinstance(execution_id, ExecutionId):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            execution_id = ExecutionId.parse(execution_id)
        await self._watch.wait_ended(execution_id.check_partition(self._counts))

    @property
    def waiting(self) -> int:
        """How many executions are waited for."""
        return self._watch.waiting

    async def aclose(self) -> None:
        """End every subscription and every wait."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self._watch.aclose)
            for subscription in list(self._open):
                closing.push_async_callback(subscription.aclose)
