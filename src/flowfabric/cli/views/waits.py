"""What `flowfabric waiting` prints, and phrases about waits for other commands."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.cli.views.screen import Cell, Screen
from flowfabric.cli.views.text import age, clock, duration, short_length
from flowfabric.core.contracts.suspension import OpenWaitpoint, ResumeSignal
from flowfabric.core.text import plural
from flowfabric.engine.api.waitpoints import LastWait
from flowfabric.engine.overview import Wait

OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
_SPECIAL = {OPERATOR_ONLY: "an operator", TIMEOUT_ONLY: "its timeout"}
_ENDINGS = {
    "cancelled": "ended when its execution was cancelled",
    "timed_out_fail": "timed out",
    "timed_out_cancel": "timed out",
    "timed_out_expire": "timed out",
    "timed_out_auto_resume": "timed out",
}


def accepted_signals(waitpoint: OpenWaitpoint) -> str:
    """The signals that a waitpoint accepts."""
    names = waitpoint.required_signal_names
    if waitpoint.state == "pending":
        return "not waiting yet"
    if not names:
        return "any signal"
    return ", ".join(_SPECIAL.get(name, name) for name in names)


def describe_waitpoints(waitpoints: Sequence[OpenWaitpoint]) -> str:
    """All waitpoints in one phrase."""
    return "; ".join(f"{one.waitpoint_key} ({accepted_signals(one)})" for one in waitpoints)


def _time_left(at_ms: int | None, now_ms: int) -> str:
    """How long until a wait times out."""
    if at_ms is None:
        return "-"
    return f"in {age(at_ms - now_ms)}" if at_ms > now_ms else "due"


def future_time(at_ms: int, now_ms: int) -> str:
    """A time, and how long until then."""
    left = at_ms - now_ms
    return f"{clock(at_ms)} (in {duration(left)})" if left > 0 else f"{clock(at_ms)} (due)"


def describe_end(last: LastWait, now_ms: int) -> str:
    """How a wait ended: what follows "the wait"."""
    ago = "" if last.closed_at is None else f" {age(now_ms - last.closed_at)} ago"
    if last.answers:
        return f"was answered{ago}: " + ", ".join(_answer(signal) for signal in last.answers)
    if last.close_reason == "resumed":
        return f"was resumed by an operator{ago}"
    return f"{_ENDINGS.get(last.close_reason, last.close_reason)}{ago}"


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
        screen.line()
        screen.line((_footer(waits, left_out), "bright_black"))


def print_wait(wait: Wait, last: LastWait | None, now_ms: int) -> None:
    """Print what one execution waits for, or how its last wait ended."""
    screen = Screen()
    if wait.waitpoints:
        _print_table(screen, [wait], now_ms)
        return
    screen.line(f"{wait.execution_id} is {wait.public_state.value} and waits for no answer.")
    if last is not None and last.closed_at is not None:
        screen.line(f"Its last wait {describe_end(last, now_ms)}.")


def _footer(waits: Sequence[Wait], left_out: int) -> str:
    total = plural(len(waits) + left_out, "execution")
    text = f"{total} waiting. Answer one with `flowfabric approve ID`."
    if left_out:
        text += f" Showing the {len(waits)} that time out first; raise --limit for more."
    return text


def _print_table(screen: Screen, waits: Sequence[Wait], now_ms: int) -> None:
    """Print a row per open waitpoint; a terminal gets short ids."""
    lanes = any(wait.lane_id != "default" for wait in waits)
    short = short_length(wait.execution_id.uuid for wait in waits) if screen.terminal else None
    inner = (
        short_length(each.waitpoint_id for wait in waits for each in wait.waitpoints)
        if screen.terminal
        else None
    )
    headers = ["ID", "KIND", "WAITS FOR", "SIGNALS", "SINCE", "UNTIL", "WAITPOINT", "TOKEN"]
    if lanes:
        headers.insert(2, "LANE")
    rows: list[list[Cell]] = []
    for wait in waits:
        shown = str(wait.execution_id) if short is None else wait.execution_id.uuid[:short]
        for each in wait.waitpoints or [None]:
            row = _row(wait, each, now_ms, shown, inner)
            if lanes:
                row.insert(2, wait.lane_id)
            rows.append(row)
    screen.table(headers, rows)


def _row(
    wait: Wait, waitpoint: OpenWaitpoint | None, now_ms: int, shown: str, inner: int | None
) -> list[Cell]:
    head: list[Cell] = [(shown, "bold"), wait.execution_kind]
    if waitpoint is not None:
        return head + waitpoint_cells(waitpoint, wait.until, now_ms, inner)
    since = "-" if wait.since is None else age(now_ms - wait.since)
    return [*head, "-", "-", since, _time_left(wait.until, now_ms), "-", "-"]


def waitpoint_cells(
    one: OpenWaitpoint, until: int | None, now_ms: int, length: int | None = None
) -> list[Cell]:
    """Key, signals, since, until, id and token of a waitpoint."""
    return [
        (one.waitpoint_key, "magenta"),
        accepted_signals(one),
        age(now_ms - (one.activated_at or one.created_at)),
        _time_left(one.expires_at if one.state == "pending" else until, now_ms),
        one.waitpoint_id[:length],
        (f"{one.token_kid} {one.token_fingerprint}", "bright_black"),
    ]
