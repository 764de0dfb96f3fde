"""The recorded steps that `flowfabric show` prints."""

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.cli.views.blobs import Blob
from flowfabric.cli.views.screen import Row, Screen
from flowfabric.cli.views.text import preview
from flowfabric.core.contracts.steps import StepPage, StepRecord
from flowfabric.core.text import clock, duration

_STYLES = {"done": "green", "failed": "bold red", "pending": "yellow"}
_PREVIEW = 60


def json_steps(steps: Sequence[StepRecord], *, full: bool) -> list[dict[str, Any]]:
    """The records with their results as payloads are shown."""
    return [
        msgspec.structs.asdict(each) | {"result": Blob.of(each.result, each.codec, full=full)}
        for each in steps
    ]


def print_steps(screen: Screen, page: StepPage) -> None:
    """Print one line per step."""
    if not page.steps:
        return
    more = "" if page.next_after_seq is None else " (the first ones; --full shows all)"
    screen.section(f"Steps{more}")
    screen.table([_step(each) for each in page.steps], ("ATTEMPT", "KIND", "TOOK"))


def _step(step: StepRecord) -> Row:
    took = "" if step.finished_at is None else duration(step.finished_at - step.started_at)
    return {
        "#": str(step.seq),
        "STEP": (step.step_key, "bold"),
        "KIND": step.kind,
        "STATUS": (step.status, _STYLES.get(step.status, "")),
        "ATTEMPT": str(step.attempt_index + 1),
        "STARTED": clock(step.started_at),
        "TOOK": took,
        "DETAIL": _detail(step),
    }


def _detail(step: StepRecord) -> str:
    if step.error is not None:
        reason, category = step.error.reason.partition("\n")[0], step.error.category
        return f"{reason} ({category})" if category else reason
    if step.result is not None:
        shown, _, truncated = preview(step.result, _PREVIEW)
        return shown + (" …" if truncated else "")
    if step.child_execution_id is not None:
        return step.child_execution_id.compact
    return f"due {clock(step.fire_at)}" if step.fire_at is not None else ""
