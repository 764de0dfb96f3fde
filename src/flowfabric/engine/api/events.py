"""Events of the feed, as subscribers see them, and subscribing to them."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypedDict, TypeVar, Unpack, get_args

import msgspec

from flowfabric.core.errors import CorruptionError, invalid_input
from flowfabric.core.ids import ExecutionId, validate_lane
from flowfabric.core.tags import validate_tag_filter
from flowfabric.engine.api import check
from flowfabric.engine.api.concern import Concern

Start = bytes | str | int
"""`now` (or empty), `start` for the oldest entry, a time in milliseconds, or a cursor."""
Family = Literal["completion", "lease", "signal", "flow", "operator", "worker"]
_GAINS = frozenset({"acquired", "renewed", "reclaimed"})
_LOSSES = frozenset({"released", "expired", "revoked"})
LEASE_NAMES = {"replayed": "replay_initiated", "completion": "released"}
"""The lease-history names of entries of other types."""


class Event(msgspec.Struct, frozen=True):
    """One entry of a feed; `fields` are specific to its type. Not all concern an execution."""

    event_id: str
    """The feed and the entry; stays the same if the event is delivered again."""
    type: str
    at: int
    execution_id: str | None = None
    namespace: str | None = None
    lane_id: str | None = None
    execution_kind: str | None = None
    fields: Mapping[str, Any] = {}
    cursor: bytes = b""
    """The position after this event."""

    @property
    def tags(self) -> Mapping[str, str] | None:
        """The tags of the execution, if the entry carries them, as completions do."""
        return self.fields.get("tags")

    def get(self, name: str, default: Any = None) -> Any:
        """A field that is specific to the type, or the default."""
        return self.fields.get(name, default)


class _ExecutionEvent(msgspec.Struct, frozen=True, kw_only=True):
    event_id: str
    cursor: bytes
    at: int
    execution_id: ExecutionId
    namespace: str
    lane_id: str
    execution_kind: str
    flow_id: str | None = None


class _AttemptEvent(_ExecutionEvent, frozen=True, kw_only=True):
    attempt_id: str | None = None
    attempt_index: int | None = None
    lease_id: str | None = None
    lease_epoch: int | None = None
    worker_instance_id: str | None = None
    """The worker that holds the lease after this event, or held it before."""
    reason: str | None = None


class CompletionEvent(_AttemptEvent, frozen=True, kw_only=True):
    """An execution ended."""

    outcome: str = ""
    """`success`, `failed`, `cancelled`, `expired` or `skipped`."""
    source: str | None = None
    """The source of a cancellation."""
    failure_category: str | None = None
    result_ref: bool = False
    """Whether a result is stored."""
    tags: Mapping[str, str] | None = None


class LeaseEvent(_AttemptEvent, frozen=True, kw_only=True):
    """An execution changed hands."""

    type: str
    """`acquired`, `renewed`, `released`, `expired`, `revoked`, `reclaimed`, `replay_initiated`."""
    worker_id: str | None = None
    outcome: str | None = None
    """How the execution ended, if that released the lease."""
    revoked_by: str | None = None
    branch: str | None = None

    @property
    def new_owner(self) -> str | None:
        """The worker instance that holds the lease after this event."""
        return self.worker_instance_id if self.type in _GAINS else None

    @property
    def prev_owner(self) -> str | None:
        """The worker instance that lost or returned the lease."""
        return self.worker_instance_id if self.type in _LOSSES else None


class SignalEvent(_ExecutionEvent, frozen=True, kw_only=True):
    """An execution accepted a signal."""

    signal_id: str = ""
    signal_name: str = ""
    waitpoint_id: str = ""
    source_type: str = ""
    source_identity: str = ""
    effect: str = ""
    """What the signal did, such as `resume_condition_satisfied`."""


class FlowEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A flow finished, or was cancelled."""

    event_id: str
    cursor: bytes
    type: str
    """`flow_finished` or `flow_cancel_requested`."""
    at: int
    flow_id: str
    namespace: str = "default"
    state: str | None = None
    """`completed` or `failed`, if it finished."""
    cancellation_policy: str | None = None
    reason: str | None = None


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process registered or left."""

    event_id: str
    cursor: bytes
    type: str
    """`worker_registered`, `worker_dead` or `worker_expired`."""
    at: int
    namespace: str
    worker_id: str | None = None
    """None if the registration had expired already."""
    worker_instance_id: str = ""
    reason: str | None = None


F = TypeVar("F", bound=msgspec.Struct)


def typed(event: Event, form: type[F], cursor: bytes) -> F:
    """An event in the form that a subscription returns."""
    known: dict[str, Any] = {**event.fields, **msgspec.structs.asdict(event), "cursor": cursor}
    if event.execution_id is not None:
        known["execution_id"] = ExecutionId.trusted(event.execution_id)
    if form is LeaseEvent:
        known["type"] = LEASE_NAMES.get(event.type, event.type)
        if event.type == "reclaimed":
            known |= {name.removeprefix("new_"): each for name, each in event.fields.items()}
    return form(**{name: known[name] for name in form.__struct_fields__ if name in known})


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects events. Every part that is set must match; an event without the value never does.

    >>> EventFilter(lane="video", types={"expired", "reclaimed"}).lane
    'video'
    """

    namespace: str | None = None
    lane: str | None = None
    kind: str | None = None
    flow_id: str | None = None
    execution_id: str | None = None
    outcome: str | None = None
    types: Collection[str] | None = None
    """Types of entries, or of lease events."""
    tags: Mapping[str, str] = {}
    """Compared with the tags of the execution; a deleted one has none."""

    def validate(self) -> None:
        """Raise `invalid_input` for a part of the wrong type."""
        for name in ("namespace", "lane", "kind", "flow_id", "outcome"):
            if getattr(self, name) is not None:
                check.text(getattr(self, name), name)
        self.canonical()
        if self.types is not None:
            check.texts(self.types, "types")
        validate_tag_filter(self.tags)

    def canonical(self) -> Self:
        """The filter with its execution id as it is stored."""
        if self.execution_id is None:
            return self
        return msgspec.structs.replace(self, execution_id=ExecutionId.parse(self.execution_id))

    def accepts(self, event: Event) -> bool:
        """Whether the entry itself matches; tags are compared separately."""
        return (
            self.namespace in (None, event.namespace)
            and self.lane in (None, event.lane_id)
            and self.kind in (None, event.execution_kind)
            and self.execution_id in (None, event.execution_id)
            and self.flow_id in (None, event.get("flow_id"))
            and self.outcome in (None, event.get("outcome"))
            and (
                self.types is None
                or event.type in self.types
                or LEASE_NAMES.get(event.type) in self.types
            )
        )


