"""What a claimed task can do besides ending: wait for signals, and write output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from flowfabric.core.conditions import Condition
from flowfabric.core.contracts.leases import Handle, ResumeCause
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    BestEffort,
    Frame,
    FrameMode,
    StreamFrames,
    Visibility,
)
from flowfabric.core.contracts.suspension import (
    AlreadySatisfiedSuspension,
    PastWait,
    PendingWaitpoint,
    ResumePolicy,
    ResumeSignal,
    Suspended,
    SuspendOutcome,
    UsePending,
)
from flowfabric.core.errors import StateError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.frame_writer import FrameWriter
from flowfabric.engine.valkey.backend import ValkeyBackend

T = TypeVar("T")


class Parked(BaseException):
    """Unwinds a handler that has given its worker back; it starts again when it is resumed.

    Not an `Exception`, so that a handler's own `except Exception` does not catch it.
    """


def _is_suspended(outcome: SuspendOutcome) -> bool:
    return isinstance(outcome, Suspended)


class TaskWaits(ABC):
    """Suspension, signals and output of a claimed task."""

    __slots__ = ()

    _writer: FrameWriter | None
    resume_cause: ResumeCause | None

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """The cookie that proves ownership."""

    @property
    @abstractmethod
    def backend(self) -> ValkeyBackend:
        """The engine this task was claimed from."""

    @abstractmethod
    def _usable(self) -> None:
        """Raise when the task has ended or its lease is lost."""

    @abstractmethod
    async def _land(
        self,
        op: str,
        call: Callable[[], Awaitable[T]],
        finishes: Callable[[T], bool] = lambda _: True,
        *,
        errors_finish: bool = True,
    ) -> T:
        """Carry a lease-releasing call out, repeating it after transport faults."""

    @abstractmethod
    async def _while_leased(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a replay-safe call while the lease may last."""

    # --- waiting ------------------------------------------------------------------------

    async def try_suspend(
        self,
        condition: Condition,
        *,
        reason_code: str = "waiting_for_signal",
        timeout_at: int | None = None,
        timeout_behavior: str | None = None,
        resume_policy: ResumePolicy | None = None,
        **options: Any,
    ) -> SuspendOutcome:
        """Park until the condition is met, with a fresh waitpoint for each key it names.

        `AlreadySatisfied` leaves the task usable and its lease held.
        """
        return await self._suspend(
            condition=condition,
            reason_code=reason_code,
            timeout_at=timeout_at,
            timeout_behavior=timeout_behavior,
            resume_policy=resume_policy,
            **options,
        )

    async def try_suspend_on_pending(
        self, pending: PendingWaitpoint, condition: Condition, **options: Any
    ) -> SuspendOutcome:
        """`try_suspend` on a waitpoint whose token was handed out before."""
        bindings = [UsePending(pending.waitpoint_id)]
        return await self._suspend(condition=condition, waitpoints=bindings, **options)

    async def suspend(self, condition: Condition, **options: Any) -> Suspended:
        """`try_suspend` that insists: already satisfied is an error, and the task goes on."""
        outcome = await self.try_suspend(condition, **options)
        if isinstance(outcome, Suspended):
            return outcome
        raise StateError("already_satisfied", op="suspend")

    async def _suspend(self, **options: Any) -> SuspendOutcome:
        await self.flush_output()
        # Once for all repeats of the call, so that one after a lost reply finds the first.
        options.setdefault("suspension_id", new_uuid())
        backend, handle = self.backend, self.handle
        outcome = await self._land(
            "suspend",
            lambda: backend.suspensions.suspend(handle, **options),
            finishes=_is_suspended,
            errors_finish=False,
        )
        if isinstance(outcome, AlreadySatisfiedSuspension):
            self.resume_cause = ResumeCause(
                outcome.details.suspension_id,
                "already_satisfied",
                "resumed",
                outcome.closer_signal_id,
            )
        return outcome

    async def create_pending_waitpoint(
        self, waitpoint_key: str, expires_in_ms: int
    ) -> PendingWaitpoint:
        """A waitpoint to hand out now and wait on later; it buffers signals meanwhile."""
        self._usable()
        return await self.backend.waitpoints.create_waitpoint(
            self.handle, waitpoint_key, expires_in_ms
        )

    async def close_waitpoint(self, waitpoint_id: str, reason: str = "proactive_close") -> bool:
        """Close a waitpoint that is no longer needed; False when it was closed already."""
        self._usable()
        handle = self.handle
        return await self.backend.waitpoints.close_waitpoint(
            handle.execution_id, waitpoint_id, reason, handle=handle
        )

    async def resume_signals(self) -> list[ResumeSignal]:
        """The signals that ended the suspension before this lease; ask before the next one."""
        self._usable()
        return await self.backend.waitpoints.observe_signals(self.handle)

    async def past_waits(self, *wanted: str) -> list[PastWait]:
        """The waitpoints of this run that are not waited on now, from all its attempts.

        What came to the `wanted` keys is read along.
        """
        self._usable()
        return await self.backend.waitpoints.read_waits(self.handle.execution_id, *wanted)

    async def wait_signals(self, wait: PastWait) -> list[ResumeSignal]:
        """What one of them received, oldest first."""
        return await self.backend.waitpoints.read_wait_signals(self.handle.execution_id, wait)

    # --- output -------------------------------------------------------------------------

    @property
    def output(self) -> FrameWriter:
        """The writing end of this attempt's stream."""
        if self._writer is None:
            self._writer = FrameWriter(self.backend.streams, self.handle, self._while_leased)
        return self._writer

    async def append_frame(
        self, frame_type: str, payload: bytes, metadata: str = ""
    ) -> AppendOutcome:
        """Add one durable frame to the attempt's stream; `metadata` is its correlation id."""
        return await self.append_frame_with_mode(frame_type, payload, metadata, mode="durable")

    async def append_frame_with_mode(
        self,
        frame_type: str,
        payload: bytes,
        metadata: str = "",
        *,
        mode: FrameMode,
        best_effort: BestEffort | None = None,
    ) -> AppendOutcome:
        """Add one frame: durable, a summary patch, or best effort."""
        self._usable()
        frame = Frame(payload=payload, frame_type=frame_type, correlation_id=metadata)
        return await self.output.append(frame, mode=mode, best_effort=best_effort)

    async def write_frame(self, frame: Frame, *, mode: FrameMode = "durable") -> None:
        """Add one frame without waiting for it: order is kept, a failure is raised later."""
        self._usable()
        await self.output.write(frame, mode=mode)

    @property
    def wrote_output(self) -> bool:
        """Whether this attempt has a stream of its own to be flushed."""
        return self._writer is not None

    async def flush_output(self) -> None:
        """Return when every frame written so far is stored."""
        if self._writer is not None:
            await self._writer.flush()

    async def read_stream(
        self, from_: str = "start", to: str = "end", count: int = 100
    ) -> StreamFrames:
        """Frames of this attempt."""
        handle = self.handle
        return await self.backend.streams.read_stream(
            handle.execution_id, handle.attempt_index, from_=from_, to=to, count_limit=count
        )

    async def tail_stream(
        self,
        after: str = "0-0",
        block_ms: int = 0,
        count: int = 50,
        visibility: Visibility = "all",
    ) -> StreamFrames:
        """Frames of this attempt behind `after`."""
        handle = self.handle
        return await self.backend.streams.tail_stream(
            handle.execution_id,
            handle.attempt_index,
            after=after,
            block_ms=block_ms,
            count_limit=count,
            visibility=visibility,
        )
