"""One claimed attempt with a live lease."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from flowfabric.core.contracts.executions import (
    AttemptRecord,
    FailOutcome,
    Moved,
    WaitChildrenOutcome,
)
from flowfabric.core.contracts.leases import Claim, Handle, Renewed, ResumeCause
from flowfabric.core.errors import (
    EngineError,
    FlowFabricError,
    LeaseLost,
    PossiblySucceeded,
    TaskFinishedError,
    TransportError,
    ValidationError,
    Verdict,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.frame_writer import FrameWriter
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.failures import failure_category, failure_reason
from flowfabric.sdk.lease_keeper import HeldLease, LeaseKeeper
from flowfabric.sdk.task_waits import TaskWaits

log = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 3
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 1.0
DROP_PAUSE_S = 0.1
"""How long a dropped task keeps its lease: whoever drops every task must not spin."""
_loss = threading.Lock()
"""A loss is noted by the keeper's thread while a call of the task may be in flight."""


class TaskOwner(Protocol):
    """What a task needs from the worker that claimed it."""

    backend: ValkeyBackend
    keeper: LeaseKeeper
    complete_on_exit: bool

    def release(self, held: HeldLease) -> None:
        """Take the permit of an ended task back."""
        ...

    def forgotten(self, held: HeldLease) -> None:
        """Take the permit and the lease of a task back that nobody refers to; any thread."""
        ...


