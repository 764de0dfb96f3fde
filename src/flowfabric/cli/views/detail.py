"""What `flowfabric show` prints."""

from __future__ import annotations

import msgspec

from flowfabric.cli.views.screen import Cell, Screen, print_json, state_style
from flowfabric.cli.views.text import age, clock, duration, preview
from flowfabric.cli.views.waits import waitpoint_cells
from flowfabric.cli.views.why import why_not_running
from flowfabric.core.contracts.executions import AttemptRecord, ExecutionInfo
from flowfabric.core.policy import NO_POLICY
from flowfabric.engine.api.events import Event
from flowfabric.engine.overview import ExecutionDetail

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
_END_FIELDS = ("failure_category", "cancellation_reason", "cancelled_by")
_PREVIEW = 400


class Blob(msgspec.Struct, frozen=True):
    """A payload or result: as text if it is UTF-8, otherwise as hex."""

    size: int
    encoding: str
    form: str
    preview: str
    truncated: bool

    @classmethod
    def of(cls, data: bytes | None, encoding: str, *, full: bool) -> Blob | None:
        """The bytes, shortened unless `full`."""
        if data is None:
            return None
        shown, form, truncated = preview(data, None if full else _PREVIEW)
        return cls(len(data), encoding, form, shown, truncated)


def print_detail(detail: ExecutionDetail, *, full: bool, as_json: bool) -> None:
    """Print one execution."""
    why, info = why_not_running(detail), detail.execution
    payload = Blob.of(detail.payload, info.payload_encoding, full=full)
    result = Blob.of(detail.result, info.result_encoding, full=full)
    if as_json:
        reason = detail.why_not_running
        print_json(
            msgspec.structs.asdict(detail)
            | {
                "policy": detail.policy.normalised(),
                "payload": payload,
                "result": result,
                "workers_of_lane": None if reason is None else reason.able_workers,
                "summary": why or None,
            }
        )
        return
    screen = Screen()
    _head(screen, detail, why)
    _waitpoints(screen, detail)
    _attempts(screen, detail)
    _history(screen, detail)
    _failure(screen, info)
    _extras(screen, detail, full=full)
    _blob(screen, "Payload", payload)
    _blob(screen, "Result", result)


