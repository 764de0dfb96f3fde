"""Finds out that the worker's event loop is blocked, and by which task."""

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextvars import Context, ContextVar
from typing import Any

from flowfabric.sdk.lease_keeper import HeldLease
from flowfabric.sdk.task import ClaimedTask

log = logging.getLogger(__name__)

handled: ContextVar[ClaimedTask | None] = ContextVar("handled", default=None)
"""The task whose handler runs; also in every asyncio task that the handler starts."""

_WARN_S = 3.0
_FRAMES = 12
_CLAIMS_NOTHING = "This worker claims nothing until the loop runs again."
_ADVICE = (
    "no other task of this worker can run. "
    "Declare the task with `def`, or call blocking code with asyncio.to_thread()."
)


class LoopWatch:
    """Watches the loop that creates it; the lease keeper asks, from its own thread."""

    def __init__(self, limit_s: float, longest_step_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._limit_s = limit_s
        self._warn_s = min(_WARN_S, limit_s / 3)
        self._longest_step_s = longest_step_s
        self._answered = True
        self._asked_at = 0.0
        self._blocked_s = 0.0
        self._warned = False

    def stuck(self, leases: Iterable[HeldLease]) -> list[HeldLease]:
        """The leases to give up: at once those whose attempt timed out, all after the limit.

        The blocking task keeps its own.
        """
        if not self._still_blocked():
            return []
        now = time.monotonic()
        over = self._blocked_s >= self._limit_s
        due = [held for held in leases if not held.leaving and (over or now >= held.times_out_at)]
        current = asyncio.current_task(self._loop)
        blocker = None if current is None else _context_of(current).get(handled)
        stuck = [held for held in due if blocker is None or held is not blocker.held]
        if stuck:
            consequence = f"releasing {len(stuck)} other executions. {_CLAIMS_NOTHING}"
            self._tell(logging.CRITICAL, blocker, consequence)
        elif self._blocked_s < self._warn_s:
            return []
        elif not self._warned:
            self._tell(logging.WARNING, blocker, _ADVICE)
        self._warned = True
        return stuck

    def _still_blocked(self) -> bool:
        now = time.monotonic()
        if self._answered:
            if self._warned:
                _log(logging.WARNING, f"The event loop runs again after {self._blocked_s:.0f} s.")
            self._answered = self._warned = False
            self._blocked_s = 0.0
            # The loop is closed when the worker was dropped.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answer)
        else:
            # A process that was stopped as a whole did not block its loop.
            self._blocked_s += min(now - self._asked_at, self._longest_step_s)
        self._asked_at = now
        return self._blocked_s > 0

    def _answer(self) -> None:
        self._answered = True

    def _tell(self, level: int, blocker: ClaimedTask | None, consequence: str) -> None:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - it is documented
        stack = "".join(traceback.format_stack(frame, _FRAMES)).rstrip()
        who, extra = "Code outside any task", {"action": "loop_blocked"}
        if blocker is not None:
            who = f"{blocker.execution_kind} {blocker.execution_id}"
            extra["execution_id"] = blocker.execution_id
        text = f"{who} has blocked the event loop for {self._blocked_s:.0f} s: {consequence}"
        _log(level, text, stack=stack, extra=extra)


def _log(level: int, text: str, stack: str | None = None, **more: Any) -> None:
    if not log.isEnabledFor(level):
        return
    record = log.makeRecord(log.name, level, __file__, 0, text, (), None, sinfo=stack, **more)
    # On a thread of its own: what blocks the loop may be a log handler that holds its lock.
    threading.Thread(target=log.handle, args=(record,), name="ff-loop-watch", daemon=True).start()


def _context_of(task: asyncio.Task[Any]) -> Context:
    if sys.version_info >= (3, 12):
        return task.get_context()
    # Python 3.11 keeps it, but has no name for it.
    return next((one for one in gc.get_referents(task) if isinstance(one, Context)), Context())
