"""What executions wait for: the table of `flowfabric waiting`, and phrases for other commands."""

from collections.abc import Sequence

from flowfabric.cli.views.screen import Cell, Row, Screen, id_cell
from flowfabric.cli.views.text import age, clock, duration, short_length
from flowfabric.core.contracts.executions import ExecutionInfo, WhyWaiting
from flowfabric.core.contracts.suspension import OpenWaitpoint, ResumeSignal
from flowfabric.core.state import OwnershipState, PublicState
from flowfabric.core.text import plural
from flowfabric.engine.api.waitpoints import LastWait
from flowfabric.engine.overview import ExecutionDetail, Wait

OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
_SPECIAL = {OPERATOR_ONLY: "an operator", TIMEOUT_ONLY: "its timeout"}
_ENDINGS = {
    "cancelled": "ended when its execution was cancelled",
    "resumed": "was resumed by an operator",
}
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


def describe_end(last: LastWait, now_ms: int) -> str:
    """How a wait ended: what follows "the wait"."""
    ago = "" if last.closed_at is None else f" {age(now_ms - last.closed_at)} ago"
    if last.answers:
        return f"was answered{ago}: " + ", ".join(_answer(signal) for signal in last.answers)
    reason = last.close_reason
    return ("timed out" if reason.startswith("timed_out") else _ENDINGS.get(reason, reason)) + ago


def _answer(signal: ResumeSignal) -> str:
    by = f" by {signal.source_identity}" if signal.source_identity else ""
    return f"{signal.signal_name}{by}"


def print_waits(waits: Sequence[Wait], left_out: int, now_ms: int) -> None:
    """Print suspended executions with their open waitpoints."""
    screen = Screen()
    if not waits:
        screen.line("No execution waits for an answer.")
        return
    _print_table(screen, waits, now_ms)
    if screen.terminal:
        text = f"{plural(len(waits) + left_out, 'execution')} waiting. "
        text += "Answer one with `flowfabric approve ID`."
        if left_out:
            text += f" Showing the {len(waits)} that time out first; raise --limit for more."
        screen.line()
        screen.line((text, "bright_black"))


def print_wait(wait: Wait, last: LastWait | None, now_ms: int) -> None:
    """Print what one execution waits for, or how its last wait ended."""
    screen = Screen()
    if wait.waitpoints:
        _print_table(screen, [wait], now_ms)
        return
    screen.line(f"{wait.execution_id} is {wait.public_state.value} and waits for no answer.")
    if last is not None and last.closed_at is not None:
        screen.line(f"Its last wait {describe_end(last, now_ms)}.")


def _print_table(screen: Screen, waits: Sequence[Wait], now_ms: int) -> None:
    """Print a row per open waitpoint; a terminal gets short ids."""
    lanes = any(wait.lane_id != "default" for wait in waits)
    id_length = length = None
    if screen.terminal:
        id_length = short_length(wait.execution_id.uuid for wait in waits)
        length = short_length(one.waitpoint_id for wait in waits for one in wait.waitpoints)
    rows: list[Row] = []
    for wait in waits:
        head: Row = {"ID": id_cell(wait.execution_id, id_length), "KIND": wait.execution_kind}
        if lanes:
            head["LANE"] = wait.lane_id
        rows += [head | _cells(wait, one, now_ms, length) for one in wait.waitpoints or [None]]
    screen.table(rows)


def _cells(wait: Wait, one: OpenWaitpoint | None, now_ms: int, length: int | None) -> Row:
    if one is None:
        since = "-" if wait.since is None else age(now_ms - wait.since)
        until = _time_left(wait.until, now_ms)
        times: Row = {"SIGNALS": "-", "SINCE": since, "UNTIL": until}
        return {"WAITS FOR": "-"} | times | {"WAITPOINT": "-", "TOKEN": "-"}
    return (
        {"WAITS FOR": (one.waitpoint_key, "magenta")}
        | signal_cells(one, wait.until, now_ms)
        | {"WAITPOINT": one.waitpoint_id[:length], "TOKEN": token_cell(one)}
    )


def signal_cells(one: OpenWaitpoint, until: int | None, now_ms: int) -> Row:
    """The signals that a waitpoint accepts, since when and until when."""
    return {
        "SIGNALS": accepted_signals(one),
        "SINCE": age(now_ms - (one.activated_at or one.created_at)),
        "UNTIL": _time_left(one.expires_at if one.state == "pending" else until, now_ms),
    }


def token_cell(one: OpenWaitpoint) -> Cell:
    """What identifies the token of a waitpoint."""
    return f"{one.token_kid} {one.token_fingerprint}", "bright_black"


def _time_left(at_ms: int | None, now_ms: int) -> str:
    if at_ms is None:
        return "-"
    return f"in {age(at_ms - now_ms)}" if at_ms > now_ms else "due"


def why_not_running(detail: ExecutionDetail) -> str:
    """What it waits for and how to help; empty if it runs or has finished."""
    why = detail.why_not_running
    if why is None:
        return ""
    match detail.execution.public_state:
        case PublicState.ACTIVE:
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
    if why.unresolved_edges:
        return f"it depends on {why.unresolved_edges} executions that have not finished"
    if why.blocking_reason == "waiting_for_worker" or why.missing_capabilities:
        return _for_worker(info, why)
    reason = why.blocking_reason.replace("_", " ")
    return f"{reason}: {why.blocking_detail}" if why.blocking_detail else reason


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
    command = f"`flowfabric approve {detail.execution.execution_id.uuid}"
    if OPERATOR_ONLY in names:
        return f"it waits for an operator{until}: {command}` resumes it"
    for_what = describe_waitpoints(active) or "an answer"
    which = "" if len(active) == 1 else " WAITPOINT"
    return f"it waits for {for_what}{until}: answer with {command}{which}`"


def _for_worker(info: ExecutionInfo, why: WhyWaiting) -> str:
    lane, needs = info.lane_id, info.required_capabilities
    if why.able_workers:
        return f"{_serve(len(why.able_workers))} lane {lane}; it starts as soon as one is free"
    problem, option = f"no live worker serves lane {lane}", f"--lanes {lane}"
    if needs:
        problem += f" and offers {', '.join(needs)}"
        option = f"--capabilities {','.join(needs)}"
    if why.live_workers and why.missing_capabilities:
        lacks = ", ".join(why.missing_capabilities)
        problem = f"{_serve(why.live_workers)} lane {lane}, but the nearest lacks {lacks}"
    return f"{problem}: start one with `flowfabric worker module:app {option}`"


def _serve(workers: int) -> str:
    return "1 live worker serves" if workers == 1 else f"{workers} live workers serve"
