"""Which entries belong to which subscription, and the form it returns them in."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.events import (
    LEASE_NAMES,
    CompletionEvent,
    Event,
    LeaseEvent,
    SignalEvent,
    WorkerEvent,
)

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T", CompletionEvent, LeaseEvent, SignalEvent, WorkerEvent)
_FAMILIES: dict[str, tuple[str, ...]] = {
    "completion": ("completion",),
    "acquired": ("lease",),
    "renewed": ("lease",),
    "released": ("lease",),
    "expired": ("lease",),
    "reclaimed": ("lease",),
    "revoked": ("lease", "operator"),
    "replayed": ("lease", "operator"),
    "signal": ("signal",),
    "flow_cancel_requested": ("flow", "operator"),
    "flow_finished": ("flow",),
    **dict.fromkeys(("resumed", "escalated", "priority_changed"), ("operator",)),
    **dict.fromkeys(("operator_blocked", "operator_unblocked"), ("operator",)),
    **dict.fromkeys(("worker_registered", "worker_dead", "worker_expired"), ("worker",)),
}


def families_of(event: Event) -> tuple[str, ...]:
    """The families an entry belongs to. An unknown type that names a lease is lease history."""
    known = _FAMILIES.get(event.type)
    if known is None:
        if event.type.startswith(("budget_", "quota_")):
            return ("operator",)
        return ("lease",) if event.get("lease_id") is not None else ()
    if event.type == "completion":
        if event.get("lease_id") is not None:
            known += ("lease",)
        if event.get("source") == "operator_override":
            known += ("operator",)
    return known


class Shape(Protocol[T_co]):
    """Makes what a subscription returns from an entry and the cursor after it."""

    def __call__(self, event: Event, cursor: bytes) -> T_co: ...


def _fill(kind: type[T], event: Event, cursor: bytes, **known: Any) -> T:
    known = {
        **event.fields,
        "event_id": event.event_id,
        "cursor": cursor,
        "type": event.type,
        "at": event.at,
        "namespace": event.namespace,
        "lane_id": event.lane_id,
        "execution_kind": event.execution_kind,
        **known,
    }
    if event.execution_id is not None:
        known["execution_id"] = ExecutionId.trusted(event.execution_id)
    return kind(**{name: known[name] for name in kind.__struct_fields__ if name in known})


def completion(event: Event, cursor: bytes) -> CompletionEvent:
    return _fill(CompletionEvent, event, cursor)


def lease(event: Event, cursor: bytes) -> LeaseEvent:
    taken = {
        name.removeprefix("new_"): value
        for name, value in event.fields.items()
        if event.type == "reclaimed"
    }
    return _fill(LeaseEvent, event, cursor, **taken, type=LEASE_NAMES.get(event.type, event.type))


def signal(event: Event, cursor: bytes) -> SignalEvent:
    return _fill(SignalEvent, event, cursor)


def worker(event: Event, cursor: bytes) -> WorkerEvent:
    namespace = event.event_id.removeprefix("worker:").rpartition("/")[0]
    return _fill(WorkerEvent, event, cursor, namespace=namespace)


def plain(event: Event, cursor: bytes) -> Event:
    return Event(
        *(event.event_id, event.type, event.at, event.execution_id, event.namespace),
        *(event.lane_id, event.execution_kind, event.fields, cursor),
    )
