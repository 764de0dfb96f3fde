"""What `flowfabric show` prints."""

from collections.abc import Sequence

import msgspec

from flowfabric.cli.views import waits
from flowfabric.cli.views.blobs import Blob
from flowfabric.cli.views.screen import Cell, Row, Screen, id_cell, print_json, state_cell
from flowfabric.cli.views.steps import json_steps, print_steps
from flowfabric.cli.views.text import short_length
from flowfabric.core.contracts.executions import AttemptRecord
from flowfabric.core.contracts.steps import StepPage
from flowfabric.core.policy import NO_POLICY
from flowfabric.core.text import age, clock, duration
from flowfabric.engine.api.events import Event
from flowfabric.engine.flow_overview import Membership
from flowfabric.engine.overview import ExecutionDetail
from flowfabric.sdk.diagnosis import Diagnosis, why_not_running

_ATTEMPT_STYLES = {
    "started": "bold cyan",
    "ended_success": "green",
    "ended_failure": "bold red",
    "ended_cancelled": "bright_black",
    "interrupted_reclaimed": "yellow",
    "suspended": "magenta",
}
_EVENT_FIELDS = {
    "worker_instance_id": "worker",
    "delay_until": "until",
    "revoked_by": "by",
    "requested_by": "by",
}


def print_explanation(found: Diagnosis, *, as_json: bool) -> None:
    """Print the answer, and the commands that would help."""
    if as_json:
        print_json(found)
        return
    screen = Screen()
    screen.line(state_cell(found.public_state), (f" {found.execution_id.compact}", ""))
    screen.prose(found.text)
    for step in found.next_steps:
        screen.line(("  ", ""), (step, "bold"))


def print_detail(detail: ExecutionDetail, steps: StepPage, *, full: bool, as_json: bool) -> None:
    """Print one execution."""
    why, info = why_not_running(detail), detail.execution
    payload = Blob.of(detail.payload, info.payload_encoding, full=full)
    result = Blob.of(detail.result, info.result_encoding, full=full)
    if as_json:
        reason = detail.why_not_running
        changed = {
            "policy": detail.policy.normalised(),
            "payload": payload,
            "result": result,
            "workers_of_lane": None if reason is None else reason.able_workers,
            "summary": why or None,
            "steps": json_steps(steps.steps, full=full),
            "more_steps": steps.next_after_seq is not None,
        }
        print_json(msgspec.structs.asdict(detail) | changed)
        return
    screen = Screen()
    _print_head(screen, detail, why)
    if detail.wait is not None and detail.wait.closed_at is None:
        waits.print_question(screen, detail.wait)
    if detail.membership is not None:
        _print_upstreams(screen, detail.membership)
    _print_waitpoints(screen, detail)
    _print_table(screen, "Signals", [waits.signal_row(one) for one in detail.signals])
    print_steps(screen, steps)
    attempts = [_attempt(one, detail.now_ms) for one in detail.attempts]
    _print_table(screen, "Attempts", attempts, ("TYPE", "TOOK", "WORKER"))
    _print_table(screen, "History", [_event(event) for event in detail.history])
    if info.failure_reason and "\n" in info.failure_reason:
        # The traceback follows the first line.
        screen.section("Failure")
        screen.block(info.failure_reason)
    if detail.tags:
        screen.section("Tags")
        screen.facts(sorted(detail.tags.items()))
    if full or detail.policy != NO_POLICY:
        shown = detail.policy.normalised() if full else detail.policy.to_dict()
        screen.section("Policy" if full else "Policy (without defaults; --full shows all)")
        screen.block(msgspec.json.format(msgspec.json.encode(shown)).decode())
    _print_blob(screen, "Payload", payload)
    _print_blob(screen, "Result", result)


def _print_head(screen: Screen, detail: ExecutionDetail, why: str) -> None:
    info = detail.execution
    screen.line((info.execution_kind, "bold"), "  ", state_cell(info.public_state.value))
    screen.line((info.execution_id.compact, "bright_black"))
    if why:
        screen.line()
        screen.line(("Why it is not running: ", "yellow"), why)
    screen.line()
    screen.facts([(name, cell) for name, cell in _facts(detail).items() if cell])
    vector = info.state_vector
    blocking = [vector.blocking_reason.value, info.blocking_detail]
    screen.section("State")
    screen.facts(
        [
            ("lifecycle", vector.lifecycle_phase.value),
            ("ownership", vector.ownership_state.value),
            ("eligibility", vector.eligibility_state.value),
            ("blocking", ": ".join(filter(None, blocking))),
            ("outcome", vector.terminal_outcome.value),
            ("attempt", vector.attempt_state.value),
        ]
    )


