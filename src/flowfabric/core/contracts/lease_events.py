"""Lease history as subscribers see it, and the filter of a subscription."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from flowfabric.core.contracts.events import Event
from flowfabric.core.ids import ExecutionId

_KINDS = {"replayed": "replay_initiated", "completion": "released"}
_LEASE_TYPES = frozenset({"acquired", "renewed", "released", "expired", "revoked", "reclaimed"})
_TAKES = frozenset({"acquired", "renewed", "reclaimed"})
_LOSES = frozenset({"released", "expired", "revoked"})
_OTHER_TYPES = frozenset({"signal", "resumed", "escalated", "priority_changed"})


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Every part that is given must match; what an entry does not tell never matches.

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
    """Compared with the execution's tags; one that is gone has none."""

    def accepts(self, event: Event) -> bool:
        """Whether the entry itself matches; tags are looked at apart."""
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
                or _KINDS.get(event.type) in self.types
            )
        )


class LeaseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change of an execution's ownership."""

    event_id: str
    """Stable over reconnects: use it to tell a repeated delivery."""
    cursor: bytes
    """Where to go on after this event."""
    kind: str
    """`acquired`, `renewed`, `released`, `expired`, `revoked`, `reclaimed`, `replay_initiated`."""
    at: int
    execution_id: ExecutionId
    namespace: str
    lane_id: str
    execution_kind: str
    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None
    attempt_index: int | None = None
    worker_id: str | None = None
    worker_instance_id: str | None = None
    """Who holds the lease from now on, or held it until now."""
    reason: str | None = None
    outcome: str | None = None
    """Set when the lease was released because the execution ended."""
    revoked_by: str | None = None
    branch: str | None = None

    @property
    def new_owner(self) -> str | None:
        """The worker instance that has the lease after this event."""
        return self.worker_instance_id if self.kind in _TAKES else None

    @property
    def prev_owner(self) -> str | None:
        """The worker instance that lost or gave back the lease with this event."""
        return self.worker_instance_id if self.kind in _LOSES else None


def lease_event(event: Event, cursor: bytes) -> LeaseEvent | None:
    """The lease side of a feed entry, or None when it has none."""
    if event.execution_id is None:
        return None
    tells = event.get("lease_id") is not None and event.type not in _OTHER_TYPES
    if not tells and event.type not in _LEASE_TYPES and event.type != "replayed":
        return None
    return LeaseEvent(
        event_id=event.event_id,
        cursor=cursor,
        kind=_KINDS.get(event.type, event.type),
        at=event.at,
        execution_id=ExecutionId.trusted(event.execution_id),
        namespace=event.namespace or "",
        lane_id=event.lane_id or "",
        execution_kind=event.execution_kind or "",
        lease_id=event.get("lease_id") or event.get("new_lease_id"),
        lease_epoch=event.get("lease_epoch") or event.get("new_lease_epoch"),
        attempt_id=event.get("attempt_id") or event.get("new_attempt_id"),
        attempt_index=event.get("attempt_index", event.get("new_attempt_index")),
        worker_id=event.get("worker_id"),
        worker_instance_id=event.get("worker_instance_id"),
        reason=event.get("reason"),
        outcome=event.get("outcome"),
        revoked_by=event.get("revoked_by"),
        branch=event.get("branch"),
    )


class ExpiredLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease whose time is over, whether anyone has noticed yet or not."""

    execution_id: ExecutionId
    lease_id: str
    lease_epoch: int
    worker_instance_id: str
    expires_at_ms: int
    attempt_index: int


class ExpiredLeases(msgspec.Struct, frozen=True):
    """One page, and where the next begins, if there is one."""

    entries: tuple[ExpiredLease, ...]
    cursor: tuple[int, str] | None = None
    """Expiry and execution id of the last entry: pass it as `after`."""
    damaged: tuple[str, ...] = ()
    """What was left out because it cannot be read."""