class ClaimedTask(TaskWaits):
    """A claimed attempt. Exactly one lease-releasing call can succeed on it.

    As an async context manager it fails the attempt when the block raises, and gives the lease
    back when the block ends without a lease-releasing call.
    """

    __slots__ = (
        "__weakref__",
        "_held",
        "_landing",
        "_late_loss",
        "_owner",
        "_writer",
        "claim",
        "finished_by",
        "lease_lost",
        "on_lease_lost",
        "resume_cause",
    )

    def __init__(self, owner: TaskOwner, claim: Claim, since: float) -> None:
        self._owner = owner
        self.claim = claim
        self.finished_by: str | None = None
        self.lease_lost: LeaseLost | None = None
        """Why the lease is gone; None while it is ours."""
        self.on_lease_lost: Callable[[LeaseLost], None] | None = None
        """Called once when the lease is lost, from the keeper's thread."""
        self.resume_cause: ResumeCause | None = claim.resume_cause
        """Why this attempt goes on: the last suspension that led to this lease or did not pause."""
        self._landing: str | None = None
        self._late_loss: LeaseLost | None = None
        self._writer: FrameWriter | None = None
        self._held: HeldLease = owner.keeper.hold(
            claim.handle, self, since, claim.attempt_timeout_ms
        )

    def __del__(self) -> None:
        if self.finished_by is None:
            self.finished_by = "forgotten"
            self._owner.forgotten(self._held)

    # --- what was claimed -------------------------------------------------------------

    @property
    def handle(self) -> Handle:
        """The cookie that proves ownership."""
        return self.claim.handle

    @property
    def backend(self) -> ValkeyBackend:
        """The engine this task was claimed from."""
        return self._owner.backend

    @property
    def execution_id(self) -> ExecutionId:
        """The claimed execution."""
        return self.claim.handle.execution_id

    @property
    def attempt_index(self) -> int:
        """0 on the first claim, unchanged on resume."""
        return self.claim.handle.attempt_index

    @property
    def attempt_id(self) -> str:
        """The attempt this task runs."""
        return self.claim.handle.attempt_id

    @property
    def lease_id(self) -> str:
        """The lease this task holds."""
        return self.claim.handle.lease_id

    @property
    def lease_epoch(self) -> int:
        """Rises with every claim: hand it to external systems as a fencing token."""
        return self.claim.handle.lease_epoch

    @property
    def lane_id(self) -> str:
        """The lane it came from."""
        return self.claim.handle.lane_id

    @property
    def execution_kind(self) -> str:
        """Which handler it is for."""
        return self.claim.execution_kind

    @property
    def input_payload(self) -> bytes:
        """The input, byte for byte as submitted."""
        return self.claim.input_payload

    @property
    def payload_encoding(self) -> str:
        """The submitter's label for the input bytes."""
        return self.claim.payload_encoding

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags at claim time."""
        return self.claim.tags

    # --- the lease ----------------------------------------------------------------------

    @property
    def consecutive_renewal_failures(self) -> int:
        """Renewals that failed since the last success."""
        return self._held.failures

    def is_lease_healthy(self) -> bool:
        """Check this before a side effect that cannot be undone."""
        return self.finished_by is None and self._held.healthy

    @property
    def may_hold_lease(self) -> bool:
        """Whether repeating a call still makes sense: the lease is not known to be over."""
        return self.finished_by is None and self._held.alive

    @property
    def held(self) -> HeldLease:
        """The keeper's view of the lease."""
        return self._held

    async def renew_lease(self) -> Renewed:
        """Renew now; the keeper goes on renewing by itself."""
        self._usable()
        return await self._owner.backend.leases.renew(self.handle)

    def lease_is_lost(self, code: str, reason: str) -> None:
        """From the keeper's thread: the lease is gone for good."""
        lost = LeaseLost(code, reason, str(self.execution_id))
        with _loss:
            if self._landing is not None:
                # Our own call may be what ended it: its answer decides.
                self._late_loss = lost
                return
        self._lose(lost)

    def _lose(self, lost: LeaseLost) -> None:
        self.lease_lost = lost
        if self.on_lease_lost is not None:
            self.on_lease_lost(lost)

    # --- lease-releasing operations -------------------------------------------------------

    async def complete(self, result_payload: bytes | None = None, encoding: str = "") -> None:
        """End successfully. None means no result; empty bytes are a stored, empty result."""
        await self.flush_output()
        backend = self._owner.backend
        await self._land(
            "complete", lambda: backend.executions.complete(self.handle, result_payload, encoding)
        )

    async def fail(self, reason: str, category: str = "transient") -> FailOutcome:
        """End this attempt unsuccessfully; the stored policy decides on a retry."""
        await self._spill()
        backend = self._owner.backend
        return await self._land(
            "fail", lambda: backend.executions.fail(self.handle, reason, category)
        )

    async def cancel(self, reason: str = "") -> None:
        """End the execution deliberately."""
        await self._spill()
        backend = self._owner.backend
        await self._land("cancel", lambda: backend.executions.cancel(self.handle, reason))

    async def delay_execution(self, delay_until_ms: int) -> None:
        """Give the lease back until then (at or before now: at once); the attempt resumes later."""
        await self._spill()
        backend = self._owner.backend
        await self._land("delay", lambda: backend.executions.delay(self.handle, delay_until_ms))

    async def move_to_waiting_children(self) -> WaitChildrenOutcome:
        """Park until the open dependencies are resolved; the lease is kept unless `Moved`."""
        await self._spill()
        backend = self._owner.backend
        return await self._land(
            "wait_children",
            lambda: backend.executions.wait_children(self.handle),
            finishes=lambda outcome: isinstance(outcome, Moved),
        )

    async def _land(
        self,
        op: str,
        call: Callable[[], Awaitable[T]],
        finishes: Callable[[T], bool] = lambda _: True,
        *,
        errors_finish: bool = True,
    ) -> T:
        """Any answer of the engine is final for this task; only transport faults are repeated.

        A suspension that was refused is not: the lease is as it was.
        """
        self._usable()
        if self._landing is not None:
            raise TaskFinishedError(str(self.execution_id), self._landing)
        self._landing = op
        try:
            outcome = await self._repeated(op, call)
        except (TransportError, ValidationError):
            # Nothing landed: the lease is as it was, the caller may do something else.
            raise
        except EngineError:
            if errors_finish:
                self.finish(op)
            raise
        else:
            if finishes(outcome):
                self.finish(op)
            return outcome
        finally:
            with _loss:
                self._landing = None
                late, self._late_loss = self._late_loss, None
            if late is not None and self.finished_by is None:
                self._lose(late)

    async def _repeated(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE_S
        ambiguous = False
        for attempt in range(1, _TRIES + 1):
            try:
                return await call()
            except TransportError as error:
                ambiguous = ambiguous or error.ambiguous
                if attempt == _TRIES or not error.retryable or not self._held.alive:
                    if not ambiguous:
                        raise
                    unknown = PossiblySucceeded(op, str(self.execution_id), str(error))
                    unknown.verifier = partial(verify, self._owner.backend, self.handle, op)
                    raise unknown from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_S)
        raise AssertionError("unreachable")

    async def _while_leased(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a replay-safe call while the lease may last, as results are."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await call()
            except TransportError as error:
                if not error.retryable or not self.may_hold_lease:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE_S)

    def _usable(self) -> None:
        if self.finished_by is not None:
            raise TaskFinishedError(str(self.execution_id), self.finished_by)
        lost = self.lease_lost
        if lost is not None:
            raise LeaseLost(lost.code, lost.reason, lost.execution_id)

    def finish(self, how: str) -> None:
        """The lease was given up: stop renewing and return the permit."""
        if self.finished_by is None:
            self.finished_by = how
            self._owner.keeper.release(self._held)
            self._owner.release(self._held)

    async def discard(self, *, pause_s: float = DROP_PAUSE_S) -> None:
        """Let go without a result: after a short pause the lease is given back, best effort."""
        if self.finished_by is not None:
            return
        warn_dropped(self.execution_id)
        try:
            await asyncio.sleep(pause_s)
            if self._held.alive and self._landing is None:
                await self._owner.backend.executions.delay(self.handle, 1)
        except EngineError as error:
            log.debug("lease of %s not given back: %s", self.execution_id, error)
        finally:
            self.finish("discard")

    async def _spill(self) -> None:
        """Store what was written before the end; that it cannot be stored is no second failure."""
        try:
            await self.flush_output()
        except FlowFabricError as error:
            log.debug("output of %s is incomplete: %s", self.execution_id, error)

    # --- non-terminal operations ------------------------------------------------------------

    async def update_progress(self, pct: int | None = None, message: str | None = None) -> None:
        """Note how far the attempt is; only what is given is written."""
        self._usable()
        backend = self._owner.backend
        await self._while_leased(lambda: backend.executions.progress(self.handle, pct, message))

    # --- as a context manager ---------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.finished_by is not None:
            return
        if isinstance(exc, Exception) and not isinstance(exc, LeaseLost):
            await self._fail_with(exc)
        elif exc is None and self._owner.complete_on_exit:
            try:
                await self.complete()
            finally:
                self.finish("abandoned")
        else:
            await self.discard()

    async def _fail_with(self, error: Exception) -> None:
        """Report the block's exception; a problem doing so must not hide it."""
        try:
            await self.fail(failure_reason(error), failure_category(error))
        except FlowFabricError as problem:
            log.warning(
                "failure of %s was not accepted: %s",
                self.execution_id,
                problem,
                extra={"action": "task_abandoned", "execution_id": self.execution_id},
            )
        finally:
            self.finish("abandoned")


