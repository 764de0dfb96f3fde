"""Counts what the calls of a backend did, and how long they took.

Counts are derived from the arguments and results of calls, so a process only counts its own calls
and nothing is read twice. Without metrics, a backend is not wrapped.
"""

import copy
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowfabric.core.contracts.executions import RetryScheduled
from flowfabric.core.contracts.flows import FlowGraph, GraphEdge, GraphNode, JoinPolicy
from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle, Renewed, Revoked
from flowfabric.core.contracts.streams import AppendOutcome, Frame, StreamFrames
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api import check
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.concern import Refusal
from flowfabric.engine.api.executions import Completion, End, EndOutcome, FailedAttempt
from flowfabric.engine.api.reads import Reads
from flowfabric.engine.api.streams import size_of
from flowfabric.engine.api.upkeep import DependencyAudit
from flowfabric.engine.metrics import UNKNOWN, Meter

Method = Callable[..., Any]
_NOUNS = (
    *("executions", "reads", "listings", "claims", "leases", "lanes", "workers", "suspensions"),
    *("waitpoints", "signals", "secrets", "streams", "upkeep", "leadership", "flows", "meta"),
    *("budgets", "quotas", "steps"),
)
_UNTIMED = frozenset(
    (
        # Each of these is one call of another operation here.
        *("complete", "fail", "cancel", "delay", "wait_children", "progress", "renew"),
        *("append_frame", "set_execution_tag", "set_flow_tag", "claim_from_resume_grant"),
        # These wait for something to happen.
        *("wait_flow", "wait_ready", "tail_stream"),
    )
)


def measure(backend: Backend, meter: Meter) -> None:
    """Count and time every call of a backend."""
    reads = backend.reads
    for noun in _NOUNS:
        concern = copy.copy(getattr(backend, noun))
        for name, method in inspect.getmembers(concern, inspect.iscoroutinefunction):
            if not name.startswith("_") and not isinstance(method, Refusal):
                around, after, refused = (table.get(name) for table in (_AROUND, _AFTER, _REFUSED))
                timed = method
                if name not in _UNTIMED or after or refused:
                    timed = _timed(method, meter, after, refused)
                setattr(concern, name, around(timed, meter, reads) if around else timed)
        setattr(backend, noun, concern)


