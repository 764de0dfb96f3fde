"""One claimed attempt with a live lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from flowfabric.core.contracts.executions import FailOutcome, Moved, WaitChildrenOutcome
from flowfabric.core.contracts.leases import Claim, Handle, Renewed
from flowfabric.core.errors import (
    BudgetExceeded,
    EngineError,
    LeaseLost,
    PermanentError,
    PossiblySucceeded,
    RetryableError,
    TaskFinishedError,
    TransportError,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import LifecyclePhase
from flowfabric.engine.backend import Backend
from flowfabric.sdk.lease_keeper import HeldLease, LeaseKeeper

__all__ = ["ClaimedTask", "Verdict", "failure_category", "failure_reason", "verify"]

log = logging.getLogger(__name__)

Verdict = Literal["succeeded", "failed", "superseded", "unknown"]
T = TypeVar("T")

_TRIES = 3
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 1.0


class TaskOwner(Protocol):
    """What a task needs from the worker that claimed it."""

    backend: Backend
    keeper: LeaseKeeper

    def release(self, task: ClaimedTask) -> None:
        """Take the task's permit back."""
        ...


class ClaimedTask:
    """A claimed attempt. Exactly one lease-releasing call can succeed on it.

    As an async context manager it fails the attempt when the block raises.
    """

    __slots__ = ("_held", "_owner", "claim", "finished_by", "lease_lost", "on_lease_lost")

    def __init__(self, owner: TaskOwner, claim: Claim) -> None:
        self._owner = owner
        self.claim = claim
        self.finished_by: str | None = None
        self.lease_lost: LeaseLost | None = None
        self.on_lease_lost: Callable[[LeaseLost], None] | None = None
        self._held: HeldLease = owner.keeper.hold(claim.handle, self._lost)

    # --- what was claimed -------------------------------------------------------------

    @property
    def handle(self) -> Handle:
        """The cookie that proves ownership."""
        return self.claim.handle

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

    async def renew_lease(self) -> Renewed:
        """Renew now; the keeper goes on renewing by itself."""
        self._usable("renew")
        return await self._owner.backend.renew(self.handle)

    def _lost(self, code: str, reason: str) -> None:
        """From the keeper's thread: the lease is gone for good."""
        lost = LeaseLost(code, reason, str(self.execution_id))
        self.lease_lost = lost
        if self.on_lease_lost is not None:
            self.on_lease_lost(lost)

    # --- lease-releasing operations -------------------------------------------------------

    async def complete(self, result_payload: bytes | None = None, encoding: str = "") -> None:
        """End successfully. None means no result; empty bytes are a stored, empty result."""
        backend = self._owner.backend
        await self._land(
            "complete", lambda: backend.complete(self.handle, result_payload, encoding)
        )

    async def fail(self, reason: str, category: str = "transient") -> FailOutcome:
        """End this attempt unsuccessfully; the stored policy decides on a retry."""
        backend = self._owner.backend
        return await self._land("fail", lambda: backend.fail(self.handle, reason, category))

    async def cancel(self, reason: str = "") -> None:
        """End the execution deliberately."""
        backend = self._owner.backend
        await self._land("cancel", lambda: backend.cancel(self.handle, reason))

    async def delay_execution(self, delay_until_ms: int) -> None:
        """Give the lease back until then (at or before now: at once); the attempt resumes later."""
        backend = self._owner.backend
        await self._land("delay", lambda: backend.delay(self.handle, delay_until_ms))

    async def move_to_waiting_children(self) -> WaitChildrenOutcome:
        """Park until the open dependencies are resolved; the lease is kept unless `Moved`."""
        backend = self._owner.backend
        return await self._land(
            "wait_children",
            lambda: backend.wait_children(self.handle),
            finishes=lambda outcome: isinstance(outcome, Moved),
        )

    async def _land(
        self,
        op: str,
        call: Callable[[], Awaitable[T]],
        finishes: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Any answer of the engine is final for this task; only transport faults are repeated."""
        self._usable(op)
        pause = _FIRST_PAUSE_S
        for attempt in range(1, _TRIES + 1):
            try:
                outcome = await call()
            except TransportError as error:
                if attempt < _TRIES and error.retryable and self._held.healthy:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LAST_PAUSE_S)
                    continue
                if error.ambiguous:
                    raise PossiblySucceeded(op, str(self.execution_id), str(error)) from error
                raise
            except EngineError:
                self.finish(op)
                raise
            if finishes(outcome):
                self.finish(op)
            return outcome
        raise AssertionError("unreachable")

    def _usable(self, op: str) -> None:
        if self.finished_by is not None:
            raise TaskFinishedError(str(self.execution_id), self.finished_by)
        if self.lease_lost is not None:
            log.debug("%s on %s after its lease was lost", op, self.execution_id)
            raise self.lease_lost

    def finish(self, how: str) -> None:
        """The lease was given up: stop renewing and return the permit."""
        if self.finished_by is None:
            self.finished_by = how
            self._owner.keeper.release(self._held)
            self._owner.release(self)

    async def discard(self) -> None:
        """Let go without a result: best effort, the lease is given back at once."""
        if self.finished_by is not None:
            return
        log.warning(
            "dropped without terminal operation — lease will expire",
            extra={"action": "task_dropped", "execution_id": self.execution_id},
        )
        try:
            if self.lease_lost is None:
                await self._owner.backend.delay(self.handle, 1)
        except EngineError as error:
            log.debug("lease of %s not given back: %s", self.execution_id, error)
        self.finish("discard")

    # --- non-terminal operations ------------------------------------------------------------

    async def update_progress(self, pct: int | None = None, message: str | None = None) -> None:
        """Note how far the attempt is; only what is given is written."""
        self._usable("progress")
        await self._owner.backend.progress(self.handle, pct, message)

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
            await self.fail(failure_reason(exc), failure_category(exc))
        else:
            await self.discard()


def failure_category(error: BaseException) -> str:
    """The category a handler's exception is stored under."""
    match error:
        case RetryableError():
            return "transient"
        case PermanentError():
            return "permanent"
        case BudgetExceeded():
            return "budget_exceeded"
        case TimeoutError():
            return "timeout"
        case Exception():
            return "handler_error"
        case _:
            return "handler_panic"


def failure_reason(error: BaseException) -> str:
    """The message followed by every cause in the chain."""
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        message = str(cause)
        parts.append(f"{type(cause).__name__}: {message}" if message else type(cause).__name__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ": ".join(parts)


async def verify(backend: Backend, handle: Handle) -> Verdict:
    """After `PossiblySucceeded`: whether the call of this handle took effect."""
    try:
        info = await backend.read_execution_info(handle.execution_id)
        fields = await backend.read_exec_core_fields(handle.execution_id, ["current_lease_epoch"])
    except EngineError:
        return "unknown"
    if fields["current_lease_epoch"] != str(handle.lease_epoch):
        return "superseded"
    still_ours = info.state_vector.lifecycle_phase is LifecyclePhase.ACTIVE
    return "failed" if still_ours else "succeeded"
