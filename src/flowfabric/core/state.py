"""The state of an execution: six dimensions, stored as one letter each."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from flowfabric.core.errors import CorruptionError


class LifecyclePhase(StrEnum):
    """The phase of an execution."""

    SUBMITTED = "submitted"
    RUNNABLE = "runnable"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


class OwnershipState(StrEnum):
    """Who owns the execution."""

    UNOWNED = "unowned"
    LEASED = "leased"
    LEASE_EXPIRED_RECLAIMABLE = "lease_expired_reclaimable"
    LEASE_REVOKED = "lease_revoked"


class EligibilityState(StrEnum):
    """Whether the execution may be claimed now."""

    ELIGIBLE_NOW = "eligible_now"
    NOT_ELIGIBLE_UNTIL_TIME = "not_eligible_until_time"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    BLOCKED_BY_BUDGET = "blocked_by_budget"
    BLOCKED_BY_QUOTA = "blocked_by_quota"
    BLOCKED_BY_ROUTE = "blocked_by_route"
    BLOCKED_BY_LANE_STATE = "blocked_by_lane_state"
    BLOCKED_BY_OPERATOR = "blocked_by_operator"
    NOT_APPLICABLE = "not_applicable"


class BlockingReason(StrEnum):
    """What the execution waits for."""

    NONE = "none"
    WAITING_FOR_WORKER = "waiting_for_worker"
    WAITING_FOR_RETRY_BACKOFF = "waiting_for_retry_backoff"
    WAITING_FOR_RESUME_DELAY = "waiting_for_resume_delay"
    WAITING_FOR_DELAY = "waiting_for_delay"
    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_CHILDREN = "waiting_for_children"
    WAITING_FOR_BUDGET = "waiting_for_budget"
    WAITING_FOR_QUOTA = "waiting_for_quota"
    WAITING_FOR_CAPABLE_WORKER = "waiting_for_capable_worker"
    WAITING_FOR_LOCALITY_MATCH = "waiting_for_locality_match"
    PAUSED_BY_OPERATOR = "paused_by_operator"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_FLOW_CANCEL = "paused_by_flow_cancel"


class TerminalOutcome(StrEnum):
    """How the execution ended."""

    NONE = "none"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptState(StrEnum):
    """The state of the current or next attempt."""

    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


class PublicState(StrEnum):
    """The one-word state shown to people. `RESUMABLE` is only accepted as input."""

    WAITING = "waiting"
    DELAYED = "delayed"
    RATE_LIMITED = "rate_limited"
    WAITING_CHILDREN = "waiting_children"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    RESUMABLE = "resumable"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptRecordState(StrEnum):
    """The state of an attempt record."""

    CREATED = "created"
    STARTED = "started"
    SUSPENDED = "suspended"
    ENDED_SUCCESS = "ended_success"
    ENDED_FAILURE = "ended_failure"
    ENDED_CANCELLED = "ended_cancelled"
    INTERRUPTED_RECLAIMED = "interrupted_reclaimed"


class ExpireReason(StrEnum):
    """Which deadline passed."""

    ATTEMPT_TIMEOUT = "attempt_timeout"
    EXECUTION_DEADLINE = "execution_deadline"


_LETTERS: dict[str, tuple[type[StrEnum], str]] = {
    "lifecycle_phase": (LifecyclePhase, "srapt"),
    "ownership_state": (OwnershipState, "ulxv"),
    "eligibility_state": (EligibilityState, "edcbqrlon"),
    "blocking_reason": (BlockingReason, "nwbrdsaktcuqgyopf"),
    "terminal_outcome": (TerminalOutcome, "nsfcxk"),
    "attempt_state": (AttemptState, "nfritpz"),
}
CODE_LETTERS: dict[str, Mapping[str, StrEnum]] = {
    dimension: dict(zip(letters, values, strict=True))
    for dimension, (values, letters) in _LETTERS.items()
}
"""The values of each dimension by their letters, in code order."""

_LETTER_OF = tuple(dict(zip(values, letters, strict=True)) for values, letters in _LETTERS.values())

_PUBLIC_BY_OUTCOME = {
    TerminalOutcome.SUCCESS: PublicState.COMPLETED,
    TerminalOutcome.CANCELLED: PublicState.CANCELLED,
    TerminalOutcome.EXPIRED: PublicState.EXPIRED,
    TerminalOutcome.SKIPPED: PublicState.SKIPPED,
}
_PUBLIC_BY_ELIGIBILITY = {
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: PublicState.DELAYED,
    EligibilityState.BLOCKED_BY_DEPENDENCIES: PublicState.WAITING_CHILDREN,
    EligibilityState.BLOCKED_BY_BUDGET: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_QUOTA: PublicState.RATE_LIMITED,
}
_HELD_BACK = frozenset(
    {
        EligibilityState.BLOCKED_BY_BUDGET,
        EligibilityState.BLOCKED_BY_QUOTA,
        EligibilityState.BLOCKED_BY_ROUTE,
        EligibilityState.BLOCKED_BY_LANE_STATE,
        EligibilityState.BLOCKED_BY_OPERATOR,
    }
)
_PUBLIC_BY_PHASE = {
    LifecyclePhase.SUSPENDED: PublicState.SUSPENDED,
    LifecyclePhase.ACTIVE: PublicState.ACTIVE,
    LifecyclePhase.SUBMITTED: PublicState.WAITING,
}


class StateVector(msgspec.Struct, frozen=True):
    """The six independent dimensions of an execution's state.

    >>> StateVector.from_code("ruewnf").public_state
    <PublicState.WAITING: 'waiting'>
    """

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    terminal_outcome: TerminalOutcome
    attempt_state: AttemptState

    @classmethod
    def from_code(cls, code: str, context: str = "execution") -> "StateVector":
        """Read the stored form; an unreadable one is `corruption`."""
        vector = _CACHE.get(code)
        if vector is None:
            vector = _CACHE[code] = _decode(code, context)
        return vector

    @property
    def code(self) -> str:
        """The stored form, six letters."""
        values: tuple[StrEnum, ...] = msgspec.structs.astuple(self)
        return "".join(letter[value] for letter, value in zip(_LETTER_OF, values, strict=True))

    @property
    def is_blocked(self) -> bool:
        """Whether an admission check, an operator or the lane holds the execution back."""
        return self.eligibility_state in _HELD_BACK

    @property
    def public_state(self) -> PublicState:
        """The state shown to people."""
        phase = self.lifecycle_phase
        if phase is LifecyclePhase.TERMINAL:
            return _PUBLIC_BY_OUTCOME.get(self.terminal_outcome, PublicState.FAILED)
        if phase is LifecyclePhase.RUNNABLE:
            return _PUBLIC_BY_ELIGIBILITY.get(self.eligibility_state, PublicState.WAITING)
        return _PUBLIC_BY_PHASE[phase]


# Bounded by the number of valid codes, because corrupt ones raise and are not cached.
_CACHE: dict[str, StateVector] = {}


def _corrupt(context: str, message: str) -> CorruptionError:
    return CorruptionError("corruption", f"{context}: state: {message}")


def _decode(code: str, context: str) -> StateVector:
    if len(code) != 6:
        raise _corrupt(context, f"expected six letters, got {code!r}")
    values: list[Any] = []
    for (dimension, letters), letter in zip(CODE_LETTERS.items(), code, strict=True):
        if letter not in letters:
            raise _corrupt(context, f"unknown {dimension} letter {letter!r} in {code!r}")
        values.append(letters[letter])
    return StateVector(*values)
