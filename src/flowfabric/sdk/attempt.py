"""What every operation of a claimed task builds on: its claim, its lease and its single end."""

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
"""How long to wait before releasing a dropped task; prevents a tight loop of claims and drops."""
# The keeper's thread may report a loss while a call of the task is in flight.
_loss_lock = threading.Lock()


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
    _releasing_by: str | None = None
    _late_loss: errors.LeaseLost | None = None
    _writer: FrameWriter | None = None
    trace: AttemptTrace | None = None
    """The spans of this attempt; None while tracing is off."""

    def __post_init__(self) -> None:
        claim = self.claim
        self.resume_cause = claim.resume_cause
        self.held = self._owner.keeper.hold(
            claim.handle, self, self.since, claim.attempt_timeout_ms
        )

    def __del__(self) -> None:
        if self.finished_by is None:
            self.finished_by = "task_dropped"
            self._owner.task_dropped(self.held)

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
        """Grows with every claim: pass it to external systems as a fencing token."""
        return self.claim.handle.lease_epoch

    @property
    def lane_id(self) -> str:
        """The lane it came from."""
        return self.claim.handle.lane_id

    @property
    def execution_kind(self) -> str:
        """The name of the task."""
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
        """The fields of every log record about this task."""
        return {
            "execution_id": str(self.execution_id),
            "attempt_index": self.attempt_index,
            "lane": self.lane_id,
            "kind": self.execution_kind,
            "worker_caps_hash": self._owner.caps_hash,
        }

    @property
    def consecutive_renewal_failures(self) -> int:
        """How many renewals failed since the last success."""
        return self.held.failures

    def is_lease_healthy(self) -> bool:
        """Whether the lease is held. Check it before an irreversible side effect."""
        return self.finished_by is None and self.held.healthy

    @property
    def may_hold_lease(self) -> bool:
        """Whether a repeated call may still succeed: the lease is not known to have ended."""
        return self.finished_by is None and self.held.alive

    def lease_is_lost(self, code: str, reason: str) -> None:
        """Note that the lease is gone for good; called from the keeper's thread."""
        lost = errors.LeaseLost(code, reason, str(self.execution_id))
        with _loss_lock:
            if self._releasing_by is not None:
                # Our own call may have ended the lease, so wait for its answer.
                self._late_loss = lost
                return
        self._report_loss(lost)

    def _report_loss(self, lost: errors.LeaseLost) -> None:
        self.lease_lost = lost
        if self.on_lease_lost is not None:
            self.on_lease_lost(lost)

    def _require_lease(self) -> None:
        """Raise an error if the task has ended or its lease is lost."""
        if self.finished_by is not None:
            raise errors.TaskFinishedError(str(self.execution_id), self.finished_by)
        lost = self.lease_lost
        if lost is not None:
            raise errors.LeaseLost(lost.code, lost.reason, lost.execution_id)

    async def _repeat_call(self, call: Callable[[], Awaitable[T]], tries: int = -1) -> T:
        """Repeat a replay-safe call after transport faults, while the lease may be valid."""
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

    async def _call_releasing(
        self,
        op: str,
        call: Callable[[], Awaitable[T]],
        finishes: Callable[[T], bool] = lambda _: True,
        *,
        errors_finish: bool = True,
    ) -> T:
        """Make a lease-releasing call. Any answer from the engine ends this task.

        Except outcomes for which `finishes` is false and, without `errors_finish`, errors: a
        refused suspension does not affect the lease.
        """
        self._require_lease()
        if self._releasing_by is not None:
            raise errors.TaskFinishedError(str(self.execution_id), self._releasing_by)
        self._releasing_by = op
        try:
            outcome = await self._repeat_call(call, _TRIES)
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
            with _loss_lock:
                self._releasing_by = None
                late, self._late_loss = self._late_loss, None
            if late is not None and self.finished_by is None:
                self._report_loss(late)

    def finish(self, how: str) -> None:
        """Stop renewing and return the permit; only the first call counts."""
        if self.finished_by is None:
            self.finished_by = how
            if self.trace is not None:
                self.trace.finished(how)
            self._owner.keeper.release(self.held)
            self._owner.release(self.held)

    async def discard(self, *, pause_s: float = DROP_PAUSE_S) -> None:
        """Drop the task without a result and release its lease after a pause, best effort."""
        if self.finished_by is not None:
            return
        warn_dropped(self.execution_id)
        try:
            await asyncio.sleep(pause_s)
            if self.held.alive and self._releasing_by is None:
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
    """Whether the call that raised `PossiblySucceeded` took effect."""
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
        # The same attempt gets another lease only after it was paused.
        return "succeeded"
    ours = own.attempt_state == "started" and own.lease_epoch == handle.lease_epoch
    return "failed" if ours else "superseded"
