"""Why an execution is not running, in a sentence."""

from __future__ import annotations

from flowfabric.cli.detail import Detail
from flowfabric.cli.waiting_words import OPERATOR_ONLY, TIMEOUT_ONLY, asked, moment
from flowfabric.cli.words import clean, clock, duration
from flowfabric.core.contracts.executions import ExecutionInfo, WhyWaiting
from flowfabric.core.state import OwnershipState, PublicState

__all__ = ["sentence"]

_TIMED = {
    "waiting_for_retry_backoff": "the last attempt failed; the next one may start",
    "waiting_for_resume_delay": "the handler asked for a pause; it goes on",
    "waiting_for_delay": "it was submitted for later; it may start",
}


def sentence(detail: Detail) -> str:
    """What it waits for and, where a person can help, how; empty when it runs or has ended."""
    why = detail.why_not_running
    if why is None:
        return ""
    if detail.execution.public_state is PublicState.ACTIVE:
        return _active(detail)
    if detail.execution.public_state is PublicState.SUSPENDED:
        return _suspended(detail)
    return _waiting(detail, why)


def _waiting(detail: Detail, why: WhyWaiting) -> str:
    info = detail.execution
    if why.lane_state != "active":
        return f"lane {clean(info.lane_id)} is {why.lane_state}: nothing in it starts"
    timed = _TIMED.get(why.blocking_reason)
    if timed is not None and why.retry_at is not None:
        return f"{timed} {_when(why.retry_at, detail.now_ms)}"
    if why.unresolved_edges:
        return f"it waits for {why.unresolved_edges} executions that it depends on"
    if why.blocking_reason == "waiting_for_worker" or why.missing_capabilities:
        return _for_worker(info, why, detail.workers_of_lane or [])
    return _other(why)


def _active(detail: Detail) -> str:
    lease = detail.lease
    vector = detail.execution.state_vector
    worker = clean(lease.worker_instance_id) if lease is not None else "its worker"
    if vector.ownership_state is OwnershipState.LEASE_REVOKED:
        return f"the lease of {worker} was revoked; the next free worker takes it over"
    if not detail.running:
        return f"{worker} stopped renewing its lease; the next free worker takes it over"
    return ""


def _suspended(detail: Detail) -> str:
    active = [one for one in detail.waitpoints if one.state == "active"]
    for_what = asked(active) or "an answer"
    limit = detail.wait.until if detail.wait is not None else None
    until = "" if limit is None else f", until {moment(limit, detail.now_ms)}"
    names = {name for one in active for name in one.required_signal_names}
    if TIMEOUT_ONLY in names:
        return f"it pauses{until}"
    uuid = detail.execution.execution_id.uuid
    if OPERATOR_ONLY in names:
        return f"it waits for an operator{until}: `flowfabric approve {uuid}` lets it go on"
    which = "" if len(active) == 1 else " WAITPOINT"
    return f"it waits for {for_what}{until}: `flowfabric approve {uuid}{which}` answers"


def _when(at_ms: int, now_ms: int) -> str:
    left = at_ms - now_ms
    return f"at {clock(at_ms)} (in {duration(left)})" if left > 0 else "any moment now"


def _for_worker(info: ExecutionInfo, why: WhyWaiting, takers: list[str]) -> str:
    lane = clean(info.lane_id)
    needs = ", ".join(clean(each) for each in info.required_capabilities)
    asked_for = needs.replace(" ", "")
    if takers:
        return f"{_count(len(takers))} lane {lane}; it starts as soon as one is free"
    if why.live_workers and why.missing_capabilities:
        lacks = ", ".join(clean(each) for each in why.missing_capabilities)
        return (
            f"{_count(why.live_workers)} lane {lane}, but the nearest lacks {lacks}: "
            f"start one with `flowfabric worker module:app --capabilities {asked_for}`"
        )
    if needs:
        return (
            f"no live worker serves lane {lane} and offers {needs}: "
            f"start one with `flowfabric worker module:app --capabilities {asked_for}`"
        )
    return (
        f"no live worker serves lane {lane}: start one with "
        f"`flowfabric worker module:app --lanes {lane}`"
    )


def _count(workers: int) -> str:
    return "1 live worker serves" if workers == 1 else f"{workers} live workers serve"


def _other(why: WhyWaiting) -> str:
    reason = why.blocking_reason.replace("_", " ")
    return f"{reason}: {clean(why.blocking_detail)}" if why.blocking_detail else reason