def warn_dropped(execution_id: ExecutionId) -> None:
    """Tell that a task went away without an end."""
    log.warning(
        "dropped without terminal operation — lease will expire",
        extra={"action": "task_dropped", "execution_id": execution_id},
    )


_ENDED_BY = {"complete": "ended_success", "fail": "ended_failure", "cancel": "ended_cancelled"}


async def verify(backend: ValkeyBackend, handle: Handle, op: str) -> Verdict:
    """After `PossiblySucceeded`: whether the call of this handle took effect."""
    attempts: Sequence[AttemptRecord] = ()
    for pause in (_FIRST_PAUSE_S, 2 * _FIRST_PAUSE_S, None):
        try:
            attempts = await backend.reads.read_attempts(handle.execution_id)
            break
        except EngineError as error:
            # The connection that lost the reply may be on its way back.
            if pause is None or not error.retryable:
                return "unknown"
            await asyncio.sleep(pause)
    index = handle.attempt_index
    if index >= len(attempts) or attempts[index].attempt_id != handle.attempt_id:
        return "unknown"
    own = attempts[index]
    if op in _ENDED_BY:
        # Another lease of the same attempt, or a scanner, may have ended it.
        ended = own.attempt_state == _ENDED_BY[op] and own.lease_epoch == handle.lease_epoch
        if ended and (op != "fail" or own.ended_by == "fail"):
            return "succeeded"
    elif own.lease_epoch > handle.lease_epoch or own.attempt_state == "suspended":
        # Only a pause lets the same attempt go on under another lease.
        return "succeeded"
    ours = own.attempt_state == "started" and own.lease_epoch == handle.lease_epoch
    return "failed" if ours else "superseded"
