"""Inputs and results of operations on executions."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.contracts.flows import CascadeCounts, Dependency, JoinSnapshot
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState, StateVector


class NewExecution(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One execution to create. Only the id and the kind are required."""

    execution_id: ExecutionId
    execution_kind: str
    input_payload: bytes = b""
    payload_encoding: str = ""
    namespace: str = "default"
    lane_id: str = "default"
    priority: int | None = None
    creator_identity: str = ""
    idempotency_key: str = ""
    idempotency_digest: bytes = b""
    """Identifies the call, at most 32 bytes: a repeat with another digest is a conflict."""
    shards: int = 0
    """Among how many partitions the id was placed, for its key; 0 if the caller chose the id."""
    tags: Mapping[str, str] = {}
    policy: ExecutionPolicy | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    """The delay from creation, by the engine's clock; an alternative to `delay_until`."""
    execution_deadline_at: int | None = None
    partition_id: int | None = None
    flow_id: str | None = None
    """The flow that it joins; its partition must be that of `execution_id`."""
    depends_on: tuple[Dependency, ...] = ()
    """Members of the flow that it waits for."""


class Created(NamedOutcome[Literal["created"]], frozen=True, gc=False):
    """The execution was accepted."""

    execution_id: ExecutionId
    public_state: PublicState


class Duplicate(NamedOutcome[Literal["duplicate"]], frozen=True):
    """An execution with this id or idempotency key exists; nothing was stored."""

    execution_id: ExecutionId


CreateOutcome = Created | Duplicate


class Completed(NamedOutcome[Literal["completed"]], frozen=True):
    """The execution ended successfully."""

    execution_id: ExecutionId
    public_state: PublicState = PublicState.COMPLETED
    cascade: CascadeCounts | None = None
    """What this changed for dependent executions; None without any, and in batches."""


class RetryScheduled(NamedOutcome[Literal["retry_scheduled"]], frozen=True):
    """The attempt failed; the next one may start at `delay_until`."""

    delay_until: int
    next_attempt_index: int


class TerminalFailed(NamedOutcome[Literal["terminal_failed"]], frozen=True):
    """The execution failed; it is not retried."""

    cascade: CascadeCounts | None = None


FailOutcome = RetryScheduled | TerminalFailed


class Cancelled(NamedOutcome[Literal["cancelled"]], frozen=True):
    """The execution is cancelled."""

    execution_id: ExecutionId
    public_state: PublicState = PublicState.CANCELLED
    cascade: CascadeCounts | None = None


class Delayed(NamedOutcome[Literal["delayed"]], frozen=True):
    """The lease was released; the same attempt resumes when it is due."""

    execution_id: ExecutionId
    public_state: PublicState


class Moved(NamedOutcome[Literal["moved"]], frozen=True):
    """The execution waits for its open dependencies."""

    execution_id: ExecutionId
    public_state: PublicState = PublicState.WAITING_CHILDREN


class Ready(NamedOutcome[Literal["ready"]], frozen=True):
    """No dependency is open; the worker keeps the lease."""


class Impossible(NamedOutcome[Literal["impossible"]], frozen=True):
    """The dependencies can never be met; the worker keeps the lease."""

    upstreams: tuple[ExecutionId, ...]


WaitChildrenOutcome = Moved | Ready | Impossible


class PriorityChanged(NamedOutcome[Literal["changed"]], frozen=True):
    """The new priority is stored, limited to 0 to 9000."""

    execution_id: ExecutionId
    old_priority: int
    new_priority: int


class Replayed(NamedOutcome[Literal["replayed"]], frozen=True):
    """The execution runs again, from this state."""

    public_state: PublicState
    reopened: int = 0
    """How many members that depend on it were reopened by this call."""


