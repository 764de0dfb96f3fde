"""What executions wait for: the table of `flowfabric waiting`, and how waits ended."""

from collections.abc import Sequence

import msgspec

from flowfabric.cli.views.screen import Cell, Row, Screen, id_cell
from flowfabric.cli.views.text import short_length
from flowfabric.core.conditions import OPERATOR
from flowfabric.core.contracts.suspension import OpenWaitpoint, ResumeSignal
from flowfabric.core.text import age, clock, plural
from flowfabric.engine.api.waitpoints import LastWait
from flowfabric.engine.overview import Wait
from flowfabric.sdk.diagnosis import accepted_signals

_OPTIONAL_COLUMNS = ("TOKEN", "WAITPOINT", "SINCE", "LANE", "SIGNALS")
"""Dropped in this order when the terminal is too narrow."""
_ENDINGS = {
    "cancelled": "ended when its execution was cancelled",
    "resumed": "was resumed by an operator",
}


def describe_end(last: LastWait, now_ms: int | None = None) -> str:
    """How a wait ended, and how long ago: what follows "the wait"."""
    ago = ""
    if last.closed_at is not None and now_ms is not None:
        ago = f" {age(now_ms - last.closed_at)} ago"
    if last.answers:
        return f"was answered{ago}: " + ", ".join(_answer(signal) for signal in last.answers)
    reason = last.close_reason
    return ("timed out" if reason.startswith("timed_out") else _ENDINGS.get(reason, reason)) + ago


def _answer(signal: ResumeSignal) -> str:
    by = f" by {signal.source_identity}" if signal.source_identity else ""
    return f"{signal.signal_name}{by}"


def print_question(screen: Screen, wait: Wait | LastWait) -> None:
    """Print what a wait asks, if it says so."""
    if wait.prompt is None and wait.details is None:
        return
    screen.section("Question")
    if wait.prompt is not None:
        screen.block(wait.prompt)
    if wait.details is not None:
        screen.block(msgspec.json.format(msgspec.json.encode(wait.details)).decode())


def signal_row(signal: ResumeSignal) -> Row:
    """What a wait received; a sender that no operator vouches for is marked by its type."""
    vouched = signal.source_type == OPERATOR
    by = [signal.source_identity, "" if vouched else f"({signal.source_type})"]
    return {
        "AT": clock(signal.accepted_at),
        "WAITPOINT": (signal.waitpoint_key, "magenta"),
        "SIGNAL": (signal.signal_name, "bold"),
        "BY": " ".join(filter(None, by)),
    }


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
        screen.note(text)


def print_wait(wait: Wait, last: LastWait | None, now_ms: int) -> None:
    """Print what one execution waits for, or how its last wait ended."""
    screen = Screen()
    if wait.waitpoints:
        _print_table(screen, [wait], now_ms)
        print_question(screen, wait)
        return
    screen.line(
        f"{wait.execution_id.compact} is {wait.public_state.value} and waits for no answer."
    )
    if last is not None and last.closed_at is not None:
        screen.line(f"Its last wait {describe_end(last, now_ms)}.")


def _print_table(screen: Screen, waits: Sequence[Wait], now_ms: int) -> None:
    """Print a row per open waitpoint; a terminal gets short ids."""
    lanes = any(wait.lane_id != "default" for wait in waits)
    asks = any(one.prompt for wait in waits for one in wait.waitpoints)
    id_length = length = None
    if screen.terminal:
        id_length = short_length(wait.execution_id.uuid for wait in waits)
        length = short_length(one.waitpoint_id for wait in waits for one in wait.waitpoints)
    rows: list[Row] = []
    for wait in waits:
        head: Row = {"ID": id_cell(wait.execution_id, id_length), "TASK": wait.execution_kind}
        if lanes:
            head["LANE"] = wait.lane_id
        for one in wait.waitpoints or [None]:
            prompt: Row = {"PROMPT": (one and one.prompt) or "-"} if asks else {}
            rows.append(head | prompt | _cells(wait, one, now_ms, length))
    screen.table(rows, _OPTIONAL_COLUMNS)


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
