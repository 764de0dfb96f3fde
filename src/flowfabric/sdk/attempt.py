"""The base of every operation of a claimed task: its claim, its lease, its single end."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from flowfabric.core import errors
from flowfabric.core.backoff import Backoff
from flowfabric.core.contracts.leases import Claim, Handle, ResumeCause
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.streams import FrameWriter
from flowfabric.engine.layers.tracing import AttemptTrace
from flowfabric.sdk.lease_keeper import HeldLease

if TYPE_CHECKING:
    from flowfabric.sdk.worker import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 3
_PAUSES_S = (0.1, 1.0)
DROP_PAUSE_S = 0.1
"""How long a dropped task keeps its lease, so that code that drops every task does not spin."""
# The keeper's thread reports a loss while a call of the task may be in flight.
_loss = threading.Lock()


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class HeldAttempt:
    """A claimed attempt and its lease. At most one lease-releasing call succeeds."""

    _owner: "Worker"
    claim: Claim
    since: float
    """When the claim was sent, on the monotonic clock."""
    finished_by: str | None = None
    lease_lost: errors.LeaseLost | None = None
    """Why the lease is gone; None while it is held."""
    on_lease_lost: Callable[[errors.LeaseLost], None] | None = None
    """Called once when the lease is lost, from the keeper's thread."""
    resume_cause: ResumeCause | None = None
    """What ended the last suspension."""
    held: HeldLease = field(init=False)
    _landing: str | None = None
    _late_loss: errors.LeaseLost | None = None
    _writer: FrameWriter | None = None
    trace: AttemptTrace | None = None
    """Its spans; None while tracing is off."""

    def __post_init__(self) -> None:
        claim = self.claim
        self.resume_cause = claim.resume_cause
        self.held = self._owner.keeper.hold(
            claim.handle, self, self.since, claim.attempt_timeout_ms
        )

    def __del__(self) -> None:
        if self.finished_by is None:
            self.finished_by = "forgotten"
            self._owner.forgotten(self.held)

    @property
    def handle(self) -> Handle:
        """The proof of ownership that operations carry."""
        return self.claim.handle

    @property
    def backend(self) -> Backend:
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

    @property
    def log_fields(self) -> dict[str, str | int]:
        """What every log record about it carries."""
        return {
            "execution_id": str(self.execution_id),
            "attempt_index": self.attempt_index,
            "lane": self.lane_id,
            "kind": self.execution_kind,
            "worker_caps_hash": self._owner.caps_hash,
        }

    @property
    def consecutive_renewal_failures(self) -> int:
        """Renewals that failed since the last success."""
        return self.held.failures

    def is_lease_healthy(self) -> bool:
        """Check this before a side effect that cannot be undone."""
        return self.finished_by is None and self.held.healthy

    @property
    def may_hold_lease(self) -> bool:
        """Whether the lease is not known to be over, so that a repeated call may succeed."""
        return self.finished_by is None and self.held.alive

    def lease_is_lost(self, code: str, reason: str) -> None:
        """Note that the lease is gone for good; called from the keeper's thread."""
        lost = errors.LeaseLost(code, reason, str(self.execution_id))
        with _loss:
            if self._landing is not None:
                # Our own call may be what ended it: its answer decides.
                self._late_loss = lost
                return
        self._lose(lost)

    def _lose(self, lost: errors.LeaseLost) -> None:
        self.lease_lost = lost
        if self.on_lease_lost is not None:
            self.on_lease_lost(lost)

    def _require_lease(self) -> None:
        """Raise when the task has ended or its lease is lost."""
        if self.finished_by is not None:
            raise errors.TaskFinishedError(str(self.execution_id), self.finished_by)
        lost = self.lease_lost
        if lost is not None:
            raise errors.LeaseLost(lost.code, lost.reason, lost.execution_id)

    async def _repeat(self, call: Callable[[], Awaitable[T]], tries: int = -1) -> T:
        """Repeat a replay-safe call after transport faults, while the lease may last."""
        backoff, ambiguous = Backoff(*_PAUSES_S), False
        while True:
            try:
                return await call()
            except errors.TransportError as error:
                tries -= 1
                error.ambiguous = ambiguous = ambiguous or error.ambiguous
                if not tries or not error.retryable or not self.may_hold_lease:
                    raise
            await asyncio.sleep(backoff.jittered_s())

    async def _land(
        self,
        op: str,
        call: Callable[[], Awaitable[T]],
        finishes: Callable[[T], bool] = lambda _: True,
        *,
        errors_finish: bool = True,
    ) -> T:
        """Make a lease-releasing call. Any answer of the engine ends this task.

        Exceptions are outcomes that do not `finish`, and errors unless `errors_finish`: a
        suspension that was refused leaves the lease as it was.
        """
        self._require_lease()
        if self._landing is not None:
            raise errors.TaskFinishedError(str(self.execution_id), self._landing)
        self._landing = op
        try:
            outcome = await self._repeat(call, _TRIES)
        except errors.TransportError as error:
            if not error.ambiguous:
                raise
            unknown = errors.PossiblySucceeded(op, str(self.execution_id), str(error))
            unknown.verifier = partial(verify, self._owner.backend, self.handle, op)
            raise unknown from error
        except errors.EngineError as error:
            if errors_finish and not isinstance(error, errors.ValidationError):
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

    def finish(self, how: str) -> None:
        """Stop renewing and return the permit; only the first call counts."""
        if self.finished_by is None:
            self.finished_by = how
            if self.trace is not None:
                self.trace.finished(how)
            self._owner.keeper.release(self.held)
            self._owner.release(self.held)

    async def discard(self, *, pause_s: float = DROP_PAUSE_S) -> None:
        """Drop the task without a result: after a short pause, release the lease, best effort."""
        if self.finished_by is not None:
            return
        warn_dropped(self.execution_id)
        try:
            await asyncio.sleep(pause_s)
            if self.held.alive and self._landing is None:
                await self._owner.backend.executions.delay(self.handle, 1)
        except errors.EngineError as error:
            log.debug("could not release %s: %s", self.execution_id, error)
        finally:
            self.finish("discard")


def warn_dropped(execution_id: ExecutionId) -> None:
    """Log that a task was dropped without being completed, failed or released."""
    extra = {"action": "task_dropped", "execution_id": execution_id}
    text = "%s dropped without terminal operation — lease will expire"
    log.warning(text, execution_id.short, extra=extra)


_ENDED_BY = {"complete": "ended_success", "fail": "ended_failure", "cancel": "ended_cancelled"}


async def verify(backend: Backend, handle: Handle, op: str) -> errors.Verdict:
    """After `PossiblySucceeded`: whether the call of this handle took effect."""
    try:
        attempts = await backend.reads.read_attempts(handle.execution_id)
    except errors.EngineError:
        return "unknown"
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
        # Only after a pause does the same attempt continue under another lease.
        return "succeeded"
    ours = own.attempt_state == "started" and own.lease_epoch == handle.lease_epoch
    return "failed" if ours else "superseded"