def _timed(method: Method, meter: Meter, after: Method | None, refused: Method | None) -> Method:
    op, clock = method.__name__, time.perf_counter
    waits, signature = op in _UNTIMED, inspect.signature(method)
    by_position = frozenset(
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        started = clock()
        if not by_position.isdisjoint(options):
            bound = signature.bind(*args, **options)
            args, options = bound.args, bound.kwargs
        try:
            outcome = await method(*args, **options)
        except EngineError as error:
            meter.count("ff_engine_errors_total", op, error.code)
            if refused is not None:
                refused(meter, error, *args, **options)
            raise
        if not waits:
            meter.observe("ff_engine_call_duration_seconds", clock() - started, op)
        if after is not None:
            after(meter, outcome, *args, **options)
        return outcome

    return call


# --- executions and claims ------------------------------------------------------------------


def _lane_of(holder: object) -> str:
    return holder.lane_id if isinstance(holder, Handle) else UNKNOWN


def _completed(note: Meter, _outcome: object, _id: str, fence: object = None, **_: Any) -> None:
    note.count("ff_attempt_outcome_total", _lane_of(fence), "ok")


def _completed_many(note: Meter, answers: Sequence[object], items: Sequence[Completion]) -> None:
    for item, answer in zip(items, answers, strict=True):
        if not isinstance(answer, EngineError):
            note.count("ff_attempt_outcome_total", item.handle.lane_id, "ok")


def _completed_and_claimed(
    note: Meter,
    outcome: tuple[Sequence[EndOutcome], ClaimedMany],
    _tag: str,
    items: Sequence[End],
    request: ClaimRequest,
    _max_n: int,
    **_: Any,
) -> None:
    answers, claimed = outcome
    if completed := answers.count(None):
        # They come from one lane: batches are built per lane and partition.
        note.count("ff_attempt_outcome_total", request.lane_id, "ok", by=completed)
    if completed < len(answers):
        for item, answer in zip(items, answers, strict=True):
            if isinstance(item, FailedAttempt) and not isinstance(answer, EngineError):
                _failed(note, answer, "", item.handle, failure_category=item.category)
    _claimed(note, claimed)


def _claimed(note: Meter, claimed: ClaimedMany, *_: Any, **__: Any) -> None:
    reclaimed = sum(claim.handle.kind == "reclaimed" for claim in claimed.claims)
    if reclaimed:
        note.count("ff_reclaim_total", "claimed", by=reclaimed)


def _reclaimed(note: Meter, outcome: Any, *_: Any, **__: Any) -> None:
    kind = "claimed" if isinstance(outcome, Claim) else outcome.kind
    note.count("ff_reclaim_total", kind)


def _failed(
    note: Meter,
    outcome: object,
    _id: str,
    fence: object = None,
    *,
    failure_category: str = "",
    **_: Any,
) -> None:
    result = "timeout" if failure_category == "timeout" else "error"
    if isinstance(outcome, RetryScheduled):
        result = "retry"
    note.count("ff_attempt_outcome_total", _lane_of(fence), result)


_TIMED_OUT = {"retry_scheduled": "retry", "expired": "timeout", "failed": "timeout"}


def _expiring(method: Method, note: Meter, reads: Reads) -> Method:
    @functools.wraps(method)
    async def call(tag: str, reason: ExpireReason, ids: Iterable[str]) -> list[str]:
        names = check.listed(ids, "ids")
        answers: list[str] = await method(tag, reason, names)
        if reason is ExpireReason.ATTEMPT_TIMEOUT:
            for name, answer in zip(names, answers, strict=True):
                if answer in _TIMED_OUT:
                    lane = await _lane(reads, name)
                    note.count("ff_attempt_outcome_total", lane, _TIMED_OUT[answer])
        return answers

    return call


async def _lane(reads: Reads, name: str) -> str:
    """The lane of an execution, for rare events where an extra read does not matter."""
    try:
        return (await reads.read_execution_info(ExecutionId.parse(name))).lane_id
    except EngineError:
        return UNKNOWN


# --- leases ---------------------------------------------------------------------------------


def _renewed(note: Meter, _outcome: object, *_: Any, **__: Any) -> None:
    note.count("ff_lease_renewal_total", "ok")


def _not_renewed(note: Meter, _error: EngineError, *_: Any, **__: Any) -> None:
    note.count("ff_lease_renewal_total", "error")


def _renewed_many(note: Meter, answers: Sequence[object], _handles: object) -> None:
    renewed = sum(isinstance(answer, Renewed) for answer in answers)
    if renewed:
        note.count("ff_lease_renewal_total", "ok", by=renewed)
    if failed := len(answers) - renewed:
        note.count("ff_lease_renewal_total", "error", by=failed)


def _not_renewed_many(note: Meter, _error: EngineError, handles: Sequence[Handle]) -> None:
    note.count("ff_lease_renewal_total", "error", by=len(handles))


def _marking(method: Method, note: Meter, reads: Reads) -> Method:
    @functools.wraps(method)
    async def call(tag: str, ids: Iterable[str]) -> list[str]:
        names = check.listed(ids, "ids")
        answers: list[str] = await method(tag, names)
        for name, answer in zip(names, answers, strict=True):
            if answer == "marked_expired":
                note.count("ff_lease_expired_total", await _lane(reads, name))
        return answers

    return call


def _revoked(note: Meter, outcome: object, *_: Any, **__: Any) -> None:
    if isinstance(outcome, Revoked):
        note.count("ff_lease_revoked_total")


# --- signals, streams, flows, budgets -------------------------------------------------------


def _signalled(note: Meter, outcome: Any, *_: Any, **__: Any) -> None:
    effect = outcome.effect if isinstance(outcome, Accepted) else "duplicate"
    note.count("ff_signals_total", effect)


def _signal_refused(note: Meter, error: EngineError, *_: Any, **__: Any) -> None:
    note.count("ff_signal_rejections_total", error.code)


def _not_verified(note: Meter, error: EngineError, *_: Any, **__: Any) -> None:
    # What the delivery itself refuses is counted there.
    if error.code == "waitpoint_token_not_found":
        _signal_refused(note, error)


def _appended(
    note: Meter,
    outcome: AppendOutcome,
    _handle: object,
    frames: Sequence[Frame],
    *,
    mode: str = "durable",
    **_: Any,
) -> None:
    if not outcome.duplicate:
        note.count("ff_stream_frames_total", mode, by=len(frames))
        note.count("ff_stream_bytes_total", mode, by=sum(map(size_of, frames)))


def _not_appended(note: Meter, error: EngineError, *_: Any, **__: Any) -> None:
    note.count("ff_stream_append_rejected_total", error.code)


def _stream_operation(method: Method, note: Meter, _reads: Reads) -> Method:
    op = method.__name__

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> StreamFrames:
        started = time.monotonic()
        note.count("ff_stream_ops_in_flight", op)
        try:
            page: StreamFrames = await method(*args, **options)
        except EngineError as error:
            if error.code == "resource_exhausted":
                note.count("ff_stream_ops_rejected_total", op)
            raise
        finally:
            note.count("ff_stream_ops_in_flight", op, by=-1)
        if options.get("block_ms"):
            outcome = "frames" if page.frames else "closed" if page.is_closed else "timeout"
            waited = time.monotonic() - started
            note.observe("ff_stream_tail_wait_seconds", waited, outcome)
        return page

    return call


def _joined(note: Meter, nodes: Iterable[GraphNode], edges: Iterable[GraphEdge]) -> None:
    waiting = {edge.to for edge in edges}
    for node in nodes:
        if node.key in waiting:
            _join_stored(note, node.join)


def _join_stored(note: Meter, policy: JoinPolicy) -> None:
    note.count("ff_edge_group_policy_total", str(policy.__struct_config__.tag))


def _submitted(note: Meter, outcome: Any, graph: FlowGraph, **_: Any) -> None:
    if outcome.kind == "submitted":
        _joined(note, graph.nodes, graph.edges)


def _extended(
    note: Meter,
    outcome: Any,
    _flow_id: str,
    nodes: Sequence[GraphNode] = (),
    edges: Sequence[GraphEdge] = (),
) -> None:
    if outcome.kind == "extended":
        _joined(note, nodes, edges)


def _spawned(
    note: Meter,
    _outcome: Any,
    _handle: Handle,
    nodes: Sequence[GraphNode],
    edges: Sequence[GraphEdge] = (),
    **_: Any,
) -> None:
    _joined(note, nodes, edges)


def _join_set(note: Meter, changed: object, _flow: str, _child: str, policy: JoinPolicy) -> None:
    if changed:
        _join_stored(note, policy)


def _drained(note: Meter, counts: Any, *_: Any, **__: Any) -> None:
    if counts.resolved:
        note.count("ff_cascade_resolved_total", "drain", by=counts.resolved)


def _audited(note: Meter, audits: Sequence[DependencyAudit], *_: Any) -> None:
    repaired = sum(audit.verdict in ("resolved", "unblocked") for audit in audits)
    if repaired:
        note.count("ff_cascade_resolved_total", "reconciler", by=repaired)


def _reconciled(note: Meter, action: str, *_: Any) -> None:
    note.count("ff_sibling_cancel_reconcile_total", action)


def _usage_reported(note: Meter, outcome: Any, *_: Any, **__: Any) -> None:
    note.count("ff_budget_report_total", outcome.kind)


def _usage_refused(note: Meter, error: EngineError, *_: Any, **__: Any) -> None:
    note.count("ff_budget_report_total", error.code)


def _not_stopped(note: Meter, error: EngineError, *_: Any) -> None:
    if error.code == "timeout":
        note.count("ff_shutdown_timeout_total")


_AROUND: dict[str, Callable[[Method, Meter, Reads], Method]] = {
    "expire_execution": _expiring,
    "mark_lease_expired_if_due": _marking,
    "read_stream": _stream_operation,
    "tail_stream": _stream_operation,
}
_AFTER: dict[str, Method] = {
    "complete_execution": _completed,
    "complete_many": _completed_many,
    "complete_and_claim": _completed_and_claimed,
    "claim_many": _claimed,
    "reclaim_execution": _reclaimed,
    "fail_execution": _failed,
    "renew_lease": _renewed,
    "renew_many": _renewed_many,
    "revoke_lease": _revoked,
    "deliver_signal": _signalled,
    "deliver_approval_signal": _signalled,
    "append_frames": _appended,
    "submit_flow": _submitted,
    "extend_flow": _extended,
    "spawn_children": _spawned,
    "set_edge_group_policy": _join_set,
    "drain_cascade": _drained,
    "audit_dependencies": _audited,
    "reconcile_sibling_cancel_group": _reconciled,
    "report_usage": _usage_reported,
    "report_usage_admin": _usage_reported,
}
"""Called after a successful call, with its result and arguments."""
_REFUSED: dict[str, Method] = {
    "renew_lease": _not_renewed,
    "renew_many": _not_renewed_many,
    "deliver_signal": _signal_refused,
    "deliver_approval_signal": _signal_refused,
    "verify_and_deliver": _not_verified,
    "append_frames": _not_appended,
    "report_usage": _usage_refused,
    "report_usage_admin": _usage_refused,
    "shutdown_prepare": _not_stopped,
}
"""Called after a refused call."""
