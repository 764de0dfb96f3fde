"""What a worker logs: one line per event of a task, and lines that ignore the log level."""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flowfabric.core.text import duration, plural

if TYPE_CHECKING:
    from flowfabric.sdk.attempt import HeldAttempt

log = logging.getLogger(__name__)

_MAX_KINDS = 5


def log_task(
    level: int,
    action: str,
    task: "HeldAttempt",
    text: str,
    *notes: str,
    cause: BaseException | None = None,
) -> None:
    """Log one event: `resize 86-9109abcd… succeeded (attempt 1, 42 ms)`."""
    if not log.isEnabledFor(level):
        return
    ms = round((time.monotonic() - task.since) * 1000)
    about = ", ".join((f"attempt {task.attempt_index + 1}", duration(ms), *notes))
    extra = {"action": action, **task.log_fields, "duration_ms": ms}
    if cause is not None and level < logging.ERROR:
        # Keep the text to one line. The attempt and the record's fields have the traceback.
        extra["exception"], cause = "".join(traceback.format_exception(cause)).rstrip(), None
    name, short = task.execution_kind, task.execution_id.short
    log.log(level, "%s %s %s (%s)", name, short, text, about, exc_info=cause, extra=extra)


def count_by_kind(tasks: Iterable["HeldAttempt"]) -> str:
    """The number of tasks by name: `3 tasks (resize ×2, deploy ×1)`."""
    names = Counter(task.execution_kind for task in tasks).most_common()
    parts = [f"{name} ×{count}" for name, count in names[:_MAX_KINDS]]
    if (more := len(names) - _MAX_KINDS) > 0:
        parts.append(f"{more} more")
    return f"{plural(sum(count for _, count in names), 'task')} ({', '.join(parts)})"


def log_always(level: int, text: str, **fields: object) -> None:
    """Log whatever the level: an operator who stops a worker waits for these lines."""
    record = log.makeRecord(log.name, level, __file__, 0, text, (), None, extra=fields)
    log.handle(record)


def log_normally(level: int, text: str, **fields: object) -> None:
    """Log if the level is enabled; same signature as `log_always`."""
    log.log(level, text, extra=fields)
