"""How attempts end without a result: failed, timed out, released or lost."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Literal, cast

import msgspec

from flowfabric.core.contracts.executions import RetryScheduled
from flowfabric.core.errors import EngineError, FlowFabricError, LeaseLost, ValidationError
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.backend import Backend
from flowfabric.sdk.failures import HandlerFailure, describe
from flowfabric.sdk.lease_keeper import CANCELLED, RELEASED, TERMINAL_CODES, is_cancelled
from flowfabric.sdk.scanner_thread import ScannerThread
from flowfabric.sdk.task import ClaimedTask, Parked

log = logging.getLogger(__name__)

OnShutdown = Literal["release", "fail"]

_UNKNOWN_PAUSE_MS = 1_000
_EXPIRE_TRIES = 50
_EXPIRE_PAUSE_S = 0.01

_COUNTED_AS = {
    "complete": "completed",
    "fail": "failed",
    "cancel": "failed",
    "delay": "released",
    "wait_children": "released",
    "suspend": "released",
}


class RunSummary(msgspec.Struct):
    """What a run of the worker did."""

    completed: int = 0
    failed: int = 0
    """Ended without success: failed for good, expired or cancelled by its handler."""
    retried: int = 0
    """Attempts that failed and will be repeated."""
    released: int = 0
    """Attempts that were given back and resume later, here or elsewhere."""
    abandoned: int = 0
    """Attempts whose end was not accepted, or is not known to be."""


class Endings:
    """Ends attempts that have no result, and counts how all of them ended."""

    def __init__(
        self,
        backend: Backend,
        scanners: ScannerThread | None,
        *,
        on_unknown_kind: Literal["fail", "release"],
        leaving: Callable[[], bool],
    ) -> None:
        self.summary = RunSummary()
        self.on_shutdown: OnShutdown = "release"
        self._backend = backend
        self._scanners = scanners
        self._on_unknown = on_unknown_kind
        self._leaving = leaving
        """Whether the worker itself cancels its handlers."""

    def count(self, finished_by: str) -> None:
        """Count a task that its handler ended."""
        counter = _COUNTED_AS.get(finished_by)
        if counter is not None:
            setattr(self.summary, counter, getattr(self.summary, counter) + 1)

    async def unknown(self, task: ClaimedTask) -> None:
        """Fail an attempt whose kind has no handler, or leave it to another worker."""
        reason = f"no handler is registered for kind {task.execution_kind!r}"
        if self._on_unknown == "fail":
            await self.fail(task, HandlerFailure(reason, "runtime_no_handler"))
            return
        try:
            # After a pause, or this worker would claim it again at once.
            delay_until = await self._backend.meta.server_time_ms() + _UNKNOWN_PAUSE_MS
        except EngineError as error:
            self.abandon(task, error)
            return
        await self._release(task, delay_until, reason)

    async def _release(self, task: ClaimedTask, delay_until: int, reason: str) -> None:
        try:
            await task.delay_execution(delay_until)
        except FlowFabricError as error:
            self.abandon(task, error)
            return
        self.summary.released += 1
        log_task(logging.INFO, "task_released", task, f"released: {reason}")

    async def fail(self, task: ClaimedTask, error: BaseException) -> None:
        """Store what the handler raised; the stored policy decides on a retry."""
        failure = describe(error)
        if task.finished_by is not None:
            # The handler ended its task and then raised: its own call stands.
            if not _has_parked(error):
                text = f"raised after it had ended: {failure.log_message}"
                log_task(logging.ERROR, "late_failure", task, text, failure.exc_info)
            self.count(task.finished_by)
            return
        text = f"failed: {failure.log_message}"
        log_task(logging.WARNING, "task_failed", task, text, failure.exc_info)
        await self._settle_cancellation()
        try:
            outcome = await task.fail(failure.report, failure.category)
        except FlowFabricError as problem:
            self.abandon(task, problem)
            return
        if isinstance(outcome, RetryScheduled):
            self.summary.retried += 1
            self._hint(task, outcome.delay_until)
        else:
            self.summary.failed += 1

    def _hint(self, task: ClaimedTask, due_ms: int) -> None:
        """Have the retry promoted at its exact time."""
        if self._scanners is not None:
            self._scanners.hint(task.lane_id, task.execution_id.tag, task.execution_id, due_ms)

    async def _settle_cancellation(self) -> None:
        """Keep a handler that cancelled its own task from cancelling the report of its failure."""
        current = asyncio.current_task()
        if current is not None and current.cancelling() and not self._leaving():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    async def refuse(self, task: ClaimedTask, error: ValidationError) -> None:
        """Fail an attempt whose result is too large; a retry would return the same."""
        await self.fail(task, HandlerFailure(f"the result was refused: {error}", "permanent"))

    async def timed_out(self, task: ClaimedTask) -> None:
        """End an attempt whose handler was stopped at its timeout."""
        if task.finished_by is not None:
            return
        try:
            answer = await self._expire(task)
        except EngineError as error:
            # The attempt timeout scanner ends it.
            self.abandon(task, error)
            return
        if answer == "retry_scheduled":
            self.summary.retried += 1
            await self._hint_retry(task)
        elif answer in ("expired", "failed"):
            self.summary.failed += 1
        else:
            self.abandon(task, RuntimeError(f"attempt timeout: {answer}"))
        task.finish("attempt_timeout")

    async def _hint_retry(self, task: ClaimedTask) -> None:
        # Without the hint, the retry only starts later.
        with contextlib.suppress(EngineError):
            retried = await self._backend.reads.read_execution_info(task.execution_id)
            if retried.delay_until is not None:
                self._hint(task, retried.delay_until)

    async def _expire(self, task: ClaimedTask) -> str:
        """What became of the attempt; a scanner may have ended it first."""
        backend, answer = self._backend, "not_yet_due"
        for _ in range(_EXPIRE_TRIES):
            (answer,) = await backend.upkeep.expire_execution(
                task.execution_id.tag, ExpireReason.ATTEMPT_TIMEOUT, [str(task.execution_id)]
            )
            if answer != "not_yet_due" or not task.may_hold_lease:
                break
            (ours,) = await backend.leases.renew_many([task.handle])
            if isinstance(ours, EngineError) and ours.code in TERMINAL_CODES:
                return "retry_scheduled"
            await asyncio.sleep(_EXPIRE_PAUSE_S)
        if answer == "already_terminal":
            ended = await backend.reads.read_execution_info(task.execution_id)
            return "expired" if ended.failure_category == "timeout" else answer
        return answer

    async def hand_over(self, task: ClaimedTask) -> None:
        """Release an attempt because the worker stops, or fail it if the run asks for that."""
        if self.on_shutdown == "fail":
            reason = HandlerFailure("the worker is shutting down", "worker_shutdown")
            await self.fail(task, reason)
        else:
            await self._release(task, 1, "the worker is stopping")

    def abandon(self, task: ClaimedTask, error: BaseException) -> None:
        """Give up a task whose end the engine did not accept, or may not have."""
        if task.lease_lost is not None and task.lease_lost.reason == RELEASED:
            # Logged when the loop was found blocked.
            self.summary.released += 1
            task.finish("released")
            return
        if _was_cancelled(error):
            text = "stopped: the execution was cancelled"
            log_task(logging.DEBUG, "task_abandoned", task, text)
        else:
            text = f"ended, but the engine did not accept it: {error}"
            log_task(logging.ERROR, "task_abandoned", task, text)
        self.summary.abandoned += 1
        task.finish("abandoned")


def log_task(
    level: int, action: str, task: ClaimedTask, text: str, cause: BaseException | None = None
) -> None:
    """Log one event of a task."""
    extra = {"action": action, "execution_id": task.execution_id}
    log.log(
        level, "%s %s %s", task.execution_kind, task.execution_id, text, exc_info=cause, extra=extra
    )


def _was_cancelled(error: BaseException) -> bool:
    if isinstance(error, LeaseLost):
        return error.reason == CANCELLED
    return isinstance(error, EngineError) and is_cancelled(error)


def _has_parked(error: BaseException) -> bool:
    """Whether this is how a wait inside a task group unwinds."""
    # The type alone: `__class__` may be user code that raises.
    if issubclass(type(error), BaseExceptionGroup):
        inside = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return any(_has_parked(one) for one in inside)
    return issubclass(type(error), Parked)
