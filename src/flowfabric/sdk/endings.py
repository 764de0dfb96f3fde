"""How attempts end: with a result, failed, timed out, released or lost."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Literal, cast

import msgspec

from flowfabric.core import errors
from flowfabric.core.contracts.executions import FailOutcome, RetryScheduled
from flowfabric.core.state import ExpireReason
from flowfabric.core.text import duration
from flowfabric.engine.api.executions import Completion, End, FailedAttempt
from flowfabric.sdk.failures import FailureDescription, HandlerFailure, describe
from flowfabric.sdk.lease_keeper import CANCELLED, ENDINGS, RELEASED, TERMINAL_CODES, how_it_ended
from flowfabric.sdk.logs import log_task
from flowfabric.sdk.scanner_thread import ScannerThread
from flowfabric.sdk.task import ClaimedTask, Parked
from flowfabric.sdk.worker import Worker

log = logging.getLogger(__name__)

FailOrRelease = Literal["fail", "release"]
Encoded = tuple[bytes, str]
"""Result bytes and their encoding label."""

_EXPIRE_TRIES = 50
_EXPIRE_PAUSE_S = 0.01


class RunSummary(msgspec.Struct):
    """What a run of the worker did."""

    completed: int = 0
    failed: int = 0
    """Ended without success: failed for good or expired."""
    retried: int = 0
    """Attempts that failed and will be repeated."""
    released: int = 0
    """Attempts that were released and will resume later, on any worker."""
    cancelled: int = 0
    """Attempts that ended because their execution was cancelled."""
    abandoned: int = 0
    """Attempts whose end the engine did not accept, or may not have."""

    def __str__(self) -> str:
        """`12 completed, 1 failed`."""
        counts = msgspec.structs.asdict(self).items()
        return ", ".join(f"{count:,} {name}" for name, count in counts if count) or "0 tasks"

    def since(self, earlier: "RunSummary") -> "RunSummary":
        """What was done since the earlier copy was made."""
        now, before = msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)
        return RunSummary(*(new - old for new, old in zip(now, before, strict=True)))


@dataclass(slots=True, eq=False, repr=False)
class Failing:
    """A failed attempt whose report the engine has not answered yet."""

    failure: FailureDescription
    answered: asyncio.Future[None]

    @property
    def text(self) -> str:
        """How the log describes it."""
        return f"failed: {self.failure.log_message}"


Finished = tuple[ClaimedTask, End, Failing | None]


@dataclass(slots=True, eq=False, repr=False)
class Endings:
    """Ends attempts, in batches where possible, and counts how they ended."""

    worker: Worker
    scanners: ScannerThread | None
    on_unknown_kind: FailOrRelease
    worker_cancels: Callable[[], bool]
    """Whether a cancellation comes from the worker, not from the handler."""
    start: Callable[[ClaimedTask], None]
    """Starts a task that was claimed by a completing call."""
    on_shutdown: FailOrRelease = "release"
    summary: RunSummary = field(default_factory=RunSummary)
    _done: dict[tuple[str, str], list[Finished]] = field(default_factory=dict)
    _flush_planned: bool = False
    _calls: set[asyncio.Task[None]] = field(default_factory=set)

    def count(self, task: ClaimedTask) -> None:
        """Count and log a task that was ended by its handler."""
        level = logging.DEBUG
        match task.finished_by:
            case "complete":
                text = "succeeded"
                self.summary.completed += 1
            case "fail":
                level, text = logging.WARNING, "failed by its handler"
                self.summary.failed += 1
            case "cancel":
                level, text = logging.INFO, "cancelled by its handler"
                self.summary.cancelled += 1
            case "delay" | "wait_children" | "suspend" | "release_unknown" | None:
                text = "paused"
                self.summary.released += 1
            case _:
                return
        log_task(level, f"task_{text.split()[0]}", task, text)

    async def log_progress(self) -> None:
        """Log once per second what was done, if anything."""
        before = copy(self.summary)
        while True:
            await asyncio.sleep(1)
            done, before = self.summary.since(before), copy(self.summary)
            if done != RunSummary():
                extra = {"action": "worker_progress", **msgspec.structs.asdict(done)}
                log.info("%s in the last second", done, extra=extra)

    async def unknown(self, task: ClaimedTask) -> None:
        """Fail an attempt whose kind has no handler, or leave it to another worker."""
        if self.on_unknown_kind == "fail":
            reason = f"no handler is registered for kind {task.execution_kind!r}"
            await self.fail(task, HandlerFailure(reason, "runtime_no_handler"))
        elif await self._released(task, task.release_unknown()):
            self.worker.claims.log_unknown([task.execution_kind])

    async def _released(self, task: ClaimedTask, release: Awaitable[None]) -> bool:
        try:
            await release
        except errors.FlowFabricError as error:
            self.abandon(task, error)
            return False
        self.summary.released += 1
        return True

    async def fail(self, task: ClaimedTask, error: BaseException) -> None:
        """Store what the handler raised; the stored policy decides on a retry."""
        failure = describe(error)
        if task.finished_by is not None:
            # The handler ended its task and then raised: the earlier call counts.
            if not _is_suspension(error):
                text = f"raised an exception after it had ended: {failure.log_message}"
                log_task(logging.ERROR, "late_failure", task, text, cause=failure.exc_info)
            self.count(task)
            return
        await self._absorb_own_cancellation()
        failing = Failing(failure, asyncio.get_running_loop().create_future())
        if task.wrote_output:
            await task.flush_best_effort()
        if task.lease_lost is not None:
            self.abandon(task, task.lease_lost, failing.text, failure.exc_info)
            return
        if task.trace is not None:
            task.trace.queued("fail")
        failed = FailedAttempt(task.claim.handle, failure.report, failure.category)
        self._queue((task, failed, failing))
        await failing.answered

    def _failed_with(
        self, task: ClaimedTask, failing: Failing, outcome: FailOutcome | BaseException
    ) -> None:
        """Apply the engine's answer to a failure report, unless the task was given up meanwhile."""
        cause = failing.failure.exc_info
        if task.finished_by is None:
            if isinstance(outcome, BaseException):
                self.abandon(task, outcome, failing.text, cause)
            else:
                task.finish("fail")
                retry_at = outcome.delay_until if isinstance(outcome, RetryScheduled) else None
                self._failed(task, failing.text, retry_at, cause)
        if not failing.answered.done():
            failing.answered.set_result(None)

    def _failed(
        self,
        task: ClaimedTask,
        text: str,
        retry_at: int | None,
        cause: BaseException | None = None,
    ) -> None:
        """Count and log an attempt that failed; without `retry_at`, its execution failed too."""
        if task.trace is not None:
            task.trace.failed(text)
        if retry_at is None:
            self.summary.failed += 1
            log_task(logging.ERROR, "task_failed", task, text, cause=cause)
            return
        self.summary.retried += 1
        self._hint_retry(task, retry_at)
        # Compare durations since the claim, because the server's clock may differ from ours.
        began = task.claim.lease_expires_at - task.handle.lease_ttl_ms
        left = max(0, round(retry_at - began - (time.monotonic() - task.since) * 1000))
        log_task(
            logging.WARNING, "task_failed", task, text, f"retrying in {duration(left)}", cause=cause
        )

    def _hint_retry(self, task: ClaimedTask, due_ms: int) -> None:
        """Have the retry promoted at its exact time."""
        if self.scanners is not None and due_ms:
            self.scanners.hint(task.lane_id, task.execution_id.tag, task.execution_id, due_ms)

    async def _absorb_own_cancellation(self) -> None:
        """If the handler cancelled its own task, consume that before reporting the failure."""
        current = asyncio.current_task()
        if current is not None and current.cancelling() and not self.worker_cancels():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    async def refuse(self, task: ClaimedTask, error: errors.ValidationError) -> None:
        """Fail an attempt whose result is too large. Not retried: it would return the same."""
        await self.fail(task, HandlerFailure(f"the result was refused: {error}", "permanent"))

    async def timed_out(self, task: ClaimedTask) -> None:
        """End an attempt whose handler was stopped at its timeout."""
        if task.finished_by is not None:
            return
        try:
            answer = await self._expire(task)
        except errors.EngineError as error:
            # The attempt timeout scanner will end it.
            self.abandon(task, error)
            return
        if answer == "retry_scheduled":
            retry_at = 0
            # Without this hint, the retry only starts a little later.
            with contextlib.suppress(errors.EngineError):
                retried = await self.worker.backend.reads.read_execution_info(task.execution_id)
                retry_at = retried.delay_until or 0
            self._failed(task, "timed out", retry_at)
        elif answer in ("expired", "failed"):
            self._failed(task, "timed out", None)
        else:
            self.abandon(task, RuntimeError(f"attempt timeout: {answer}"))
        task.finish("attempt_timeout")

    async def _expire(self, task: ClaimedTask) -> str:
        """Expire the attempt and return its outcome; a scanner may have ended it first."""
        backend, answer = self.worker.backend, "not_yet_due"
        for _ in range(_EXPIRE_TRIES):
            (answer,) = await backend.upkeep.expire_execution(
                task.execution_id.tag, ExpireReason.ATTEMPT_TIMEOUT, [str(task.execution_id)]
            )
            if answer != "not_yet_due" or not task.may_hold_lease:
                break
            (ours,) = await backend.leases.renew_many([task.handle])
            if isinstance(ours, errors.EngineError) and ours.code in TERMINAL_CODES:
                return "retry_scheduled"
            await asyncio.sleep(_EXPIRE_PAUSE_S)
        if answer == "already_terminal":
            ended = await backend.reads.read_execution_info(task.execution_id)
            return "expired" if ended.failure_category == "timeout" else answer
        return answer

    async def hand_over(self, task: ClaimedTask) -> None:
        """Release an attempt because the worker is stopping; fails it with `on_shutdown="fail"`."""
        if self.on_shutdown == "fail":
            shutdown = HandlerFailure("the worker is shutting down", "worker_shutdown")
            await self.fail(task, shutdown)
        elif await self._released(task, task.delay_execution(1)):
            log_task(logging.INFO, "task_released", task, "released: the worker is stopping")

    def lost(self, task: ClaimedTask, error: errors.LeaseLost) -> None:
        """Give up a task whose handler stopped because the lease was lost."""
        why = _how_it_ended(error) or f"its lease was lost: {error.reason or error.code}"
        self._abandon(task, error, f"stopped: {why}")

    def abandon(
        self,
        task: ClaimedTask,
        error: BaseException,
        did: str = "ended",
        cause: BaseException | None = None,
    ) -> None:
        """Give up a task whose end the engine did not accept, or may not have."""
        ended = _how_it_ended(error)
        why = f"nothing was stored: {ended}" if ended else f"the engine did not accept it: {error}"
        self._abandon(task, error, f"{did}, but {why}", cause)

    def _abandon(
        self, task: ClaimedTask, error: BaseException, text: str, cause: BaseException | None = None
    ) -> None:
        if task.lease_lost is not None and task.lease_lost.reason == RELEASED:
            # The loop watch has logged it.
            self.summary.released += 1
            task.finish("released")
            return
        if _how_it_ended(error) == CANCELLED:
            self.summary.cancelled += 1
            log_task(logging.INFO, "task_cancelled", task, f"stopped: {CANCELLED}")
        else:
            self.summary.abandoned += 1
            level = logging.DEBUG if self.worker.outage.explains(error) else logging.ERROR
            log_task(level, "task_abandoned", task, text, cause=cause)
        task.finish("abandoned")

    def add(self, task: ClaimedTask, result: bytes | Encoded | None) -> None:
        """Complete this task with the others of this loop tick.

        Raises an error for an invalid result, so that it fails one handler, not the whole batch.
        """
        handle = task.claim.handle
        if result is None or type(result) is bytes:
            completion = Completion(handle, result)
        else:
            completion = Completion(handle, *_encoded(result))
        self._queue((task, completion, None))

    def _queue(self, finished: Finished) -> None:
        handle = finished[1].handle
        self._done.setdefault((handle.lane_id, handle.execution_id.tag), []).append(finished)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    @property
    def pending(self) -> bool:
        """Whether the engine has not answered for some results yet."""
        return bool(self._done or self._calls)

    async def drain(self) -> None:
        """Wait until every result was answered or given up."""
        while self.pending:
            self._flush()
            await asyncio.wait(list(self._calls))

    def _flush(self) -> None:
        self._flush_planned = False
        done, self._done = self._done, {}
        size = self.worker.config.batch
        for place, finished in done.items():
            for first in range(0, len(finished), size):
                call = asyncio.create_task(self._send(*place, finished[first : first + size]))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _send(self, lane_id: str, tag: str, finished: list[Finished]) -> None:
        try:
            await self._deliver(lane_id, tag, finished)
        except BaseException as error:
            # Reached only through a bug or the end of the loop; return the permits even then.
            for one in finished:
                if one[0].finished_by is None:
                    self._give_up(one, error)
            raise

    def _give_up(self, finished: Finished, error: BaseException) -> None:
        task, _, failing = finished
        if failing is None:
            self.abandon(task, error)
        else:
            self._failed_with(task, failing, error)

    async def _deliver(self, lane_id: str, tag: str, finished: list[Finished]) -> None:
        try:
            # The request may be repeated while any of the leases may be valid.
            outcomes, claimed_tasks = await self.worker.claims.complete(
                lane_id,
                tag,
                [end for _, end, _ in finished],
                lambda: any(task.may_hold_lease for task, _, _ in finished),
                of_flow=any(task.claim.flow_id for task, _, _ in finished),
            )
        except errors.TransportError as error:
            for one in finished:
                self._give_up(one, error)
            return
        except errors.EngineError as error:
            text = "cannot end a batch, ending its tasks one by one: %s"
            log.warning(text, error, extra={"action": "complete_failed"})
            await asyncio.gather(*(self._end_alone(one) for one in finished))
            return
        refused: list[tuple[ClaimedTask, errors.ValidationError]] = []
        debug = log.isEnabledFor(logging.DEBUG)
        for (task, _, failing), outcome in zip(finished, outcomes, strict=True):
            if failing is not None:
                assert outcome is not None
                self._failed_with(task, failing, outcome)
            elif outcome is None:
                self.summary.completed += 1
                if debug:
                    log_task(logging.DEBUG, "task_succeeded", task, "succeeded")
                task.finish("complete")
            elif isinstance(outcome, errors.ValidationError):
                refused.append((task, outcome))
            elif isinstance(outcome, errors.EngineError):
                self.abandon(task, outcome)
        for task in claimed_tasks():
            self.start(task)
        for task, problem in refused:
            await self.refuse(task, problem)

    async def _end_alone(self, finished: Finished) -> None:
        """End one task of a batch that the engine refused as a whole."""
        task, end, failing = finished
        try:
            if isinstance(end, Completion):
                await task.complete(end.result_payload, end.result_encoding)
                self.count(task)
            elif failing is not None:
                outcome = await self.worker.backend.executions.fail(
                    end.handle, end.reason, end.category
                )
                self._failed_with(task, failing, outcome)
        except errors.FlowFabricError as problem:
            if failing is None and isinstance(problem, errors.ValidationError):
                await self.refuse(task, problem)
            else:
                self._give_up(finished, problem)


def _how_it_ended(error: BaseException) -> str | None:
    if isinstance(error, errors.LeaseLost):
        return error.reason if error.reason in ENDINGS.values() else None
    return how_it_ended(error) if isinstance(error, errors.EngineError) else None


def _is_suspension(error: BaseException) -> bool:
    """Whether the handler unwinds because it was suspended, possibly inside a task group."""
    # Not isinstance(): `__class__` may be user code that raises.
    if issubclass(type(error), BaseExceptionGroup):
        inside = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return any(_is_suspension(one) for one in inside)
    return issubclass(type(error), Parked)


def _encoded(result: object) -> Encoded:
    """Result bytes with their label; raises `HandlerFailure` for anything else."""
    match result:
        case (bytes() as data, str() as label) if label.encode(errors="replace").decode() == label:
            return data, label
        case (bytes(), str()):
            got = "a label that is not valid Unicode"
        case tuple():
            parts = cast("tuple[object, ...]", result)
            got = f"({', '.join(type(part).__name__ for part in parts)})"
        case _:
            got = f"a {type(result).__name__}"
    # Not retried: it would return the same.
    raise HandlerFailure(
        f"a handler returns bytes, None, or (bytes, encoding label), not {got}", "permanent"
    )