class _Read(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every read of an execution returns."""

    execution_id: ExecutionId
    namespace: str
    lane_id: str
    execution_kind: str
    public_state: PublicState


class ExecutionInfo(_Read, frozen=True, kw_only=True, omit_defaults=True):
    """An execution as operators read it. Times are milliseconds as decimal text."""

    priority: int
    state_vector: StateVector
    created_at: str
    started_at: str | None = None
    completed_at: str | None = None
    current_attempt_index: int = 0
    flow_id: str | None = None
    node: str | None = None
    """Its key in the graph of its flow."""
    blocking_detail: str = ""
    total_attempt_count: int = 0
    retry_count: int = 0
    replay_count: int = 0
    lease_reclaim_count: int = 0
    failure_reason: str | None = None
    failure_category: str | None = None
    cancellation_reason: str | None = None
    cancelled_by: str | None = None
    progress_pct: int | None = None
    progress_message: str | None = None
    payload_encoding: str = ""
    result_encoding: str = ""
    delay_until: int | None = None
    retry_at: int | None = None
    """When the limit that holds it back is expected to open."""
    execution_deadline_at: int | None = None
    required_capabilities: tuple[str, ...] = ()


class CurrentAttempt(msgspec.Struct, frozen=True):
    """The attempt that is running or paused."""

    attempt_id: str
    attempt_index: int


class LeaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The last holder of the lease. Compare `expires_at` to see whether it has expired."""

    lease_id: str
    lease_epoch: int
    worker_instance_id: str
    expires_at: int
    attempt_index: int
    last_heartbeat_at: int | None = None


class ExecutionSnapshot(_Read, frozen=True, kw_only=True):
    """One execution at one moment."""

    created_at: int
    last_mutation_at: int
    total_attempt_count: int
    tags: Mapping[str, str]
    flow_id: str | None = None
    blocking_reason: str | None = None
    blocking_detail: str | None = None
    retry_at: int | None = None
    """When the limit that holds it back is expected to open."""
    current_attempt: CurrentAttempt | None = None
    current_lease: LeaseSummary | None = None
    current_waitpoint: str | None = None
    prompt: str | None = None
    """What is asked, for people."""
    details: Any = None
    """What the question is about, as decoded JSON."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of an execution, running or ended."""

    attempt_index: int
    attempt_id: str
    attempt_type: str
    attempt_state: str
    lease_id: str
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    started_at: int
    ended_at: int | None = None
    resumed_at: int | None = None
    suspended_at: int | None = None
    suspension_id: str | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    ended_by: str | None = None
    """`fail`, `expire`, `reclaim_cap` or `suspension_timeout`, if one of these ended it."""
    retry_reason: str | None = None
    replay_reason: str | None = None
    replay_requested_by: str | None = None
    replayed_from_attempt_index: int | None = None
    """The last attempt before the replay."""
    reclaim_reason: str | None = None
    previous_attempt_index: int | None = None
    """The attempt before this one; None for the first."""
    delay_until: int | None = None
    next_attempt_index: int | None = None


class ExecutionContext(msgspec.Struct, frozen=True):
    """What a handler receives."""

    input_payload: bytes
    execution_kind: str
    tags: Mapping[str, str]
    payload_encoding: str = ""


class ExecutionSummary(_Read, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a listing."""

    priority: int
    created_at: str
    """Milliseconds as decimal text."""
    total_attempt_count: int
    completed_at: str | None = None
    progress_pct: int | None = None
    worker_instance_id: str | None = None
    """The worker that holds its lease."""


class ExecutionPage(msgspec.Struct, frozen=True):
    """One page of a listing, and the cursor of the next if there is one."""

    executions: tuple[ExecutionSummary, ...]
    next_cursor: str | None = None
    damaged: tuple[str, ...] = ()
    """The entries that cannot be read, each as `<context>: <field>: <problem>`."""


class WhyWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """Why an execution is not running."""

    public_state: PublicState
    blocking_reason: str
    blocking_detail: str
    since: int
    lane_state: str
    lane_reason: str = ""
    """Why an operator set the lane's state, if they gave a reason."""
    retry_at: int | None = None
    """When its delay ends, its limit is checked again, or its lane gives it to another worker."""
    missing_capabilities: tuple[str, ...] = ()
    """What the best live worker lacks; everything required if no worker is live."""
    closest_workers: tuple[str, ...] = ()
    """The instance ids of live workers that lack only that."""
    live_workers: int | None = None
    """Live workers of its lane and namespace; None if it does not wait for a worker."""
    in_lane: int = 0
    """Live workers of its lane, of any namespace."""
    able_workers: tuple[str, ...] = ()
    """The instance ids of live workers that could run it."""
    draining_workers: tuple[str, ...] = ()
    """The instance ids of draining workers of its lane and namespace; they start nothing more."""
    unknown_task: str | None = None
    """Its task, if no live worker of its lane knows it."""
    offered_to: str | None = None
    """The worker that last left it to others because it did not know the task."""
    unresolved_edges: int = 0
    join: JoinSnapshot | None = None
    """The progress of its join; None without dependencies."""
    waitpoints: tuple[str, ...] = ()
    prompt: str | None = None
    """What is asked, for people."""
    details: Any = None
    """What the question is about, as decoded JSON."""
