"""Shapes of answers that are not contracts of the engine, for handlers and OpenAPI alike."""

from typing import Any, Literal

import msgspec

from flowfabric.core.contracts import NamedOutcome
from flowfabric.core.contracts.budgets import Exhausted
from flowfabric.core.contracts.executions import ExecutionInfo
from flowfabric.core.contracts.flows import FlowSnapshot, FlowState
from flowfabric.core.contracts.quotas import FullQuota
from flowfabric.core.contracts.remote import RemoteClaim
from flowfabric.core.contracts.steps import StepError, StepKind, StepStatus
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState, StateVector, TerminalOutcome


class Variants(msgspec.Struct, frozen=True):
    """An object with one key, the name of the result."""

    outcomes: tuple[type[NamedOutcome[Any]], ...]
    omit: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def variants(
    *outcomes: type[NamedOutcome[Any]],
    omit: tuple[str, ...] = (),
    texts: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
) -> Variants:
    """One of these results: fields left out always or sometimes, and numbers sent as text."""
    return Variants(outcomes, omit, texts, optional)


class Listed(msgspec.Struct, frozen=True):
    """One page of a listing: its noun, and the type of its rows."""

    noun: str
    row: Any


class Content(msgspec.Struct, frozen=True):
    """An answer that is not JSON."""

    media_type: str


RAW = "application/octet-stream"
BYTES = Content(RAW)
EVENTS = Content("text/event-stream")


class OkCount(msgspec.Struct, frozen=True):
    """How many pairs were written."""

    count: int


class Counted(msgspec.Struct, frozen=True):
    """How many tags were written."""

    Ok: OkCount


class StateOnly(msgspec.Struct, frozen=True):
    """The execution has not ended yet."""

    public_state: PublicState


class EventPage(msgspec.Struct, frozen=True):
    """Entries of the event feed."""

    events: list[dict[str, Any]]
    next_cursor: str | None


class StepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded step; `encoding` says how the text of `result` represents its bytes."""

    step_key: str
    seq: int
    kind: StepKind
    status: StepStatus
    codec: str
    result: str | None
    encoding: Literal["utf8", "base64"] | None
    error: StepError | None
    attempt_index: int
    lease_epoch: int
    started_at: int
    finished_at: int | None
    fire_at: int | None
    child_execution_id: ExecutionId | None


class ExecutionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an execution ended."""

    execution_id: ExecutionId
    public_state: PublicState
    terminal_outcome: TerminalOutcome
    completed_at: int
    failure_reason: str | None
    failure_category: str | None
    cancellation_reason: str | None
    cancelled_by: str | None
    current_attempt_index: int
    total_attempt_count: int
    has_result: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why an execution is not running. Fields that do not apply are null."""

    public_state: PublicState
    blocking_reason: str
    blocking_detail: str
    since: int
    retry_at: int | None
    missing_capabilities: list[str] | None
    budgets: list[Exhausted] | None
    quota: FullQuota | None
    unresolved_edges: list[dict[str, Any]] | None
    waitpoints: list[dict[str, Any]] | None
    lane_state: str


class StateVectorAnswer(StateVector, frozen=True, kw_only=True):
    """The dimensions of a state, and the public state that is derived from them."""

    public_state: PublicState  # pyright: ignore[reportIncompatibleMethodOverride]


class ExecutionAnswer(ExecutionInfo, frozen=True, kw_only=True):
    """An execution."""

    state_vector: StateVectorAnswer  # pyright: ignore[reportIncompatibleVariableOverride]


class FramePage(msgspec.Struct, frozen=True, kw_only=True):
    """Output frames; `closed_at` is set when the output is complete."""

    frames: list[dict[str, Any]]
    count: int
    next_cursor: str
    closed_at: int | None = None
    closed_reason: str | None = None
    truncated: bool = False


class SummaryPage(msgspec.Struct, frozen=True, kw_only=True):
    """The rolling summary of an attempt."""

    document: dict[str, Any]
    version: int
    patch_kind: str
    last_updated_ms: int
    first_applied_ms: int


class TokenOnly(msgspec.Struct, frozen=True):
    """A waitpoint token."""

    token: str


class ReclaimAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the execution may be taken over."""

    status: Literal["granted", "not_reclaimable", "reclaim_cap_exceeded"]
    execution_id: ExecutionId
    partition_key: str | None = None
    grant_key: str | None = None
    expires_at_ms: int | None = None
    lane_id: str | None = None
    detail: str | None = None
    reclaim_count: int | None = None


class FlowSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a flow."""

    flow_id: str
    derived_state: FlowState
    total_members: int
    members_waiting: int
    members_delayed: int
    members_rate_limited: int
    members_waiting_children: int
    members_active: int
    members_suspended: int
    members_completed: int
    members_failed: int
    members_cancelled: int
    members_expired: int
    members_skipped: int
    last_summary_update_at: int


class FlowAnswer(FlowSnapshot, frozen=True, kw_only=True):
    """A flow with its counters."""

    summary: FlowSummary


class FlowReplayCounts(msgspec.Struct, frozen=True):
    """How many members run again, wait again, and are still to be replayed."""

    replayed: int
    reopened: int
    pending: int


class FlowReplayAnswer(msgspec.Struct, frozen=True):
    """A flow was replayed."""

    Replayed: FlowReplayCounts


class BulkAnswer(msgspec.Struct, frozen=True):
    """One row per item: `status`, and `result` or the fields of an error."""

    results: list[dict[str, Any]]


class RotationAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rotation did."""

    rotated: int
    failed: list[int]
    new_kid: str
    in_progress: list[int]
    rotation_id: str


RotationStatus = Literal["running", "done", "failed"]


class RotationState(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a rotation."""

    rotation_id: str
    new_kid: str
    status: RotationStatus
    rotated: int
    failed: list[int]
    in_progress: list[int]
    started_at: int
    finished_at: int | None


class ScannerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A background job of this process."""

    name: str
    enabled: bool
    interval_ms: int
    last_cycle_at: int | None
    last_duration_ms: int
    processed: int
    errors: int
    restarts: int


class RemoteRenewed(msgspec.Struct, frozen=True, kw_only=True):
    """One row per lease."""

    results: list[dict[str, Any]]
    draining: bool
    """An operator is draining the worker: finish running tasks and claim nothing more."""


class RemoteCompleted(msgspec.Struct, frozen=True, kw_only=True):
    """One row per attempt; with `claim`, also what was claimed, or why nothing was."""

    results: list[dict[str, Any]]
    claims: list[RemoteClaim] | None = None
    draining: bool | None = None
    unknown_tasks: list[str] | None = None
    waited_ms: int | None = None
    claim_error: dict[str, Any] | None = None


_GRANTED = ("partition_key", "grant_key", "expires_at_ms", "lane_id")
OMITTED: dict[str, tuple[str, ...]] = {
    ExecutionAnswer.__name__: ("started_at", "completed_at"),
    FramePage.__name__: ("closed_at", "closed_reason", "truncated"),
    ReclaimAnswer.__name__: (*_GRANTED, "detail", "reclaim_count"),
    RemoteCompleted.__name__: RemoteCompleted.__struct_fields__[1:],
}
"""Fields that answers leave out; every other one is always there, `null` if it is unset."""