class SubscribeOptions(TypedDict, total=False):
    """What a subscription covers, and who shares it."""

    where: EventFilter | None
    partitions: Sequence[int] | None
    """Only these partitions; the cursor is valid only for the same selection."""
    group: str | None
    """Share the partitions with the other members of this group; `ack` what was processed."""
    member: str | None
    """The name of this member, which keeps its partitions if it restarts under this name."""


_OPTIONS = frozenset(SubscribeOptions.__annotations__)


def checked_options(options: SubscribeOptions) -> SubscribeOptions:
    """The options; raises an error for the first invalid one."""
    if unknown := sorted(options.keys() - _OPTIONS):
        raise TypeError(f"a subscription has no option {unknown[0]!r}")
    if (where := options.get("where")) is not None:
        check.instance(where, EventFilter, "where").validate()
    if (group := options.get("group")) is not None:
        validate_lane(group, "group")
    if (member := options.get("member")) is not None:
        check.text(member, "member")
    return options


E_co = TypeVar("E_co", covariant=True)


class Subscription(Protocol[E_co]):
    """Iterates over events as they are committed; keep `cursor` to continue later.

    Events of one execution arrive in commit order. An entry that cannot be read arrives as its
    `CorruptionError`. A lost connection ends the iteration with `stream_disconnected`; its detail
    is the cursor to subscribe with again. If entries after the position were trimmed, reading
    raises `cursor_expired` with the cursor of the oldest entry left.
    """

    @property
    def cursor(self) -> bytes:
        """The position after the last event returned."""
        ...

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> E_co | CorruptionError: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    async def ack(self, event_id: str) -> None:
        """Store for the group that this event and those before it in its feed were processed."""

    async def aclose(self) -> None:
        """Stop reading; the iteration ends."""


