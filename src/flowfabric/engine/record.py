"""An execution record as stored, and the typed views of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from flowfabric.core import capabilities as caps
from flowfabric.core.contracts.executions import (
    AttemptRecord,
    CurrentAttempt,
    ExecutionInfo,
    ExecutionSnapshot,
    ExecutionSummary,
    LeaseSummary,
)
from flowfabric.core.errors import CorruptionError
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

__all__ = ["Record"]

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
_is_uuid = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
_INTERNAL = (
    *("state", "lease", "attempt", "worker", "tagged", "waitpointed"),
    *("paused", "ended_by", "run_from", "between_attempts", "operator_requests"),
)
_LEASE_FIELDS = ("lease_expires_at", "lease_last_renewed_at", "grant_expires_at")


class Record:
    """The fields of one execution, decoded strictly: what cannot be read is `corruption`.

    Absent fields have their defaults. `lease`, `attempt` and `worker` are the last ones issued;
    whether they are current follows from the state.
    """

    __slots__ = ("_fields", "execution_id", "vector")

    def __init__(self, execution_id: ExecutionId, fields: dict[str, str]) -> None:
        self.execution_id = execution_id
        self._fields = fields
        self.vector = StateVector.from_code(fields.get("state", ""), str(execution_id))

    @classmethod
    def decode(cls, execution_id: ExecutionId, raw: Mapping[bytes, bytes]) -> Record:
        """The record behind a HGETALL reply; an empty field is as good as an absent one."""
        return cls(
            execution_id,
            {
                name.decode(errors="replace"): value.decode(errors="replace")
                for name, value in raw.items()
                if value
            },
        )

    def get(self, name: str, default: str = "") -> str:
        """A text field."""
        return self._fields.get(name, default)

    def _set(self, name: str) -> str | None:
        return self._fields.get(name) or None

    def number(self, name: str) -> int | None:
        """A numeric field; anything but a whole number is corruption."""
        value = self._fields.get(name)
        if not value:
            return None
        try:
            return int(value)
        except ValueError:
            raise self._corrupt(name, f"{value!r} is not a whole number") from None

    def required(self, name: str) -> int:
        """A numeric field that every record has."""
        value = self.number(name)
        if value is None:
            raise self._corrupt(name, "is missing")
        return value

    def _corrupt(self, field: str, problem: str) -> CorruptionError:
        return CorruptionError("corruption", f"{self.execution_id}: {field}: {problem}")

    # --- simple fields ------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The execution kind, which names the handler."""
        return self.get("execution_kind")

    @property
    def namespace(self) -> str:
        """The tenant."""
        return self.get("namespace", "default")

    @property
    def lane_id(self) -> str:
        """The lane."""
        return stored_lane(self.get("lane_id", "default"), str(self.execution_id))

    @property
    def public_state(self) -> PublicState:
        """The one word a user reads."""
        return self.vector.public_state

    @property
    def last_transition_at(self) -> int:
        """When the state last changed: claims and endings write their own time only."""
        times = (
            "last_transition_at",
            "started_at",
            "attempt_started_at",
            "resumed_at",
            "completed_at",
        )
        return max(self.required("created_at"), *(self.number(name) or 0 for name in times))

    @property
    def last_mutation_at(self) -> int:
        """When anything was last written."""
        return max(
            self.last_transition_at,
            self.number("last_mutation_at") or 0,
            self.number("lease_last_renewed_at") or 0,
        )

    # --- composite fields -----------------------------------------------------------

    def _pair(self, name: str) -> tuple[str, int] | None:
        """`<uuid>/<number>`, the form of `lease` and `attempt`."""
        value = self._fields.get(name)
        if not value:
            return None
        identity, slash, number = value.rpartition("/")
        if not slash or not number.isdecimal() or not _is_uuid(identity):
            raise self._corrupt(name, f"{value!r} is not <id>/<number>")
        return identity, int(number)

    @property
    def attempt(self) -> tuple[str, int] | None:
        """Id and index of the last attempt."""
        return self._pair("attempt")

    @property
    def attempt_count(self) -> int:
        """How many attempts there were."""
        last = self.attempt
        return 0 if last is None else last[1] + 1

    @property
    def epoch(self) -> int:
        """The epoch of the last lease."""
        last = self._pair("lease")
        return 0 if last is None else last[1]

    @property
    def worker(self) -> tuple[str, str]:
        """Id and instance of the last worker."""
        worker_id, _, instance = self.get("worker").partition(" ")
        return worker_id, instance

    def current_attempt(self) -> CurrentAttempt | None:
        """The attempt of the present run, if there is one.

        An execution that ended while it waited for a retry or a replay has none either.
        """
        last = self.attempt
        if last is None or self.vector.attempt_state in _NO_CURRENT_ATTEMPT:
            return None
        if self._set("between_attempts"):
            return None
        return CurrentAttempt(*last)

    def current_lease(self) -> LeaseSummary | None:
        """The lease while the execution is active, also when it expired or was revoked."""
        if self.vector.lifecycle_phase is not LifecyclePhase.ACTIVE:
            return None
        lease, attempt = self._pair("lease"), self.attempt
        if lease is None or attempt is None:
            raise self._corrupt("lease", "an active execution has no lease or attempt")
        return LeaseSummary(
            lease_id=lease[0],
            lease_epoch=lease[1],
            worker_instance_id=self.worker[1],
            expires_at=self.required("lease_expires_at"),
            attempt_index=attempt[1],
            last_heartbeat_at=self.number("lease_last_renewed_at"),
        )

    def _lease_times(self) -> dict[str, str]:
        """When the lease was taken, and by when its holder should have renewed it."""
        starts = ("resumed_at", "attempt_started_at", "started_at")
        acquired = max(self.number(name) or 0 for name in starts)
        base = max(acquired, self.number("lease_last_renewed_at") or 0)
        deadline = base + (self.required("lease_expires_at") - base) * 2 // 3
        return {"lease_acquired_at": str(acquired), "lease_renewal_deadline": str(deadline)}

    # --- views ------------------------------------------------------------------------

    def info(self) -> ExecutionInfo:
        """The operator's view."""
        count = self.attempt_count
        return ExecutionInfo(
            execution_id=self.execution_id,
            namespace=self.namespace,
            lane_id=self.lane_id,
            priority=self.number("priority") or 0,
            execution_kind=self.kind,
            state_vector=self.vector,
            public_state=self.public_state,
            created_at=str(self.required("created_at")),
            started_at=self._fields.get("started_at"),
            completed_at=self._fields.get("completed_at"),
            current_attempt_index=max(0, count - 1),
            flow_id=self._fields.get("flow_id"),
            blocking_detail=self.get("blocking_detail"),
            total_attempt_count=count,
            retry_count=self.number("retry_count") or 0,
            replay_count=self.number("replay_count") or 0,
            lease_reclaim_count=self.number("lease_reclaim_count") or 0,
            failure_reason=self._set("failure_reason"),
            failure_category=self._set("failure_category"),
            cancellation_reason=self._set("cancellation_reason"),
            cancelled_by=self._set("cancelled_by"),
            progress_pct=self.number("progress_pct"),
            progress_message=self._fields.get("progress_message"),
            payload_encoding=self.get("payload_encoding"),
            result_encoding=self.get("result_encoding"),
            delay_until=self.number("delay_until"),
            execution_deadline_at=self.number("execution_deadline_at"),
            required_capabilities=caps.from_csv(self.get("required_capabilities")),
        )

    def snapshot(self, tags: Mapping[str, str]) -> ExecutionSnapshot:
        """The strict view."""
        blocking = self.vector.blocking_reason.value
        return ExecutionSnapshot(
            execution_id=self.execution_id,
            namespace=self.namespace,
            lane_id=self.lane_id,
            execution_kind=self.kind,
            public_state=self.public_state,
            created_at=self.required("created_at"),
            last_mutation_at=self.last_mutation_at,
            total_attempt_count=self.attempt_count,
            tags=tags,
            flow_id=self._fields.get("flow_id"),
            blocking_reason=None if blocking == "none" else blocking,
            blocking_detail=self._fields.get("blocking_detail"),
            current_attempt=self.current_attempt(),
            current_lease=self.current_lease(),
            current_waitpoint=self._set("current_waitpoint_id"),
        )

    def summary(self) -> ExecutionSummary:
        """The row of a listing."""
        return ExecutionSummary(
            execution_id=self.execution_id,
            namespace=self.namespace,
            lane_id=self.lane_id,
            execution_kind=self.kind,
            public_state=self.public_state,
            priority=self.number("priority") or 0,
            created_at=str(self.required("created_at")),
        )

    def attempts(self, archived: Sequence[Mapping[bytes, bytes]]) -> list[AttemptRecord]:
        """Every attempt: earlier ones as archived, the last one from the record itself."""
        found: list[AttemptRecord] = []
        for index, raw in enumerate(archived):
            source = Record._bare(self.execution_id, self.vector, raw) if raw else self
            state = source.get("attempt_state") if raw else self._attempt_record_state()
            found.append(source.attempt_record(index, state))
        return found

    @classmethod
    def _bare(
        cls, execution_id: ExecutionId, vector: StateVector, raw: Mapping[bytes, bytes]
    ) -> Record:
        record = cls.__new__(cls)
        record.execution_id = execution_id
        record.vector = vector
        record._fields = {name.decode(): value.decode() for name, value in raw.items() if value}
        return record

    def _attempt_record_state(self) -> str:
        if self.vector.lifecycle_phase is LifecyclePhase.TERMINAL:
            if self.get("ended_by") == "reclaim_cap":
                return AttemptRecordState.INTERRUPTED_RECLAIMED.value
            return _ENDED[self.vector.terminal_outcome].value
        if self.vector.ownership_state is OwnershipState.UNOWNED:
            return AttemptRecordState.SUSPENDED.value
        return AttemptRecordState.STARTED.value

    def _attempt_failure(self, state: str) -> tuple[str | None, str | None]:
        """What ended the attempt; the record itself also remembers an earlier one's failure."""
        if state == AttemptRecordState.ENDED_CANCELLED:
            archived = self._set("failure_reason") if "ended_at" in self._fields else None
            return archived or f"cancelled: {self.get('cancellation_reason')}", None
        if state in _FAILED:
            return self._set("failure_reason"), self._set("failure_category")
        return None, None

    def attempt_record(self, index: int, state: str) -> AttemptRecord:
        """One attempt as this record, or its archived form, describes it."""
        attempt, lease = self.attempt, self._pair("lease")
        if attempt is None or lease is None:
            raise self._corrupt("attempt", f"attempt {index} has no id or lease")
        worker_id, instance = self.worker
        ended = self.number("ended_at") or self.number("completed_at")
        failure = self._attempt_failure(state)
        kind = self.get("attempt_type", "initial")
        previous = self.number("previous_attempt_index")
        return AttemptRecord(
            attempt_index=index,
            attempt_id=attempt[0],
            attempt_type=kind,
            attempt_state=state,
            lease_id=lease[0],
            lease_epoch=lease[1],
            worker_id=worker_id,
            worker_instance_id=instance,
            started_at=self.number("attempt_started_at") or self.required("started_at"),
            ended_at=ended,
            resumed_at=self.number("resumed_at"),
            suspended_at=self.number("suspended_at"),
            suspension_id=self._pause() or None,
            failure_reason=failure[0],
            failure_category=failure[1],
            ended_by=self._fields.get("ended_by") if ended else None,
            retry_reason=self._fields.get("retry_reason"),
            replay_reason=self._fields.get("replay_reason"),
            replay_requested_by=self._fields.get("replay_requested_by"),
            replayed_from_attempt_index=previous if kind == "replay" else None,
            reclaim_reason=self._fields.get("reclaim_reason"),
            previous_attempt_index=previous,
            delay_until=self.number("delay_until") if ended else None,
            next_attempt_index=self.number("next_attempt_index"),
        )

    def _pause(self) -> str:
        """The suspension that holds the attempt, or the name of another kind of pause."""
        kind, _, answer = self.get("paused").partition(":")
        return answer if kind == "suspend" else kind

    def named_fields(self) -> dict[str, str]:
        """Every field under its documented name, the derived ones included."""
        known = dict(self._fields)
        for composite in _INTERNAL:
            known.pop(composite, None)
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
        for counter in ("priority", "retry_count", "replay_count", "lease_reclaim_count"):
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
        """What the next attempt will say of the one before it."""
        if self.attempt is None or self.vector.attempt_state not in _NO_CURRENT_ATTEMPT:
            return {}
        lineage = {"pending_previous_attempt_index": str(self.attempt[1])}
        reason = self._set("failure_reason")
        if self.vector.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT and reason:
            lineage["pending_retry_reason"] = reason
        return lineage
