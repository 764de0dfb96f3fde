"""An execution record as stored, and the typed views of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Self, TypeVar, get_type_hints

import msgspec

from flowfabric.core import capabilities as caps
from flowfabric.core import state as states
from flowfabric.core.contracts import executions as contracts
from flowfabric.core.ids import ExecutionId, stored_lane
from flowfabric.core.stored import Stored
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls

S = TypeVar("S", bound=msgspec.Struct)
_decode_json = msgspec.json.Decoder().decode
_RETRYING = states.AttemptState.PENDING_RETRY_ATTEMPT
_NO_CURRENT_ATTEMPT = (_RETRYING, states.AttemptState.PENDING_REPLAY_ATTEMPT)
_ENDED = {
    states.TerminalOutcome.SUCCESS: states.AttemptRecordState.ENDED_SUCCESS,
    states.TerminalOutcome.FAILED: states.AttemptRecordState.ENDED_FAILURE,
    states.TerminalOutcome.EXPIRED: states.AttemptRecordState.ENDED_FAILURE,
    states.TerminalOutcome.CANCELLED: states.AttemptRecordState.ENDED_CANCELLED,
}
_FAILED = (states.AttemptRecordState.ENDED_FAILURE, states.AttemptRecordState.INTERRUPTED_RECLAIMED)
_INTERNAL = (
    *("state", "lease", "attempt", "worker", "tagged", "waitpointed"),
    *("paused", "ended_by", "run_from", "between_attempts", "operator_requests"),
    *("payload", "payload_key", "result"),
)
_TRANSITIONS = (
    *("last_transition_at", "started_at", "attempt_started_at", "resumed_at", "completed_at"),
)
_COUNTERS = ("priority", "retry_count", "replay_count", "lease_reclaim_count")
_DIMENSIONS = states.StateVector.__struct_fields__
_DERIVED = (
    *("execution_id", "namespace", "lane_id", "public_state", "total_attempt_count"),
    *("last_transition_at", "last_mutation_at"),
)
_LEASE_FIELDS = ("lease_expires_at", "lease_last_renewed_at", "grant_expires_at")
Decoder = Callable[[Stored, str], Any]
_DECODERS: dict[Any, Decoder] = {
    int: lambda stored, name: stored.number(name, 0),
    int | None: Stored.maybe_number,
    str: lambda stored, name: stored.text(name, ""),
    str | None: Stored.maybe_text,
}
"""How to decode a stored field, by its type in a view."""


def question(stored: Stored) -> dict[str, Any]:
    """The prompt and the details of a suspension or a waitpoint."""
    details = stored.parsed("details", _decode_json) if stored.is_set("details") else None
    return {"prompt": stored.maybe_text("prompt"), "details": details}


class Record(Stored):
    """One execution. `lease`, `attempt` and `worker` are the last ones issued, current or not."""

    __slots__ = ("execution_id", "state_vector")

    def __init__(
        self, execution_id: ExecutionId, stored: Stored, vector: states.StateVector | None = None
    ) -> None:
        super().__init__(stored.context, stored.fields)
        self.execution_id = execution_id
        self.state_vector = vector or states.StateVector.from_code(self.text("state"), self.context)

    @classmethod
    async def read(cls, calls: FunctionCalls, execution_id: ExecutionId) -> Self | None:
        """The stored record, or None when there is no such execution."""
        key = keys.core(execution_id.tag, execution_id)
        raw = await calls.read(f"{execution_id}: record", "HGETALL", key)
        return cls(execution_id, Stored.from_hash(execution_id, raw)) if raw else None

    @property
    def execution_kind(self) -> str:
        return self.text("execution_kind", "")

    @property
    def namespace(self) -> str:
        return self.text("namespace", "default")

    @property
    def lane_id(self) -> str:
        return stored_lane(self.text("lane_id", "default"), self.context)

    @property
    def public_state(self) -> states.PublicState:
        return self.state_vector.public_state

    @property
    def last_transition_at(self) -> int:
        """When the state last changed. Claims and endings only write their own times."""
        return max(self.number("created_at"), *(self.number(name, 0) for name in _TRANSITIONS))

    @property
    def last_mutation_at(self) -> int:
        times = (self.number(name, 0) for name in ("last_mutation_at", "lease_last_renewed_at"))
        return max(self.last_transition_at, *times)

    @property
    def retry_at(self) -> int | None:
        """When what blocks the execution is expected to end."""
        return self.maybe_number("retry_at") if self.state_vector.is_blocked else None

    @property
    def budget_ids(self) -> tuple[str, ...]:
        stored = self.maybe_text("budget_ids")
        return tuple(stored.split(",")) if stored else ()

    @property
    def quota_policy_id(self) -> str | None:
        return self.maybe_text("quota_policy_id")

    @property
    def offered_to(self) -> str | None:
        """The worker that last left it to workers that know its task."""
        return self.maybe_text("offered_to")

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        return self.parsed("required_capabilities", caps.from_csv)

    def _time(self, name: str) -> str | None:
        """A time as decimal text, by default that of the creation."""
        return str(self.number(name)) if self.is_set(name) or name == "created_at" else None

    @property
    def attempt(self) -> tuple[str, int] | None:
        return self.pair("attempt")

    @property
    def total_attempt_count(self) -> int:
        last = self.attempt
        return 0 if last is None else last[1] + 1

    @property
    def current_attempt_index(self) -> int:
        return max(0, self.total_attempt_count - 1)

    @property
    def worker(self) -> tuple[str, str]:
        worker_id, _, instance = self.text("worker", "").partition(" ")
        return worker_id, instance

    @property
    def current_attempt(self) -> contracts.CurrentAttempt | None:
        """The attempt of the current run; None between two attempts, also if it ended there."""
        last = self.attempt
        between = self.state_vector.attempt_state in _NO_CURRENT_ATTEMPT
        if last is None or between or self.maybe_text("between_attempts"):
            return None
        return contracts.CurrentAttempt(*last)

    @property
    def run(self) -> int:
        """The number of the latest run; every lease and every replay raises it."""
        lease = self.pair("lease")
        return (0 if lease is None else lease[1]) + self.number("replay_count", 0)

    @property
    def current_lease(self) -> contracts.LeaseSummary | None:
        """The lease while the execution is active, also when it expired or was revoked."""
        if self.state_vector.lifecycle_phase is not states.LifecyclePhase.ACTIVE:
            return None
        lease, attempt = self.pair("lease"), self.attempt
        if lease is None or attempt is None:
            raise self.corrupt("lease", "an active execution has no lease or attempt")
        return contracts.LeaseSummary(
            lease_id=lease[0],
            lease_epoch=lease[1],
            worker_instance_id=self.worker[1],
            expires_at=self.number("lease_expires_at"),
            attempt_index=attempt[1],
            last_heartbeat_at=self.maybe_number("lease_last_renewed_at"),
        )

    def _lease_times(self) -> dict[str, str]:
        """When the lease was taken, and by when its holder should have renewed it."""
        starts = ("resumed_at", "attempt_started_at", "started_at")
        acquired = max(self.number(name, 0) for name in starts)
        base = max(acquired, self.number("lease_last_renewed_at", 0))
        deadline = base + (self.number("lease_expires_at") - base) * 2 // 3
        return {"lease_acquired_at": str(acquired), "lease_renewal_deadline": str(deadline)}

    def _view(self, form: type[S], **known: Any) -> S:
        """Build a view from given parts, derived properties and stored fields."""
        for name, decode in _stored_fields(form):
            if name not in known:
                known[name] = getattr(self, name) if decode is None else decode(self, name)
        return form(**known)

    def info(self) -> contracts.ExecutionInfo:
        times = {name: self._time(name) for name in ("created_at", "started_at", "completed_at")}
        return self._view(contracts.ExecutionInfo, **times)

    def snapshot(
        self,
        tags: Mapping[str, str],
        question: Mapping[str, Any],
        no_route: str | None = None,
    ) -> contracts.ExecutionSnapshot:
        """The execution as it is; `no_route`: why no live worker can take it."""
        reason = self.state_vector.blocking_reason
        if no_route is not None:
            reason = states.BlockingReason.WAITING_FOR_CAPABLE_WORKER
        blocking = reason.value
        return self._view(
            contracts.ExecutionSnapshot,
            created_at=self.number("created_at"),
            tags=tags,
            blocking_reason=None if blocking == "none" else blocking,
            blocking_detail=no_route or self.maybe_text("blocking_detail"),
            current_waitpoint=self.maybe_text("current_waitpoint_id"),
            **question,
        )

    def summary(self) -> contracts.ExecutionSummary:
        lease = self.current_lease
        return self._view(
            contracts.ExecutionSummary,
            created_at=self._time("created_at"),
            completed_at=self._time("completed_at"),
            worker_instance_id=None if lease is None else lease.worker_instance_id,
        )

    def attempts(self, archived: Sequence[Mapping[bytes, bytes]]) -> list[contracts.AttemptRecord]:
        """Every attempt: earlier ones from the archive, the last one from the record."""
        return [self._attempt(index, raw) for index, raw in enumerate(archived)]

    def _attempt(self, index: int, archived: Mapping[bytes, bytes]) -> contracts.AttemptRecord:
        if not archived:
            return self.attempt_record(index, self._attempt_record_state())
        stored = Stored.from_hash(f"attempt {index} of {self.execution_id}", archived)
        past = Record(self.execution_id, stored, self.state_vector)
        return past.attempt_record(index, past.text("attempt_state"))

    def _attempt_record_state(self) -> str:
        if self.state_vector.lifecycle_phase is states.LifecyclePhase.TERMINAL:
            if self.text("ended_by", "") == "reclaim_cap":
                return states.AttemptRecordState.INTERRUPTED_RECLAIMED.value
            if self.state_vector.terminal_outcome not in _ENDED:
                raise self.corrupt("state", "has an attempt, but an outcome that ends no attempt")
            return _ENDED[self.state_vector.terminal_outcome].value
        if self.state_vector.ownership_state is states.OwnershipState.UNOWNED:
            return states.AttemptRecordState.SUSPENDED.value
        return states.AttemptRecordState.STARTED.value

    def _attempt_failure(self, state: str) -> tuple[str | None, str | None]:
        """The failure that ended this attempt; the record may still have that of an earlier one."""
        if state == states.AttemptRecordState.ENDED_CANCELLED:
            archived = self.maybe_text("failure_reason") if self.is_set("ended_at") else None
            return archived or f"cancelled: {self.text('cancellation_reason', '')}", None
        if state in _FAILED:
            return self.maybe_text("failure_reason"), self.maybe_text("failure_category")
        return None, None

    def attempt_record(self, index: int, state: str) -> contracts.AttemptRecord:
        """One attempt as this record, or its archived form, describes it."""
        attempt, lease = self.attempt, self.pair("lease")
        if attempt is None or lease is None:
            raise self.corrupt("attempt", f"attempt {index} has no id or lease")
        worker_id, instance = self.worker
        ended = self.number("ended_at", 0) or self.maybe_number("completed_at")
        reason, category = self._attempt_failure(state)
        # A suspension, or the name of another kind of pause.
        pause, _, held_by = self.text("paused", "").partition(":")
        kind = self.text("attempt_type", "initial")
        replayed = self.maybe_number("previous_attempt_index") if kind == "replay" else None
        return self._view(
            contracts.AttemptRecord,
            attempt_index=index,
            attempt_id=attempt[0],
            attempt_type=kind,
            attempt_state=state,
            lease_id=lease[0],
            lease_epoch=lease[1],
            worker_id=worker_id,
            worker_instance_id=instance,
            started_at=self.number("attempt_started_at", 0) or self.number("started_at"),
            ended_at=ended,
            suspension_id=(held_by if pause == "suspend" else pause) or None,
            failure_reason=reason,
            failure_category=category,
            ended_by=self.maybe_text("ended_by") if ended else None,
            replayed_from_attempt_index=replayed,
            delay_until=self.maybe_number("delay_until") if ended else None,
        )

    def named_fields(self) -> dict[str, str]:
        """Every field, including derived ones, under its documented name."""
        known = {
            name: self.text(name)
            for name in self.fields
            if name not in _INTERNAL and self.is_set(name)
        }
        known |= {name: getattr(self.state_vector, name).value for name in _DIMENSIONS}
        known |= {name: str(getattr(self, name)) for name in _DERIVED}
        known |= {
            "partition_id": str(self.execution_id.partition),
            "current_lane": self.lane_id,
            "current_lease_epoch": str((self.pair("lease") or ("", 0))[1]),
        }
        for counter in _COUNTERS:
            known.setdefault(counter, "0")
        if self.attempt is not None:
            known["current_attempt_index"] = str(self.attempt[1])
        attempt, lease = self.current_attempt, self.current_lease
        if attempt is not None:
            known["current_attempt_id"] = attempt.attempt_id
        if lease is not None:
            known["current_lease_id"] = lease.lease_id
            known["current_worker_id"], known["current_worker_instance_id"] = self.worker
            known |= self._lease_times()
        else:
            for name in _LEASE_FIELDS:
                known.pop(name, None)
        return known | self._lineage()

    def _lineage(self) -> dict[str, str]:
        """What the next attempt will record about the previous one."""
        if self.attempt is None or self.state_vector.attempt_state not in _NO_CURRENT_ATTEMPT:
            return {}
        lineage = {"pending_previous_attempt_index": str(self.attempt[1])}
        reason = self.maybe_text("failure_reason")
        if self.state_vector.attempt_state is _RETRYING and reason:
            lineage["pending_retry_reason"] = reason
        return lineage


@cache
def _stored_fields(
    form: type[msgspec.Struct],
) -> list[tuple[str, Callable[[Stored, str], Any] | None]]:
    """The fields of a view and how they are decoded; None for those that a record derives."""
    types = get_type_hints(form)
    return [
        (name, None if hasattr(Record, name) else _DECODERS.get(types[name]))
        for name in form.__struct_fields__
    ]
