"""Why an execution has not finished, in words."""

from collections.abc import Sequence

from flowfabric.core.contracts.executions import ExecutionInfo, WhyWaiting
from flowfabric.core.contracts.flows import AnyOf, Quorum
from flowfabric.core.contracts.suspension import OpenWaitpoint
from flowfabric.core.state import OwnershipState, PublicState
from flowfabric.core.text import clock, duration, plural
from flowfabric.engine.overview import ExecutionDetail

OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
_NAMED = 3
_SPECIAL = {OPERATOR_ONLY: "an operator", TIMEOUT_ONLY: "its timeout"}
_TIMED = {
    "waiting_for_retry_backoff": "the last attempt failed; the next one starts",
    "waiting_for_resume_delay": "the handler asked for a delay; it resumes",
    "waiting_for_delay": "it was submitted with a delay; it starts",
}


def accepted_signals(waitpoint: OpenWaitpoint) -> str:
    """The signals that a waitpoint accepts."""
    if waitpoint.state == "pending":
        return "not waiting yet"
    names = waitpoint.required_signal_names
    return ", ".join(_SPECIAL.get(name, name) for name in names) or "any signal"


def describe_waitpoints(waitpoints: Sequence[OpenWaitpoint]) -> str:
    """All waitpoints in one phrase."""
    return "; ".join(f"{one.waitpoint_key} ({accepted_signals(one)})" for one in waitpoints)


def future_time(at_ms: int, now_ms: int) -> str:
    """A time, and how long until then."""
    left = at_ms - now_ms
    return f"{clock(at_ms)} (in {duration(left)})" if left > 0 else f"{clock(at_ms)} (due)"


def unfinished(detail: ExecutionDetail) -> str:
    """Why it has not finished, as a sentence."""
    state, why = detail.execution.public_state.value, why_not_running(detail)
    if why:
        return f"It is {state}: {why}."
    if not detail.running or detail.lease is None:
        return f"It is {state} now."
    attempt = detail.attempts[-1]
    took = duration(max(0, detail.now_ms - (attempt.resumed_at or attempt.started_at)))
    worker, number = detail.lease.worker_instance_id, attempt.attempt_index + 1
    return f"It has been running for {took} on worker {worker} (attempt {number})."


def lacks_worker(detail: ExecutionDetail) -> bool:
    """Whether it waits although no live worker could run it."""
    why = detail.why_not_running
    return why is not None and why.public_state is PublicState.WAITING and not why.able_workers


def why_not_running(detail: ExecutionDetail) -> str:
    """What it waits for and how to help; empty if it runs or has finished."""
    why = detail.why_not_running
    if why is None:
        return ""
    match detail.execution.public_state:
        case PublicState.ACTIVE if why.unknown_task is None:
            return _active(detail)
        case PublicState.SUSPENDED:
            return _suspended(detail)
        case _:
            return _waiting(detail, why)


def _waiting(detail: ExecutionDetail, why: WhyWaiting) -> str:
    info = detail.execution
    if why.lane_state != "active":
        return f"lane {info.lane_id} is {why.lane_state}: none of its executions start"
    timed = _TIMED.get(why.blocking_reason)
    if timed is not None and why.retry_at is not None:
        due = why.retry_at <= detail.now_ms
        return f"{timed} " + ("now" if due else f"at {future_time(why.retry_at, detail.now_ms)}")
    if detail.membership is not None and detail.membership.held:
        flow_id = detail.membership.flow_id
        return f"its flow is held: `flowfabric flow release {flow_id}` lets it run"
    if why.unresolved_edges:
        return _for_upstreams(detail, why)
    for_worker = why.blocking_reason == "waiting_for_worker" or why.unknown_task
    if for_worker or why.missing_capabilities:
        return _for_worker(info, why)
    reason = why.blocking_reason.replace("_", " ")
    return f"{reason}: {why.blocking_detail}" if why.blocking_detail else reason


def _for_upstreams(detail: ExecutionDetail, why: WhyWaiting) -> str:
    open_edges, membership = why.unresolved_edges, detail.membership
    which = [
        f"{each.name} ({'deleted' if each.public_state is None else each.public_state.value})"
        for each in (() if membership is None else membership.upstreams)
        if each.edge_state == "pending"
    ]
    named = ", ".join(which[:_NAMED])
    if named and open_edges > _NAMED:
        named += f" and {open_edges - _NAMED:,} more"
    return f"it waits for {_needed(why)}" + (f": {named}" if named else "")


def _needed(why: WhyWaiting) -> str:
    """How many upstreams it waits for, by its join."""
    count = plural(why.unresolved_edges, "upstream")
    match None if why.join is None else why.join.policy:
        case AnyOf():
            return f"one of {count}"
        case Quorum(k=k) if why.join is not None:
            return f"{k - why.join.satisfied_count:,} of {count}"
        case _:
            return count


def _active(detail: ExecutionDetail) -> str:
    worker = "its worker" if detail.lease is None else detail.lease.worker_instance_id
    if detail.execution.state_vector.ownership_state is OwnershipState.LEASE_REVOKED:
        return f"the lease of {worker} was revoked; the next free worker takes it over"
    if not detail.running:
        return f"{worker} stopped renewing its lease; the next free worker takes it over"
    return ""


def _suspended(detail: ExecutionDetail) -> str:
    active = [one for one in detail.waitpoints if one.state == "active"]
    limit = None if detail.wait is None else detail.wait.until
    until = "" if limit is None else f", until {future_time(limit, detail.now_ms)}"
    names = {name for one in active for name in one.required_signal_names}
    if TIMEOUT_ONLY in names:
        return f"it sleeps{until}"
    command = f"`flowfabric approve {detail.execution.execution_id.compact}"
    if OPERATOR_ONLY in names:
        return f"it waits for an operator{until}: {command}` resumes it"
    for_what = describe_waitpoints(active) or "an answer"
    which = "" if len(active) == 1 else " WAITPOINT"
    return f"it waits for {for_what}{until}: answer with {command}{which}`"


def _for_worker(info: ExecutionInfo, why: WhyWaiting) -> str:
    lane, needs = info.lane_id, info.required_capabilities
    if why.able_workers:
        workers, task = len(why.able_workers), info.execution_kind
        knows = f" and {'knows' if workers == 1 else 'know'} task {task}" if why.offered_to else ""
        return f"{_serve(workers)} lane {lane}{knows}; it starts as soon as one is free"
    if why.unknown_task is not None:
        offered = f"; last offered to {why.offered_to}" if why.offered_to else ""
        problem = f"no live worker knows task {why.unknown_task}{offered}"
        return f"{problem}: start one that does with `flowfabric worker module:app --lanes {lane}`"
    problem, option = f"no live worker serves lane {lane}", f"--lanes {lane}"
    if needs:
        problem += f" and offers {', '.join(needs)}"
        option = f"--capabilities {','.join(needs)}"
    if why.live_workers and why.missing_capabilities:
        lacks = ", ".join(why.missing_capabilities)
        problem = f"{_serve(why.live_workers)} lane {lane}, but the best match lacks {lacks}"
    return f"{problem}: start one with `flowfabric worker module:app {option}`"


def _serve(workers: int) -> str:
    return "1 live worker serves" if workers == 1 else f"{workers} live workers serve"
