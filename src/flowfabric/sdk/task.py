"""What a claimed task can do: end, wait, report progress and write output."""

import logging
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from flowfabric.core.conditions import Condition, Single
from flowfabric.core.contracts import budgets, executions, leases, streams, suspension
from flowfabric.core.contracts.flows import GraphEdge, GraphNode, Spawned
from flowfabric.core.contracts.steps import (
    StepError,
    StepKind,
    StepOutcome,
    StepPage,
    StepStatus,
)
from flowfabric.core.errors import FlowFabricError, LeaseLost, StateError
from flowfabric.core.ids import ExecutionId, budget_id, new_uuid
from flowfabric.engine.api.budgets import Amounts
from flowfabric.engine.api.streams import FrameWriter
from flowfabric.sdk.attempt import HeldAttempt
from flowfabric.sdk.failures import describe
from flowfabric.sdk.logs import log_task
from flowfabric.sdk.spending import (
    PAUSED_BY_BUDGET,
    StoppedByBudget,
    Usage,
    exceeded,
    spent_and_key,
)

log = logging.getLogger(__name__)


class Parked(BaseException):
    """Unwinds a handler that has released its worker. The handler restarts when it is resumed.

    Not an `Exception`, so that a handler's own `except Exception` does not catch it.
    """


class ClaimedTask(HeldAttempt):
    """A claimed attempt. At most one lease-releasing call succeeds on it.

    As an async context manager it fails the attempt if the block raises, and releases the lease if
    the block ends without a lease-releasing call.
    """

    __slots__ = ()

    async def complete(self, result_payload: bytes | None = None, encoding: str = "") -> None:
        """End successfully. None means no result; empty bytes are a stored, empty result."""
        await self.flush_output()
        complete = self.backend.executions.complete
        await self._call_releasing(
            "complete", lambda: complete(self.handle, result_payload, encoding)
        )

    async def fail(self, reason: str, category: str = "transient") -> executions.FailOutcome:
        """End this attempt unsuccessfully; the stored policy decides on a retry."""
        await self.flush_best_effort()
        fail = self.backend.executions.fail
        return await self._call_releasing("fail", lambda: fail(self.handle, reason, category))

    async def cancel(self, reason: str = "") -> None:
        """End the execution deliberately."""
        await self.flush_best_effort()
        cancel = self.backend.executions.cancel
        await self._call_releasing("cancel", lambda: cancel(self.handle, reason))

    async def delay_execution(self, delay_until_ms: int) -> None:
        """Release the lease; the attempt resumes at this time, or at once if it has passed."""
        await self.flush_best_effort()
        delay = self.backend.executions.delay
        await self._call_releasing("delay", lambda: delay(self.handle, delay_until_ms))

    async def release_unknown(self) -> None:
        """Leave the attempt to workers that know the task; only they can resume it."""
        release, kind = self.backend.executions.release_unknown, self.execution_kind
        await self._call_releasing("release_unknown", lambda: release(self.handle, kind))

    async def move_to_waiting_children(self) -> executions.WaitChildrenOutcome:
        """Park until the open dependencies are resolved; the lease is kept unless `Moved`."""
        await self.flush_best_effort()
        return await self._call_releasing(
            "wait_children",
            lambda: self.backend.executions.wait_children(self.handle),
            finishes=lambda outcome: isinstance(outcome, executions.Moved),
        )

    async def spawn_children(
        self, nodes: Sequence[GraphNode], edges: Sequence[GraphEdge] = (), *, wait: bool = False
    ) -> Spawned:
        """Add members that this task depends on; with `wait`, suspend it until they have ended."""
        await self.flush_best_effort()
        spawn = self.backend.flows.spawn_children
        return await self._call_releasing(
            "spawn_children",
            lambda: spawn(self.handle, nodes, edges, wait=wait),
            finishes=lambda outcome: outcome.parked,
            errors_finish=False,
        )

    async def try_suspend(
        self, condition: Condition, *, reason_code: str = "waiting_for_signal", **options: Any
    ) -> suspension.SuspendOutcome:
        """Park until the condition is met, with a fresh waitpoint for each key it names.

        Takes the options of `Suspensions.suspend`. `AlreadySatisfied` leaves the task usable and
        its lease held.
        """
        await self.flush_output()
        # Repeats use the same id, so that after a lost reply they find the first suspension.
        options.setdefault("suspension_id", new_uuid())
        outcome = await self._call_releasing(
            "suspend",
            lambda: self.backend.suspensions.suspend(
                self.handle, condition=condition, reason_code=reason_code, **options
            ),
            finishes=lambda outcome: isinstance(outcome, suspension.Suspended),
            errors_finish=False,
        )
        if isinstance(outcome, suspension.AlreadySatisfiedSuspension):
            suspension_id, closer = outcome.details.suspension_id, outcome.closer_signal_id
            self.resume_cause = leases.ResumeCause(
                suspension_id, "already_satisfied", "resumed", closer
            )
        return outcome

    async def try_suspend_on_pending(
        self, pending: suspension.PendingWaitpoint, condition: Condition, **options: Any
    ) -> suspension.SuspendOutcome:
        """`try_suspend` on a waitpoint whose token was handed out before."""
        return await self.try_suspend(
            condition, waitpoints=[suspension.UsePending(pending.waitpoint_id)], **options
        )

    async def suspend(self, condition: Condition, **options: Any) -> suspension.Suspended:
        """`try_suspend`, but raises `already_satisfied` if the condition is already met."""
        outcome = await self.try_suspend(condition, **options)
        if isinstance(outcome, suspension.Suspended):
            return outcome
        raise StateError("already_satisfied", op="suspend")

    async def renew_lease(self) -> leases.Renewed:
        """Renew now, in addition to the keeper's renewals."""
        self._require_lease()
        return await self.backend.leases.renew(self.handle)

    async def update_progress(self, pct: int | None = None, message: str | None = None) -> None:
        """Store the progress of the attempt; what you do not pass stays unchanged."""
        self._require_lease()
        progress = self.backend.executions.progress
        await self._repeat_call(lambda: progress(self.handle, pct, message))

    async def create_pending_waitpoint(
        self,
        waitpoint_key: str,
        expires_in_ms: int,
        *,
        prompt: str | None = None,
        details: Any = None,
    ) -> suspension.PendingWaitpoint:
        """A waitpoint to hand out before waiting for it; until then it stores its signals."""
        self._require_lease()
        return await self.backend.waitpoints.create_waitpoint(
            self.handle, waitpoint_key, expires_in_ms, prompt=prompt, details=details
        )

    async def close_waitpoint(self, waitpoint_id: str, reason: str = "proactive_close") -> bool:
        """Close a waitpoint that is no longer needed; False if it was already closed."""
        self._require_lease()
        return await self.backend.waitpoints.close_waitpoint(
            self.execution_id, waitpoint_id, reason, handle=self.handle
        )

    async def resume_signals(self) -> list[suspension.ResumeSignal]:
        """The signals that ended the last suspension; read them before the next one."""
        self._require_lease()
        return await self.backend.waitpoints.observe_signals(self.handle)

    async def past_waits(self, *wanted: str) -> list[suspension.PastWait]:
        """The waitpoints of all attempts that no suspension waits for now.

        Those with the `wanted` keys include the signals they received.
        """
        self._require_lease()
        return await self.backend.waitpoints.read_waits(self.execution_id, *wanted)

    async def wait_signals(self, wait: suspension.PastWait) -> list[suspension.ResumeSignal]:
        """The signals that a past wait received, oldest first."""
        return await self.backend.waitpoints.read_wait_signals(self.execution_id, wait)

    async def record_step(
        self,
        step_key: str,
        *,
        kind: StepKind = "step",
        status: StepStatus = "done",
        result: bytes | None = None,
        codec: str = "",
        error: StepError | None = None,
        took_ms: int = 0,
        fire_at: int | None = None,
        fire_in_ms: int | None = None,
        child_execution_id: ExecutionId | None = None,
    ) -> StepOutcome:
        """Record under a key what this task has done, so that later attempts find it.

        The first record wins. A repeat after a lost reply returns the task's own record.
        """
        self._require_lease()
        record = self.backend.steps.record_step
        return await self._repeat_call(
            lambda: record(
                *(self.execution_id, self.handle, step_key),
                kind=kind,
                status=status,
                result=result,
                codec=codec,
                error=error,
                took_ms=took_ms,
                fire_at=fire_at,
                fire_in_ms=fire_in_ms,
                child_execution_id=child_execution_id,
            )
        )

    async def read_steps(self, after_seq: int = 0, limit: int = 1000) -> StepPage:
        """Step records of all attempts, in order; `task.claim.steps` has the first ones."""
        return await self.backend.steps.read_steps(self.execution_id, after_seq, limit)

    async def report_usage(
        self, budget: str, usage: Amounts | Usage, dedup_key: str = "", *, enforce: bool = False
    ) -> budgets.UsageOutcome:
        """Count usage of a budget, named by its name or UUID. A breach is a result.

        With `enforce`, a breach also does what the budget specifies: it raises `BudgetExceeded`,
        suspends the task, or logs a warning. A repeat with the same `dedup_key` counts once.
        """
        spent, dedup_key = spent_and_key(usage, dedup_key)
        report, known = self.backend.budgets.report_usage, self._budget_id(budget)
        outcome = await report(self.handle, known, spent, dedup_key=dedup_key)
        if enforce:
            await self.enforce(budget, outcome)
        return outcome

    async def reserve(
        self,
        budget: str,
        amounts: Amounts,
        reservation_id: str,
        *,
        ttl_ms: int | None = None,
        enforce: bool = False,
    ) -> budgets.ReserveOutcome:
        """Hold amounts of a budget before spending them; `settle` or the end of the lease ends it.

        With `enforce`, amounts that do not fit raise `BudgetExceeded` or suspend the task.
        """
        self._require_lease()
        reserve, known = self.backend.budgets.reserve, self._budget_id(budget)
        outcome = await reserve(self.handle, known, amounts, reservation_id, ttl_ms=ttl_ms)
        if not isinstance(outcome, budgets.HardBreach):
            self.held.budgets |= {known}
        if enforce:
            await self.enforce(budget, outcome)
            if isinstance(outcome, budgets.HardBreach):
                # `reject` cannot just report this breach: without a hold, nothing may be spent.
                raise exceeded(budget, outcome)
        return outcome

    async def settle(
        self, budget: str, reservation_id: str, actual: Amounts | None = None
    ) -> budgets.UsageOutcome:
        """Count what was spent of a hold. Dimensions that you leave out count in full."""
        return await self.backend.budgets.settle(self._budget_id(budget), reservation_id, actual)

    async def release_reservation(self, budget: str, reservation_id: str) -> budgets.ReleaseOutcome:
        """Release a hold, because nothing was spent."""
        release = self.backend.budgets.release_reservation
        return await release(self._budget_id(budget), reservation_id)

    async def enforce(
        self, budget: str, outcome: budgets.UsageOutcome | budgets.ReserveOutcome
    ) -> None:
        """Do what a budget specifies for a breach; other outcomes change nothing."""
        if isinstance(outcome, budgets.SoftBreach):
            if outcome.action != "allow":
                text = f"{outcome.current_usage:,} of {outcome.soft_limit:,} {outcome.dimension}"
                message = f'exceeded the soft limit of budget "{budget}": {text}'
                log_task(logging.WARNING, "budget_soft_exceeded", self, message)
            return
        if not isinstance(outcome, budgets.HardBreach) or outcome.action == "reject":
            return
        error = exceeded(budget, outcome)
        if outcome.action != "suspend":
            raise error
        prompt = f"{error.details[0]}. Raise the limit or reset the budget, then resume."
        used, limit = outcome.current_usage, outcome.hard_limit
        about = StoppedByBudget(budget, outcome.dimension, used, limit)
        await self.suspend(
            Single("budget"),
            reason_code=PAUSED_BY_BUDGET,
            prompt=prompt,
            details=msgspec.to_builtins(about),
        )
        raise Parked

    def _budget_id(self, budget: str) -> str:
        return budget_id(budget, self.claim.namespace)

    @property
    def output(self) -> FrameWriter:
        """The writing end of this attempt's stream."""
        if self._writer is None:
            self._writer = FrameWriter(self.backend.streams, self.handle, self._repeat_call)
        return self._writer

    async def append_frame(
        self,
        frame_type: str,
        payload: bytes,
        metadata: str = "",
        *,
        mode: streams.FrameMode = "durable",
        best_effort: streams.BestEffort | None = None,
    ) -> streams.AppendOutcome:
        """Add one frame: durable, a summary patch, or best effort; `metadata` correlates it."""
        self._require_lease()
        frame = streams.Frame(payload=payload, frame_type=frame_type, correlation_id=metadata)
        return await self.output.append(frame, mode=mode, best_effort=best_effort)

    append_frame_with_mode = append_frame

    async def write_frame(
        self, frame: streams.Frame, *, mode: streams.FrameMode = "durable"
    ) -> None:
        """Add one frame without waiting. Frames stay in order; a failure is raised later."""
        self._require_lease()
        await self.output.write(frame, mode=mode)

    @property
    def wrote_output(self) -> bool:
        """Whether there is output to flush before the task ends."""
        return self._writer is not None

    async def flush_output(self) -> None:
        """Return when every frame written so far is stored."""
        if self._writer is not None:
            await self._writer.flush()

    async def flush_best_effort(self) -> None:
        """Send what the task has written, unless that fails."""
        try:
            await self.flush_output()
        except FlowFabricError as error:
            log.debug("output of %s is incomplete: %s", self.execution_id, error)

    async def read_stream(
        self, from_: str = "start", to: str = "end", count: int = 100
    ) -> streams.StreamFrames:
        """Frames of this attempt."""
        return await self.backend.streams.read_stream(
            self.execution_id, self.attempt_index, from_=from_, to=to, count_limit=count
        )

    async def tail_stream(
        self,
        after: str = "0-0",
        block_ms: int = 0,
        count: int = 50,
        visibility: streams.Visibility = "all",
    ) -> streams.StreamFrames:
        """Frames of this attempt after `after`."""
        return await self.backend.streams.tail_stream(
            self.execution_id,
            self.attempt_index,
            after=after,
            block_ms=block_ms,
            count_limit=count,
            visibility=visibility,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _type: object, exc: BaseException | None, _frames: object) -> None:
        if self.finished_by is not None:
            return
        if isinstance(exc, Exception) and not isinstance(exc, LeaseLost):
            await self._report_failure(exc)
        elif exc is None and self._owner.config.complete_on_exit:
            try:
                await self.complete()
            finally:
                self.finish("abandoned")
        else:
            await self.discard()

    async def _report_failure(self, error: Exception) -> None:
        """Report the block's exception, without replacing it if that fails."""
        failure = describe(error)
        try:
            await self.fail(failure.report, failure.category)
        except FlowFabricError as problem:
            text = f"failed, but the engine did not accept it: {problem}"
            log_task(logging.WARNING, "task_abandoned", self, text)
        finally:
            self.finish("abandoned")