def _facts(detail: ExecutionDetail) -> dict[str, Cell | None]:
    """Everything that `show` may print; None or empty where there is nothing to print."""
    info, now, lease = detail.execution, detail.now_ms, detail.lease
    wait = detail.wait
    started, finished = info.started_at, info.completed_at
    percent = "" if info.progress_pct is None else f"{info.progress_pct}%"
    return {
        "lane": info.lane_id,
        "namespace": info.namespace,
        "priority": str(info.priority),
        "created": _past_time(info.created_at, now),
        "started": started and _past_time(started, now),
        "finished": finished and _past_time(finished, now),
        "took": started and finished and duration(int(finished) - int(started)),
        "delayed until": "" if finished else _future_time(info.delay_until),
        "deadline": _future_time(info.execution_deadline_at),
        "needs": ", ".join(info.required_capabilities),
        "flow": _flow(detail),
        "node": info.node,
        "attempts": str(info.total_attempt_count or ""),
        "retries": str(info.retry_count or ""),
        "replays": str(info.replay_count or ""),
        "reclaims": str(info.lease_reclaim_count or ""),
        "progress": f"{percent} {info.progress_message or ''}".strip(),
        "last wait": waits.describe_end(wait, now) if wait and wait.closed_at else "",
        "failure": info.failure_reason and (_first_line(info.failure_reason), "red"),
        "failure category": info.failure_category,
        "cancellation reason": info.cancellation_reason,
        "cancelled by": info.cancelled_by,
        "worker": lease and lease.worker_instance_id,
        "lease": lease and f"epoch {lease.lease_epoch}, {_time_left(lease.expires_at - now)}",
    }


def _flow(detail: ExecutionDetail) -> str | None:
    place = detail.membership
    if place is None:
        return detail.execution.flow_id
    state = "cancelled" if place.cancelled_at else "held" if place.held else place.derived_state
    return f"{place.flow_id} ({place.flow_kind}, {state})"


def _print_upstreams(screen: Screen, place: Membership) -> None:
    length = short_length(each.execution_id.uuid for each in place.upstreams)
    rows: list[Row] = [
        {
            "NODE": (each.name, "bold"),
            "TASK": each.execution_kind or "-",
            "STATE": state_cell(each.public_state.value) if each.public_state else "deleted",
            "SATISFIED": {"pending": "not yet", "impossible": "never"}.get(each.edge_state, "yes"),
            "BY": {"terminal": "any outcome", "failure_only": "failure"}.get(
                each.dependency_kind, "success"
            ),
            "INPUT": each.input_name or "-",
            "ID": id_cell(each.execution_id, length if screen.terminal else None),
        }
        for each in place.upstreams
    ]
    more = place.upstream_count - len(rows)
    title = f"Upstreams ({place.open_count:,} of {place.upstream_count:,} open)"
    _print_table(screen, title, rows, ("BY", "INPUT"))
    if more:
        screen.line(f"  … and {more:,} more")


def _time_left(ms: int) -> str:
    return f"for another {duration(ms)}" if ms > 0 else f"expired {duration(-ms)} ago"


def _past_time(at_ms: str, now_ms: int) -> str:
    return f"{clock(int(at_ms))} ({age(now_ms - int(at_ms))} ago)"


def _future_time(at_ms: int | None) -> str:
    return "" if at_ms is None else clock(at_ms)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _print_table(screen: Screen, title: str, rows: list[Row], optional: Sequence[str] = ()) -> None:
    if rows:
        screen.section(title)
        screen.table(rows, optional)


def _print_waitpoints(screen: Screen, detail: ExecutionDetail) -> None:
    until = None if detail.wait is None else detail.wait.until
    length = short_length(one.waitpoint_id for one in detail.waitpoints)
    rows = [
        {"KEY": (one.waitpoint_key, "magenta"), "STATE": one.state}
        | waits.signal_cells(one, until, detail.now_ms)
        | {
            "ID": one.waitpoint_id[: length if screen.terminal else None],
            "TOKEN": waits.token_cell(one),
        }
        for one in detail.waitpoints
    ]
    _print_table(screen, "Waitpoints", rows, ("TOKEN", "SINCE"))


def _attempt(attempt: AttemptRecord, now_ms: int) -> Row:
    took = (attempt.ended_at or now_ms) - attempt.started_at
    text = attempt.failure_reason or attempt.reclaim_reason or attempt.replay_reason or ""
    reason, category = _first_line(text), attempt.failure_category
    return {
        "#": str(attempt.attempt_index + 1),
        "TYPE": attempt.attempt_type,
        "STATE": (attempt.attempt_state, _ATTEMPT_STYLES.get(attempt.attempt_state, "")),
        "WORKER": attempt.worker_instance_id,
        "STARTED": clock(attempt.started_at),
        "TOOK": duration(max(0, took)) + ("" if attempt.ended_at else " …"),
        "REASON": f"{reason} ({category})" if category else reason,
    }


def _event(event: Event) -> Row:
    parts: list[str] = [str(event.get("reason", "")), str(event.get("branch", ""))]
    for name, label in _EVENT_FIELDS.items():
        value = event.get(name)
        if value:
            parts.append(f"{label} {clock(value) if name == 'delay_until' else value}")
    return {
        "AT": clock(event.at),
        "EVENT": (event.type, "bold"),
        "DETAIL": ", ".join(filter(None, parts)),
    }


def _print_blob(screen: Screen, title: str, blob: Blob | None) -> None:
    if blob is None:
        return
    kind = blob.encoding or ("text" if blob.form == "text" else "binary")
    more = ", shortened; --full shows all" if blob.truncated else ""
    screen.section(f"{title} ({blob.size:,} bytes, {kind}{more})")
    screen.block(blob.preview + (" …" if blob.truncated else ""))
