"""Waits and answers in words."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.cli.waiting_read import LastWait
from flowfabric.cli.words import age, clean, clock, duration
from flowfabric.core.contracts.suspension import OpenWaitpoint, ResumeSignal

__all__ = ["OPERATOR_ONLY", "TIMEOUT_ONLY", "asked", "ended", "moment", "until", "wanted"]

OPERATOR_ONLY = "__operator_only__"
TIMEOUT_ONLY = "__timeout_only__"
_SPECIAL = {OPERATOR_ONLY: "an operator", TIMEOUT_ONLY: "nothing but time"}
_ENDINGS = {
    "cancelled": "was cancelled with its execution",
    "timed_out_fail": "timed out",
    "timed_out_cancel": "timed out",
    "timed_out_expire": "timed out",
    "timed_out_auto_resume": "timed out",
}


def wanted(waitpoint: OpenWaitpoint) -> str:
    """Which signals would do."""
    names = waitpoint.required_signal_names
    if waitpoint.state == "pending":
        return "not asked yet"
    if not names:
        return "any signal"
    return ", ".join(_SPECIAL.get(name, clean(name)) for name in names)


def asked(waitpoints: Sequence[OpenWaitpoint]) -> str:
    """Everything that is waited for, in one phrase."""
    return "; ".join(f"{clean(one.waitpoint_key)} ({wanted(one)})" for one in waitpoints)


def until(at_ms: int | None, now_ms: int) -> str:
    """When a wait ends by itself."""
    if at_ms is None:
        return "-"
    return f"in {age(at_ms - now_ms)}" if at_ms > now_ms else "now due"


def moment(at_ms: int, now_ms: int) -> str:
    """A time to come, and how far away it is."""
    left = at_ms - now_ms
    return f"{clock(at_ms)} (in {duration(left)})" if left > 0 else f"{clock(at_ms)} (due)"


def ended(last: LastWait, now_ms: int) -> str:
    """How a wait ended, for somebody who comes too late to answer it."""
    ago = "" if last.closed_at is None else f" {age(now_ms - last.closed_at)} ago"
    if last.answers:
        return f"was answered{ago}: " + ", ".join(_answer(signal) for signal in last.answers)
    if last.close_reason == "resumed":
        return f"was ended by an operator{ago}"
    return f"{_ENDINGS.get(last.close_reason, clean(last.close_reason))}{ago}"


def _answer(signal: ResumeSignal) -> str:
    by = f" by {clean(signal.source_identity)}" if signal.source_identity else ""
    return f"{clean(signal.signal_name)}{by}"
