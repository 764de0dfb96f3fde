"""An execution record as stored, and the typed views of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.executions import (
    AttemptRecord,
    CurrentAttempt,
    ExecutionInfo,
    ExecutionSnapshot,
    ExecutionSummary,
    LeaseSummary,
)
from flowfabric.core.ids import ExecutionId, stored_lane
from flowfabric.core.state import (
    AttemptRecordState,
    AttemptState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
)
from flowfabric.core.stored import Stored
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls

_NO_CURRENT_ATTEMPT = frozenset(
    {AttemptState.PENDING_RETRY_ATTEMPT, AttemptState.PENDING_REPLAY_ATTEMPT}
)
_ENDED = {
    TerminalOutcome.SUCCESS: AttemptRecordState.ENDED_SUCCESS,
    TerminalOutcome.FAILED: AttemptRecordState.ENDED_FAILURE,
    TerminalOutcome.EXPIRED: AttemptRecordState.ENDED_FAILURE,
    TerminalOutcome.CANCELLED: AttemptRecordState.ENDED_CANCELLED,
}
_FAILED = frozenset({AttemptRecordState.ENDED_FAILURE, AttemptRecordState.INTERRUPTED_RECLAIMED})
_INTERNAL = (
    *("state", "lease", "attempt", "worker", "tagged", "waitpointed"),
    *("paused", "ended_by", "run_from", "between_attempts", "operator_requests"),
)
_TRANSITIONS = (
    *("last_transition_at", "started_at", "attempt_started_at", "resumed_at", "completed_at"),
)
_COUNTERS = ("priority", "retry_count", "replay_count", "lease_reclaim_count")
_INFO_NUMBERS = ("progress_pct", "delay_until", "execution_deadline_at")
_INFO_TEXTS = (
    *("flow_id", "failure_reason", "failure_category", "cancellation_reason", "cancelled_by"),
    "progress_message",
)
_ATTEMPT_NUMBERS = ("resumed_at", "suspended_at", "next_attempt_index", "previous_attempt_index")
_ATTEMPT_TEXTS = ("retry_reason", "replay_reason", "replay_requested_by", "reclaim_reason")
_LEASE_FIELDS = ("lease_expires_at", "lease_last_renewed_at", "grant_expires_at")


class Record(Stored):
    """One execution. `lease`, `attempt` and `worker` are the last ones issued, current or not."""

    __slots__ = ("execution_id", "vector")

    def __init__(
        self, execution_id: ExecutionId, stored: Stored, vector: StateVector | None = None
    ) -> None:
        super().__init__(stored.context, stored.fields)
        self.execution_id = execution_id
        self.vector = vector or StateVector.from_code(self.text("state"), self.context)

    @classmethod
    async def read(cls, calls: FunctionCalls, execution_id: ExecutionId) -> Record | None:
        """The stored record, or None when there is no such execution."""
        key = keys.core(execution_id.tag, execution_id)
        raw = await calls.read(f"{execution_id}: record", "HGETALL", key)
        return cls(execution_id, Stored.from_hash(execution_id, raw)) if raw else None

    @property
    def kind(self) -> str:
        """The execution kind, which names the handler."""
        return self.text("execution_kind", "")

    @property
    def namespace(self) -> str:
        """The namespace."""
        return self.text("namespace", "default")

    @property
    def lane_id(self) -> str:
        """The lane."""
        return stored_lane(self.text("lane_id", "default"), self.context)

    @property
    def public_state(self) -> PublicState:
        """The state that users see."""
        return self.vector.public_state

    @property
    def last_transition_at(self) -> int:
        """When the state last changed. Claims and endings only write a time of their own."""
        return max(self.number("created_at"), *(self.number(name, 0) for name in _TRANSITIONS))

    @property
    def last_mutation_at(self) -> int:
        """When anything was last written."""
        return max(
            self.last_transition_at,
            self.number("last_mutation_at", 0),
            self.number("lease_last_renewed_at", 0),
        )

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        """The tokens that a worker must offer."""
        return self.parsed("required_capabilities", caps.from_csv)

    def _time(self, name: str) -> str | None:
        return str(self.number(name)) if self.is_set(name) else None

    @property
    def attempt(self) -> tuple[str, int] | None:
        """Id and index of the last attempt."""
        return self.pair("attempt")

    @property
    def attempt_count(self) -> int:
        """How many attempts there were."""
        last = self.attempt
        return 0 if last is None else last[1] + 1

    @property
    def epoch(self) -> int:
        """The epoch of the last lease."""
        last = self.pair("lease")
        return 0 if last is None else last[1]

    @property
    def worker(self) -> tuple[str, str]:
        """Id and instance of the last worker."""
        worker_id, _, instance = self.text("worker", "").partition(" ")
        return worker_id, instance

    def current_attempt(self) -> CurrentAttempt | None:
        """The attempt of the current run; None between two attempts, also if it ended there."""
        last = self.attempt
        between = self.vector.attempt_state in _NO_CURRENT_ATTEMPT
        if last is None or between or self.maybe_text("between_attempts"):
            return None
        return CurrentAttempt(*last)

    def current_lease(self) -> LeaseSummary | None:
        """The lease while the execution is active, also when it expired or was revoked."""
        if self.vector.lifecycle_phase is not LifecyclePhase.ACTIVE:
            return None
        lease, attempt = self.pair("lease"), self.attempt
        if lease is None or attempt is None:
            raise self.corrupt("lease", "an active execution has no lease or attempt")
        return LeaseSummary(
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

    def _optional(
        self, numbers: Sequence[str], texts: Sequence[str], counters: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Fields by name: None where unset, 0 for counters."""
        found: dict[str, Any] = {name: self.maybe_number(name) for name in numbers}
        found |= {name: self.maybe_text(name) for name in texts}
        return found | {name: self.number(name, 0) for name in counters}

    def info(self) -> ExecutionInfo:
        """What operators read."""
        count = self.attempt_count
        return ExecutionInfo(
            execution_id=self.execution_id,
            namespace=self.namespace,
            lane_id=self.lane_id,
            execution_kind=self.kind,
            state_vector=self.vector,
            public_state=self.public_state,
            created_at=str(self.number("created_at")),
            started_at=self._time("started_at"),
            completed_at=self._time("completed_at"),
            current_attempt_index=max(0, count - 1),
            blocking_detail=self.text("blocking_detail", ""),
            total_attempt_count=count,
            payload_encoding=self.text("payload_encoding", ""),
            result_encoding=self.text("result_encoding", ""),
            required_capabilities=self.required_capabilities,
            **self._optional(_INFO_NUMBERS, _INFO_TEXTS, _COUNTERS),
        )

    def snapshot(self, tags: Mapping[str, str]) -> ExecutionSnapshot:
        """Everything, strictly decoded."""
        blocking = self.vector.blocking_reason.value
        return ExecutionSnapshot(
            execution_id=self.execution_id,
            namespace=self.namespace,
            lane_id=self.lane_id,
            execution_kind=self.kind,
            public_state=self.public_state,
            created_at=self.number("created_at"),
            last_mutation_at=self.last_mutation_at,
            total_attempt_count=self.attempt_count,
            tags=tags,
            flow_id=self.maybe_text("flow_id"),
            blocking_reason=None if blocking == "none" else blocking,
            blocking_detail=self.maybe_text("blocking_detail"),
            current_attempt=self.current_attempt(),
            current_lease=self.current_lease(),
            current_waitpoint=self.maybe_text("current_waitpoint_id"),
        )

    def summary(self) -> ExecutionSummary:
        """The row of a listing."""
        lease = self.current_lease()
        return ExecutionSummary(
            execution_id=self.execution_id,
            namespace=self.namespace,
            lane_id=self.lane_id,
            execution_kind=self.kind,
            public_state=self.public_state,
            priority=self.number("priority", 0),
            created_at=str(self.number("created_at")),
            total_attempt_count=self.attempt_count,
            completed_at=self._time("completed_at"),
            progress_pct=self.maybe_number("progress_pct"),
            worker_instance_id=None if lease is None else lease.worker_instance_id,
        )

    def attempts(self, archived: Sequence[Mapping[bytes, bytes]]) -> list[AttemptRecord]:
        """Every attempt: earlier ones as archived, the last one from the record itself."""
        found: list[AttemptRecord] = []
        for index, raw in enumerate(archived):
            if not raw:
                found.append(self.attempt_record(index, self._attempt_record_state()))
                continue
            stored = Stored.from_hash(f"attempt {index} of {self.execution_id}", raw)
            past = Record(self.execution_id, stored, self.vector)
            found.append(past.attempt_record(index, past.text("attempt_state")))
        return found

    def _attempt_record_state(self) -> str:
        if self.vector.lifecycle_phase is LifecyclePhase.TERMINAL:
            if self.text("ended_by", "") == "reclaim_cap":
                return AttemptRecordState.INTERRUPTED_RECLAIMED.value
            if self.vector.terminal_outcome not in _ENDED:
                raise self.corrupt("state", "has an attempt, but an outcome that ends no attempt")
            return _ENDED[self.vector.terminal_outcome].value
        if self.vector.ownership_state is OwnershipState.UNOWNED:
            return AttemptRecordState.SUSPENDED.value
        return AttemptRecordState.STARTED.value

    def _attempt_failure(self, state: str) -> tuple[str | None, str | None]:
        """What ended the attempt. The record also keeps the failure of an earlier attempt."""
        if state == AttemptRecordState.ENDED_CANCELLED:
            archived = self.maybe_text("failure_reason") if self.is_set("ended_at") else None
            return archived or f"cancelled: {self.text('cancellation_reason', '')}", None
        if state in _FAILED:
            return self.maybe_text("failure_reason"), self.maybe_text("failure_category")
        return None, None

    def attempt_record(self, index: int, state: str) -> AttemptRecord:
        """One attempt as this record, or its archived form, describes it."""
        attempt, lease = self.attempt, self.pair("lease")
        if attempt is None or lease is None:
            raise self.corrupt("attempt", f"attempt {index} has no id or lease")
        worker_id, instance = self.worker
        ended = self.number("ended_at", 0) or self.maybe_number("completed_at")
        failure = self._attempt_failure(state)
        kind = self.text("attempt_type", "initial")
        previous = self.maybe_number("previous_attempt_index")
        return AttemptRecord(
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
            suspension_id=self._pause() or None,
            failure_reason=failure[0],
            failure_category=failure[1],
            ended_by=self.maybe_text("ended_by") if ended else None,
            replayed_from_attempt_index=previous if kind == "replay" else None,
            delay_until=self.maybe_number("delay_until") if ended else None,
            **self._optional(_ATTEMPT_NUMBERS, _ATTEMPT_TEXTS),
        )

    def _pause(self) -> str:
        """The suspension that holds the attempt, or the name of another kind of pause."""
        kind, _, answer = self.text("paused", "").partition(":")
        return answer if kind == "suspend" else kind

    def named_fields(self) -> dict[str, str]:
        """Every field under its documented name, the derived ones included."""
        known = {
            name: self.text(name)
            for name in self.fields
            if name not in _INTERNAL and self.is_set(name)
        }
        vector = self.vector
        known |= {
            "execution_id": str(self.execution_id),
            "partition_id": str(self.execution_id.partition),
            "namespace": self.namespace,
            "lane_id": self.lane_id,
            "current_lane": self.lane_id,
            "lifecycle_phase": vector.lifecycle_phase.value,
            "ownership_state": vector.ownership_state.value,
            "eligibility_state": vector.eligibility_state.value,
            "blocking_reason": vector.blocking_reason.value,
            "terminal_outcome": vector.terminal_outcome.value,
            "attempt_state": vector.attempt_state.value,
            "public_state": vector.public_state.value,
            "total_attempt_count": str(self.attempt_count),
            "current_lease_epoch": str(self.epoch),
            "last_transition_at": str(self.last_transition_at),
            "last_mutation_at": str(self.last_mutation_at),
        }
        for counter in _COUNTERS:
            known.setdefault(counter, "0")
        if self.attempt is not None:
            known["current_attempt_index"] = str(self.attempt[1])
        attempt, lease = self.current_attempt(), self.current_lease()
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
        if self.attempt is None or self.vector.attempt_state not in _NO_CURRENT_ATTEMPT:
            return {}
        lineage = {"pending_previous_attempt_index": str(self.attempt[1])}
        reason = self.maybe_text("failure_reason")
        if self.vector.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT and reason:
            lineage["pending_retry_reason"] = reason
        return lineage
