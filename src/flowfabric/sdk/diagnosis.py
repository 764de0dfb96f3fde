"""Why an execution has not finished, in words."""

import re
from collections.abc import Sequence
from shlex import quote

import msgspec

from flowfabric.core.contracts.budgets import Exhausted
from flowfabric.core.contracts.executions import ExecutionInfo, WhyWaiting
from flowfabric.core.contracts.flows import AnyOf, Quorum
from flowfabric.core.contracts.suspension import OpenWaitpoint
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import LifecyclePhase, OwnershipState, PublicState
from flowfabric.core.text import clock, duration, plural
from flowfabric.engine.api.places import CLOSED_STATES
from flowfabric.engine.api.waitpoints import LastWait
from flowfabric.engine.flow_overview import Membership
from flowfabric.engine.overview import STARTS_NEXT, ExecutionDetail, ReachedLimits
from flowfabric.sdk.spending import PAUSED_BY_BUDGET, StoppedByBudget

OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
_NAMED = 3
_HELD = ("paused_by_operator", "paused_by_policy")
_FOR_ROUTE = "waiting_for_capable_worker"
_FOR_WORKER = ("waiting_for_worker", _FOR_ROUTE)
_UNSUCCESSFUL = (
    PublicState.FAILED,
    PublicState.CANCELLED,
    PublicState.EXPIRED,
    PublicState.SKIPPED,
)
_ENDINGS = {
    PublicState.FAILED: "It failed",
    PublicState.CANCELLED: "It was cancelled",
    PublicState.EXPIRED: "It expired",
    PublicState.SKIPPED: "It was skipped",
    PublicState.COMPLETED: "It completed",
}
_command = re.compile(r"`(flowfabric [^`]+)`")
_SPECIAL = {OPERATOR_ONLY: "an operator", TIMEOUT_ONLY: "its timeout"}
_TIMED = {
    "waiting_for_retry_backoff": "the last attempt failed{}; the next one starts",
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


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Why an execution is not running, or what it is doing.

    >>> print(await run.explain())
    It is waiting: no live worker serves lane "gpu". Start one with `flowfabric worker …`.
    """

    execution_id: ExecutionId
    public_state: PublicState
    text: str
    """The answer, in a sentence."""
    next_steps: tuple[str, ...] = ()
    """Commands that would help."""
    why: WhyWaiting | None = None
    """The facts that it is based on; None if the execution runs or has finished."""
    limits: ReachedLimits = ReachedLimits()
    """The exhausted budgets and the full quota policy that keep it from starting."""

    def __str__(self) -> str:
        return self.text


def _ending(info: ExecutionInfo) -> str:
    """How a finished execution ended, and why."""
    ending = _ENDINGS[info.public_state]
    attempts = info.total_attempt_count
    after = f" after {plural(attempts, 'attempt')}" if attempts else ""
    reason = (info.failure_reason or info.cancellation_reason or "").partition("\n")[0].rstrip(" .")
    return f"{ending}{after}: {reason}." if reason else f"{ending}{after}."


def explain(detail: ExecutionDetail) -> Diagnosis:
    """The answer to "why is it not running?"."""
    info = detail.execution
    if info.state_vector.lifecycle_phase is LifecyclePhase.TERMINAL:
        replay = f"flowfabric replay {info.execution_id.compact}"
        text = f"{_ending(info)} It runs again only if you replay it."
        steps = () if info.public_state is PublicState.COMPLETED else (replay,)
    else:
        text = unfinished(detail)
        steps = tuple(_command.findall(text))
    return Diagnosis(
        execution_id=info.execution_id,
        public_state=info.public_state,
        text=text,
        next_steps=steps,
        why=detail.why_not_running,
        limits=detail.limits,
    )


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
    """What it waits for and what would help; empty if it is running or has finished."""
    why = detail.why_not_running
    if why is None:
        return ""
    match detail.execution.public_state:
        case PublicState.ACTIVE if why.unknown_task is None:
            return _active(detail, why)
        case PublicState.SUSPENDED:
            return _suspended(detail)
        case _:
            return _waiting(detail, why)


def _waiting(detail: ExecutionDetail, why: WhyWaiting) -> str:
    """Everything that keeps it from starting."""
    info, own = detail.execution, _own_reasons(detail, why)
    lacks = info.public_state in STARTS_NEXT and not why.able_workers
    lacking = [_for_worker(info, why)] if lacks else []
    closed = [text] if (text := _closed_lane(info, why)) else []
    found = [*closed, *(lacking + own if why.blocking_reason in _FOR_WORKER else own + lacking)]
    return ". Also, ".join(found) or _for_worker(info, why)


def _closed_lane(info: ExecutionInfo, why: WhyWaiting) -> str:
    """A sentence if its lane is paused or draining; otherwise empty."""
    if why.lane_state not in CLOSED_STATES:
        return ""
    reason = f" ({why.lane_reason})" if why.lane_reason else ""
    resume = f"`flowfabric lane resume {quote(info.lane_id)}`"
    return f'lane "{info.lane_id}" is {why.lane_state}{reason}. Resume it with {resume}'


def _own_reasons(detail: ExecutionDetail, why: WhyWaiting) -> list[str]:
    """What keeps it from starting besides its lane and its workers."""
    timed = _TIMED.get(why.blocking_reason)
    if timed is not None and why.retry_at is not None:
        due = why.retry_at <= detail.now_ms
        at = "now" if due else f"at {future_time(why.retry_at, detail.now_ms)}"
        cause = (detail.execution.failure_reason or "").partition("\n")[0].rstrip(" .")
        return [f"{timed.format(f' ({cause})' if cause else '')} {at}"]
    if detail.membership is not None and (held := _held_by_flow(detail.membership)):
        return [held]
    if why.unresolved_edges:
        return [_for_upstreams(detail, why)]
    limits = _for_limits(detail)
    if why.blocking_reason in _HELD:
        return [_blocked(detail, why), *limits]
    able = why.able_workers and why.blocking_reason == _FOR_ROUTE
    if limits or (why.blocking_reason in _FOR_WORKER and not able):
        return limits
    return [_blocked(detail, why)]


def _blocked(detail: ExecutionDetail, why: WhyWaiting) -> str:
    reason = why.blocking_reason.replace("_", " ")
    text = f"{reason}: {why.blocking_detail}" if why.blocking_detail else reason
    if why.blocking_reason in _HELD:
        route = f"POST /v1/executions/{detail.execution.execution_id.compact}/unblock"
        text += f". Release it with {route} on the server"
    elif why.retry_at is not None:
        text += f"; the next check is at {future_time(why.retry_at, detail.now_ms)}"
    return text


def _held_by_flow(place: Membership) -> str:
    """Why its flow keeps it from running; empty if it does not."""
    if place.held:
        return f"its flow is held. Release it with `flowfabric flow release {place.flow_id}`"
    if place.awaited_parent is not None:
        node = place.awaited_parent.compact
        return f"its flow is a subflow and starts when node {node} no longer waits for others"
    return ""


def _for_limits(detail: ExecutionDetail) -> list[str]:
    """Which of its budgets and its quota admit nothing now."""
    limits, where = detail.limits, _namespace_option(detail.execution)
    found = [_for_budget(spent, where, detail.now_ms) for spent in limits.budgets]
    full = limits.quota
    if full is None:
        return found
    if full.reason == "concurrency":
        text = (
            f'every slot of quota "{full.label}" is taken; it starts when a running execution ends'
        )
    else:
        why, soon = detail.why_not_running, detail.now_ms + (full.retry_after_ms or 0)
        check = future_time(max(soon, (why and why.retry_at) or 0), detail.now_ms)
        text = f'the rate limit of quota "{full.label}" is reached; the next check is at {check}'
    show = f"`flowfabric quota show {quote(full.label)}{where}`"
    return [*found, f"{text}. See {show}"]


def _for_budget(spent: Exhausted, where: str, now_ms: int) -> str:
    used = f'{spent.used:,} of {spent.limit:,} {spent.dimension} of budget "{spent.label}" are used'
    if spent.next_reset_at is not None:
        used += f"; usage is reset at {future_time(spent.next_reset_at, now_ms)}"
    change = _raise(spent.label, spent.dimension, where)
    return f"{used}. Raise the limit with {change}"


def _raise(budget: str, dimension: str, where: str) -> str:
    return f"`flowfabric budget raise {quote(budget)} {quote(dimension)}=LIMIT{where}`"


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
    text = f"it waits for {_needed(why)}" + (f": {named}" if named else "")
    return text + _rerun_of_upstream(detail)


def _rerun_of_upstream(detail: ExecutionDetail) -> str:
    """What to rerun after a member was replayed alone; empty if no upstream of it has failed."""
    if not detail.execution.replay_count or detail.membership is None:
        return ""
    for each in detail.membership.upstreams:
        if each.edge_state == "pending" and each.public_state in _UNSUCCESSFUL:
            return f". `flowfabric replay {each.execution_id.compact}` reruns {each.name}"
    return ""


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


def _active(detail: ExecutionDetail, why: WhyWaiting) -> str:
    worker = "its worker" if detail.lease is None else detail.lease.worker_instance_id
    if detail.execution.state_vector.ownership_state is OwnershipState.LEASE_REVOKED:
        lost = f"the lease of {worker} was revoked"
    elif not detail.running:
        lost = f"{worker} stopped renewing its lease"
    else:
        return ""
    if closed := _closed_lane(detail.execution, why):
        return f"{lost}, and {closed}"
    if why.retry_at is not None and why.retry_at > detail.now_ms:
        lane, at = detail.execution.lane_id, future_time(why.retry_at, detail.now_ms)
        lost += f'; lane "{lane}" gives it to another worker at {at}'
        return lost if why.able_workers else f"{lost}. Also, {_for_worker(detail.execution, why)}"
    if why.able_workers:
        return f"{lost}; the next free worker takes it over"
    return f"{lost}, and {_for_worker(detail.execution, why)}"


def _suspended(detail: ExecutionDetail) -> str:
    active = [one for one in detail.waitpoints if one.state == "active"]
    limit = None if detail.wait is None else detail.wait.until
    until = "" if limit is None else f", until {future_time(limit, detail.now_ms)}"
    names = {name for one in active for name in one.required_signal_names}
    if TIMEOUT_ONLY in names:
        return f"it sleeps{until}"
    command = f"`flowfabric approve {detail.execution.execution_id.compact}"
    if detail.wait is not None and detail.wait.reason == PAUSED_BY_BUDGET:
        return _stopped_by_budget(detail.execution, detail.wait) + f" with {command}`"
    if OPERATOR_ONLY in names:
        return f"it waits for an operator{until}. Resume it with {command}`"
    for_what = describe_waitpoints(active) or "an answer"
    which = "" if len(active) == 1 else " WAITPOINT"
    return f"it waits for {for_what}{until}. Answer with {command}{which}`"


def _stopped_by_budget(info: ExecutionInfo, wait: LastWait) -> str:
    try:
        spent = msgspec.convert(wait.details, StoppedByBudget)
    except msgspec.ValidationError:
        return "its budget stopped it. Raise the limit or reset the budget, then resume it"
    at = f"{spent.used:,} of {spent.limit:,} {spent.dimension}"
    change = _raise(spent.budget, spent.dimension, _namespace_option(info))
    stopped = f'budget "{spent.budget}" stopped it at {at}'
    return f"{stopped}. Raise the limit with {change}, then resume it"


def _for_worker(info: ExecutionInfo, why: WhyWaiting) -> str:
    text = _which_worker(info, why)
    if why.able_workers or not why.draining_workers:
        return text
    names = ", ".join(why.draining_workers[:_NAMED])
    one = len(why.draining_workers) == 1
    return f"{names} {'is' if one else 'are'} draining, and {text}"


def _which_worker(info: ExecutionInfo, why: WhyWaiting) -> str:
    lane, needs = f'lane "{info.lane_id}"', info.required_capabilities
    if why.able_workers:
        workers, task = len(why.able_workers), info.execution_kind
        knows = (
            f' and {"knows" if workers == 1 else "know"} task "{task}"' if why.offered_to else ""
        )
        which = "this worker" if workers == 1 else "one of them"
        return f"{_serve(workers)} {lane}{knows}; it starts as soon as {which} is free"
    if why.unknown_task is not None:
        offered = f" (last offered to {why.offered_to})" if why.offered_to else ""
        problem = f'no live worker knows task "{why.unknown_task}"{offered}'
        return f"{problem}. Start one that does with {_worker_command(info)}"
    problem = f"no live worker serves {lane}"
    if not why.live_workers and why.in_lane:
        others = f"{_serve(why.in_lane)} {lane}"
        problem = f'{others}, but none serves namespace "{info.namespace}"'
    elif why.live_workers and why.missing_capabilities:
        lacks = ", ".join(why.missing_capabilities)
        problem = f"{_serve(why.live_workers)} {lane}, but the closest match lacks {lacks}"
        if why.closest_workers:
            problem += f" ({', '.join(why.closest_workers[:_NAMED])})"
    elif needs:
        problem += f" and offers {', '.join(needs)}"
    return f"{problem}. Start one with {_worker_command(info)}"


def _worker_command(info: ExecutionInfo) -> str:
    """The command that starts a worker for the execution."""
    options = f"--lanes {quote(info.lane_id)}"
    if info.required_capabilities:
        options += f" --capabilities {quote(','.join(info.required_capabilities))}"
    return f"`flowfabric worker module:app {options}{_namespace_option(info)}`"


def _namespace_option(info: ExecutionInfo) -> str:
    return "" if info.namespace == "default" else f" --namespace {quote(info.namespace)}"


def _serve(workers: int) -> str:
    return "1 live worker serves" if workers == 1 else f"{workers} live workers serve"
