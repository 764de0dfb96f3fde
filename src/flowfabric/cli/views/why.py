"""Why an execution is not running, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from flowfabric.cli.views.text import clock, duration
from flowfabric.cli.views.waits import (
    OPERATOR_ONLY,
    TIMEOUT_ONLY,
    describe_waitpoints,
    future_time,
)
from flowfabric.core.contracts.executions import ExecutionInfo, WhyWaiting
from flowfabric.core.state import OwnershipState, PublicState
from flowfabric.engine.overview import ExecutionDetail

_TIMED = {
    "waiting_for_retry_backoff": "the last attempt failed; the next one starts",
    "waiting_for_resume_delay": "the handler asked for a delay; it resumes",
    "waiting_for_delay": "it was submitted with a delay; it starts",
}


def why_not_running(detail: ExecutionDetail) -> str:
    """What it waits for and how to help; empty if it runs or has finished."""
    why = detail.why_not_running
    if why is None:
        return ""
    if detail.execution.public_state is PublicState.ACTIVE:
        return _active(detail)
    if detail.execution.public_state is PublicState.SUSPENDED:
        return _suspended(detail)
    return _waiting(detail, why)


def _waiting(detail: ExecutionDetail, why: WhyWaiting) -> str:
    info = detail.execution
    if why.lane_state != "active":
        return f"lane {info.lane_id} is {why.lane_state}: none of its executions start"
    timed = _TIMED.get(why.blocking_reason)
    if timed is not None and why.retry_at is not None:
        return f"{timed} {_start_time(why.retry_at, detail.now_ms)}"
    if why.unresolved_edges:
        return f"it depends on {why.unresolved_edges} executions that have not finished"
    if why.blocking_reason == "waiting_for_worker" or why.missing_capabilities:
        return _for_worker(info, why, why.able_workers)
    return _blocking_reason(why)


def _active(detail: ExecutionDetail) -> str:
    lease = detail.lease
    vector = detail.execution.state_vector
    worker = lease.worker_instance_id if lease is not None else "its worker"
    if vector.ownership_state is OwnershipState.LEASE_REVOKED:
        return f"the lease of {worker} was revoked; the next free worker takes it over"
    if not detail.running:
        return f"{worker} stopped renewing its lease; the next free worker takes it over"
    return ""


def _suspended(detail: ExecutionDetail) -> str:
    active = [one for one in detail.waitpoints if one.state == "active"]
    for_what = describe_waitpoints(active) or "an answer"
    limit = detail.wait.until if detail.wait is not None else None
    until = "" if limit is None else f", until {future_time(limit, detail.now_ms)}"
    names = {name for one in active for name in one.required_signal_names}
    if TIMEOUT_ONLY in names:
        return f"it sleeps{until}"
    uuid = detail.execution.execution_id.uuid
    if OPERATOR_ONLY in names:
        return f"it waits for an operator{until}: `flowfabric approve {uuid}` resumes it"
    which = "" if len(active) == 1 else " WAITPOINT"
    return f"it waits for {for_what}{until}: answer with `flowfabric approve {uuid}{which}`"


def _start_time(at_ms: int, now_ms: int) -> str:
    left = at_ms - now_ms
    return f"at {clock(at_ms)} (in {duration(left)})" if left > 0 else "any moment now"


def _for_worker(info: ExecutionInfo, why: WhyWaiting, able_workers: Sequence[str]) -> str:
    lane = info.lane_id
    needs = ", ".join(each for each in info.required_capabilities)
    option = needs.replace(" ", "")
    if able_workers:
        return f"{_workers_serve(len(able_workers))} lane {lane}; it starts as soon as one is free"
    if why.live_workers and why.missing_capabilities:
        lacks = ", ".join(each for each in why.missing_capabilities)
        return (
            f"{_workers_serve(why.live_workers)} lane {lane}, but the nearest lacks {lacks}: "
            f"start one with `flowfabric worker module:app --capabilities {option}`"
        )
    if needs:
        return (
            f"no live worker serves lane {lane} and offers {needs}: "
            f"start one with `flowfabric worker module:app --capabilities {option}`"
        )
    return (
        f"no live worker serves lane {lane}: start one with "
        f"`flowfabric worker module:app --lanes {lane}`"
    )


def _workers_serve(workers: int) -> str:
    return "1 live worker serves" if workers == 1 else f"{workers} live workers serve"


def _blocking_reason(why: WhyWaiting) -> str:
    reason = why.blocking_reason.replace("_", " ")
    return f"{reason}: {why.blocking_detail}" if why.blocking_detail else reason