def _head(screen: Screen, detail: ExecutionDetail, why: str) -> None:
    info = detail.execution
    state = info.public_state.value
    screen.line((info.execution_kind, "bold"), "  ", (state, state_style(state)))
    screen.line((str(info.execution_id), "bright_black"))
    if why:
        screen.line()
        screen.line(("Why it is not running: ", "yellow"), why)
    screen.line()
    screen.facts(_facts(detail))
    vector = info.state_vector
    screen.section("State")
    screen.facts(
        [
            ("lifecycle", vector.lifecycle_phase.value),
            ("ownership", vector.ownership_state.value),
            ("eligibility", vector.eligibility_state.value),
            ("blocking", _joined(vector.blocking_reason.value, info.blocking_detail)),
            ("outcome", vector.terminal_outcome.value),
            ("attempt", vector.attempt_state.value),
        ]
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _facts(detail: ExecutionDetail) -> list[tuple[str, Cell]]:
    info, now = detail.execution, detail.now_ms
    facts: list[tuple[str, Cell]] = [
        ("lane", info.lane_id),
        ("namespace", info.namespace),
        ("priority", str(info.priority)),
        ("created", _past_time(int(info.created_at), now)),
    ]
    if info.started_at is not None:
        facts.append(("started", _past_time(int(info.started_at), now)))
    if info.completed_at is not None:
        facts.append(("finished", _past_time(int(info.completed_at), now)))
        if info.started_at is not None:
            took = int(info.completed_at) - int(info.started_at)
            facts.append(("took", duration(took)))
    if info.delay_until is not None and info.completed_at is None:
        facts.append(("delayed until", clock(info.delay_until)))
    if info.execution_deadline_at is not None:
        facts.append(("deadline", clock(info.execution_deadline_at)))
    if info.required_capabilities:
        facts.append(("needs", ", ".join(each for each in info.required_capabilities)))
    if info.flow_id is not None:
        facts.append(("flow", info.flow_id))
    return facts + _progress(info) + _lease(detail)


def _progress(info: ExecutionInfo) -> list[tuple[str, Cell]]:
    """Counts, progress, and how it ended."""
    counts = {
        "attempts": info.total_attempt_count,
        "retries": info.retry_count,
        "replays": info.replay_count,
        "reclaims": info.lease_reclaim_count,
    }
    facts: list[tuple[str, Cell]] = [(name, str(n)) for name, n in counts.items() if n]
    if info.progress_pct is not None or info.progress_message:
        percent = "" if info.progress_pct is None else f"{info.progress_pct}%"
        facts.append(("progress", f"{percent} {info.progress_message or ''}".strip()))
    if info.failure_reason:
        facts.append(("failure", (_first_line(info.failure_reason), "red")))
    for name in _END_FIELDS:
        value: str | None = getattr(info, name)
        if value:
            facts.append((name.replace("_", " "), value))
    return facts


def _lease(detail: ExecutionDetail) -> list[tuple[str, Cell]]:
    lease = detail.lease
    if lease is None:
        return []
    left = lease.expires_at - detail.now_ms
    held = f"for another {duration(left)}" if left > 0 else f"expired {duration(-left)} ago"
    worker = lease.worker_instance_id
    return [("worker", worker), ("lease", f"epoch {lease.lease_epoch}, {held}")]


def _past_time(at_ms: int, now_ms: int) -> str:
    return f"{clock(at_ms)} ({age(now_ms - at_ms)} ago)"


def _waitpoints(screen: Screen, detail: ExecutionDetail) -> None:
    if not detail.waitpoints:
        return
    screen.section("Waitpoints")
    headers = ["KEY", "STATE", "SIGNALS", "SINCE", "UNTIL", "ID", "TOKEN"]
    limit = detail.wait.until if detail.wait is not None else None
    rows = [waitpoint_cells(one, limit, detail.now_ms) for one in detail.waitpoints]
    for row, one in zip(rows, detail.waitpoints, strict=True):
        row.insert(1, one.state)
    screen.table(headers, rows)


def _attempts(screen: Screen, detail: ExecutionDetail) -> None:
    if not detail.attempts:
        return
    screen.section("Attempts")
    headers = ["#", "TYPE", "STATE", "WORKER", "STARTED", "TOOK", "REASON"]
    screen.table(headers, [_attempt(attempt, detail.now_ms) for attempt in detail.attempts])


def _attempt(attempt: AttemptRecord, now_ms: int) -> list[Cell]:
    took = (attempt.ended_at or now_ms) - attempt.started_at
    text = attempt.failure_reason or attempt.reclaim_reason or attempt.replay_reason or ""
    reason, category = _first_line(text), attempt.failure_category
    return [
        str(attempt.attempt_index + 1),
        attempt.attempt_type,
        (attempt.attempt_state, _ATTEMPT_STYLES.get(attempt.attempt_state, "")),
        attempt.worker_instance_id,
        clock(attempt.started_at),
        duration(max(0, took)) + ("" if attempt.ended_at else " …"),
        f"{reason} ({category})" if category else reason,
    ]


def _history(screen: Screen, detail: ExecutionDetail) -> None:
    if not detail.history:
        return
    screen.section("History")
    rows: list[list[Cell]] = [
        [clock(event.at), (event.type, "bold"), _event_detail(event)] for event in detail.history
    ]
    screen.table(["AT", "EVENT", "DETAIL"], rows)


def _event_detail(event: Event) -> str:
    parts: list[str] = [str(event.get("reason", "")), str(event.get("branch", ""))]
    for name, label in _EVENT_FIELDS.items():
        value = event.get(name)
        if value:
            parts.append(f"{label} {clock(value) if name == 'delay_until' else value}")
    return ", ".join(part for part in parts if part)


def _failure(screen: Screen, info: ExecutionInfo) -> None:
    """Print the traceback, which follows the first line of the reason."""
    if info.failure_reason and "\n" in info.failure_reason:
        screen.section("Failure")
        screen.block(info.failure_reason)


def _extras(screen: Screen, detail: ExecutionDetail, *, full: bool) -> None:
    if detail.tags:
        screen.section("Tags")
        screen.facts([(key, value) for key, value in sorted(detail.tags.items())])
    if full or detail.policy != NO_POLICY:
        shown = detail.policy.normalised() if full else detail.policy.to_dict()
        screen.section("Policy" if full else "Policy (without defaults; --full shows all)")
        screen.block(msgspec.json.format(msgspec.json.encode(shown)).decode())


def _blob(screen: Screen, title: str, blob: Blob | None) -> None:
    if blob is None:
        return
    kind = blob.encoding or ("text" if blob.form == "text" else "binary")
    more = ", cut; --full shows all" if blob.truncated else ""
    screen.section(f"{title} ({blob.size:,} bytes, {kind}{more})")
    screen.block(blob.preview + (" …" if blob.truncated else ""))