class FeedRequest(msgspec.Struct, Generic[F], frozen=True):
    """Which families to read, and the form of their entries."""

    families: Sequence[str]
    form: type[F]
    options: SubscribeOptions
    namespace: str | None = None
    """If set, the feed of this namespace's worker registry is read."""


class Subscriptions(Protocol):
    """Following the event feeds.

    `cursor` is `now`, `start` for the oldest entry left, a time in milliseconds, or the cursor of
    an earlier subscription to the same partitions.
    """

    async def _follow(self, request: FeedRequest[F], cursor: Start) -> Subscription[F]: ...

    async def subscribe(
        self,
        families: Sequence[Family],
        cursor: Start = "now",
        **options: Unpack[SubscribeOptions],
    ) -> Subscription[Event]:
        """Follow several families at once; an event of two families arrives once.

        Worker events are left out if `partitions` are given, and cannot be shared by a group.

        >>> feed = await client.subscribe(["completion", "signal"])  # doctest: +SKIP
        """
        for family in check.listed(families, "families"):
            check.one_of(family, "families", get_args(Family))
        if "worker" in families and options.get("group") is not None:
            raise invalid_input("families", "worker events cannot be shared by a group")
        return await self._follow(FeedRequest(families, Event, options), cursor)

    async def subscribe_completion(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> Subscription[CompletionEvent]:
        """Follow the executions that end.

        >>> async with await client.subscribe_completion() as feed:  # doctest: +SKIP
        ...     async for event in feed:
        ...         print(event.execution_id, event.outcome)
        """
        return await self._follow(FeedRequest(["completion"], CompletionEvent, options), cursor)

    async def subscribe_lease_history(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> Subscription[LeaseEvent]:
        """Follow who holds which execution: every claim, renewal, loss and return of a lease."""
        return await self._follow(FeedRequest(["lease"], LeaseEvent, options), cursor)

    async def subscribe_signal_delivery(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> Subscription[SignalEvent]:
        """Follow the signals that executions accept, and what each one did."""
        return await self._follow(FeedRequest(["signal"], SignalEvent, options), cursor)

    async def subscribe_flow_events(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> Subscription[FlowEvent]:
        """Follow the flows that finish or are cancelled.

        >>> async with await client.subscribe_flow_events() as feed:  # doctest: +SKIP
        ...     async for event in feed:
        ...         print(event.flow_id, event.type, event.state)
        """
        return await self._follow(FeedRequest(["flow"], FlowEvent, options), cursor)

    async def subscribe_operator_events(
        self, cursor: Start = "now", **options: Unpack[SubscribeOptions]
    ) -> Subscription[Event]:
        """Follow what operators do: cancel, revoke, resume, replay, change priorities, budgets."""
        return await self._follow(FeedRequest(["operator"], Event, options), cursor)

    async def subscribe_worker_events(
        self, namespace: str = "default", cursor: Start = "now"
    ) -> Subscription[WorkerEvent]:
        """Follow the worker processes of a namespace that register, leave or expire."""
        return await self._follow(FeedRequest(["worker"], WorkerEvent, {}, namespace), cursor)


class Events(Subscriptions, Concern, Protocol):
    """Following the event feeds, and waiting for executions to stop."""

    async def follow(self, request: FeedRequest[F], cursor: Start) -> Subscription[F]:
        """What the typed forms are made of, for callers that subscribe again after an outage."""
        return await self._follow(request, cursor)

    async def wait_ended(self, execution_id: ExecutionId) -> None:
        """Return when it has ended, or earlier: read its state then. Or `execution_not_found`."""

    async def wait_suspended(self, execution_id: ExecutionId) -> None:
        """Return when it is suspended or has ended, or earlier, as `wait_ended` does."""

    async def wait_for(
        self, tag: str, subject: str, has_ended: Callable[[], Awaitable[bool]]
    ) -> None:
        """`wait_ended` for an execution or a flow of this partition, with the caller's read."""
