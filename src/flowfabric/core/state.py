"""The state vector: six independent dimensions, one letter each in storage, and what they imply.

The record keeps the vector as one six-letter code in the order of `StateVector`'s fields.
`public_state` is derived, so that it can never disagree with the dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from flowfabric.core.errors import CorruptionError


class LifecyclePhase(StrEnum):
    """Where the execution is in its life."""

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
    """What the execution's current or next attempt is doing."""

    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


class PublicState(StrEnum):
    """The one-word state shown to people. `RESUMABLE` is accepted on input, never derived."""

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


class AttemptType(StrEnum):
    """Why an attempt was created."""

    INITIAL = "initial"
    RETRY = "retry"
    REPLAY = "replay"
    RECLAIM = "reclaim"
    FALLBACK = "fallback"


class AttemptRecordState(StrEnum):
    """The state on the attempt record itself."""

    CREATED = "created"
    STARTED = "started"
    SUSPENDED = "suspended"
    ENDED_SUCCESS = "ended_success"
    ENDED_FAILURE = "ended_failure"
    ENDED_CANCELLED = "ended_cancelled"
    INTERRUPTED_RECLAIMED = "interrupted_reclaimed"

    @property
    def terminal(self) -> bool:
        """Whether the attempt has ended."""
        return self not in _LIVE_ATTEMPT


_LIVE_ATTEMPT = frozenset(
    {AttemptRecordState.CREATED, AttemptRecordState.STARTED, AttemptRecordState.SUSPENDED}
)


class CancelSource(StrEnum):
    """Who cancelled. Any other text is accepted as a custom source."""

    OPERATOR_OVERRIDE = "operator_override"
    LEASE_HOLDER = "lease_holder"
    FLOW_CASCADE = "flow_cascade"
    SYSTEM_TIMEOUT = "system_timeout"


class ExpireReason(StrEnum):
    """Which deadline passed."""

    ATTEMPT_TIMEOUT = "attempt_timeout"
    EXECUTION_DEADLINE = "execution_deadline"


class FailureClass(StrEnum):
    """What kind of failure a category stands for."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRA_CRASH = "infra_crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @classmethod
    def classify(cls, category: str) -> FailureClass:
        """The class of a free-form category; an unknown one is transient."""
        return cls(category) if category in _FAILURE_CLASSES else cls.TRANSIENT


_FAILURE_CLASSES = frozenset(map(str, FailureClass))

_PHASES = {
    "s": LifecyclePhase.SUBMITTED,
    "r": LifecyclePhase.RUNNABLE,
    "a": LifecyclePhase.ACTIVE,
    "p": LifecyclePhase.SUSPENDED,
    "t": LifecyclePhase.TERMINAL,
}
_OWNERSHIPS = {
    "u": OwnershipState.UNOWNED,
    "l": OwnershipState.LEASED,
    "x": OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
    "v": OwnershipState.LEASE_REVOKED,
}
_ELIGIBILITIES = {
    "e": EligibilityState.ELIGIBLE_NOW,
    "d": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
    "c": EligibilityState.BLOCKED_BY_DEPENDENCIES,
    "b": EligibilityState.BLOCKED_BY_BUDGET,
    "q": EligibilityState.BLOCKED_BY_QUOTA,
    "r": EligibilityState.BLOCKED_BY_ROUTE,
    "l": EligibilityState.BLOCKED_BY_LANE_STATE,
    "o": EligibilityState.BLOCKED_BY_OPERATOR,
    "n": EligibilityState.NOT_APPLICABLE,
}
_BLOCKINGS = {
    "n": BlockingReason.NONE,
    "w": BlockingReason.WAITING_FOR_WORKER,
    "b": BlockingReason.WAITING_FOR_RETRY_BACKOFF,
    "r": BlockingReason.WAITING_FOR_RESUME_DELAY,
    "d": BlockingReason.WAITING_FOR_DELAY,
    "s": BlockingReason.WAITING_FOR_SIGNAL,
    "a": BlockingReason.WAITING_FOR_APPROVAL,
    "k": BlockingReason.WAITING_FOR_CALLBACK,
    "t": BlockingReason.WAITING_FOR_TOOL_RESULT,
    "c": BlockingReason.WAITING_FOR_CHILDREN,
    "u": BlockingReason.WAITING_FOR_BUDGET,
    "q": BlockingReason.WAITING_FOR_QUOTA,
    "g": BlockingReason.WAITING_FOR_CAPABLE_WORKER,
    "y": BlockingReason.WAITING_FOR_LOCALITY_MATCH,
    "o": BlockingReason.PAUSED_BY_OPERATOR,
    "p": BlockingReason.PAUSED_BY_POLICY,
    "f": BlockingReason.PAUSED_BY_FLOW_CANCEL,
}
_OUTCOMES = {
    "n": TerminalOutcome.NONE,
    "s": TerminalOutcome.SUCCESS,
    "f": TerminalOutcome.FAILED,
    "c": TerminalOutcome.CANCELLED,
    "x": TerminalOutcome.EXPIRED,
    "k": TerminalOutcome.SKIPPED,
}
_ATTEMPTS = {
    "n": AttemptState.NONE,
    "f": AttemptState.PENDING_FIRST_ATTEMPT,
    "r": AttemptState.RUNNING_ATTEMPT,
    "i": AttemptState.ATTEMPT_INTERRUPTED,
    "t": AttemptState.PENDING_RETRY_ATTEMPT,
    "p": AttemptState.PENDING_REPLAY_ATTEMPT,
    "z": AttemptState.ATTEMPT_TERMINAL,
}

#: The letters of each dimension, in code order.
CODE_LETTERS: dict[str, Mapping[str, StrEnum]] = {
    "lifecycle_phase": _PHASES,
    "ownership_state": _OWNERSHIPS,
    "eligibility_state": _ELIGIBILITIES,
    "blocking_reason": _BLOCKINGS,
    "terminal_outcome": _OUTCOMES,
    "attempt_state": _ATTEMPTS,
}
_LETTER_OF = tuple(
    {value: letter for letter, value in letters.items()} for letters in CODE_LETTERS.values()
)

_PUBLIC_BY_OUTCOME = {
    TerminalOutcome.SUCCESS: PublicState.COMPLETED,
    TerminalOutcome.FAILED: PublicState.FAILED,
    TerminalOutcome.CANCELLED: PublicState.CANCELLED,
    TerminalOutcome.EXPIRED: PublicState.EXPIRED,
    TerminalOutcome.SKIPPED: PublicState.SKIPPED,
    TerminalOutcome.NONE: PublicState.FAILED,
}
_PUBLIC_BY_ELIGIBILITY = {
    EligibilityState.ELIGIBLE_NOW: PublicState.WAITING,
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: PublicState.DELAYED,
    EligibilityState.BLOCKED_BY_DEPENDENCIES: PublicState.WAITING_CHILDREN,
    EligibilityState.BLOCKED_BY_BUDGET: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_QUOTA: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_ROUTE: PublicState.WAITING,
    EligibilityState.BLOCKED_BY_LANE_STATE: PublicState.WAITING,
    EligibilityState.BLOCKED_BY_OPERATOR: PublicState.WAITING,
    EligibilityState.NOT_APPLICABLE: PublicState.WAITING,
}
_PUBLIC_BY_PHASE = {
    LifecyclePhase.SUSPENDED: PublicState.SUSPENDED,
    LifecyclePhase.ACTIVE: PublicState.ACTIVE,
    LifecyclePhase.SUBMITTED: PublicState.WAITING,
}
_INDEX_BY_ELIGIBILITY = {
    EligibilityState.ELIGIBLE_NOW: "eligible",
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: "delayed",
    EligibilityState.BLOCKED_BY_DEPENDENCIES: "blocked:dependencies",
    EligibilityState.BLOCKED_BY_BUDGET: "blocked:budget",
    EligibilityState.BLOCKED_BY_QUOTA: "blocked:quota",
    EligibilityState.BLOCKED_BY_ROUTE: "blocked:route",
    EligibilityState.BLOCKED_BY_LANE_STATE: "blocked:lane",
    EligibilityState.BLOCKED_BY_OPERATOR: "blocked:operator",
    EligibilityState.NOT_APPLICABLE: "",
}
_INDEX_BY_PHASE = {
    LifecyclePhase.ACTIVE: "active",
    LifecyclePhase.SUSPENDED: "suspended",
    LifecyclePhase.TERMINAL: "terminal",
    LifecyclePhase.SUBMITTED: "",
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
    def from_code(cls, code: str, context: str = "execution") -> StateVector:
        """Read the stored form; an unreadable one is corruption, never coerced."""
        vector = _CACHE.get(code)
        if vector is None:
            vector = _CACHE[code] = _decode(code, context)
        return vector

    @property
    def code(self) -> str:
        """The stored form, six letters."""
        phase, ownership, eligibility, blocking, outcome, attempt = _LETTER_OF
        return (
            phase[self.lifecycle_phase]
            + ownership[self.ownership_state]
            + eligibility[self.eligibility_state]
            + blocking[self.blocking_reason]
            + outcome[self.terminal_outcome]
            + attempt[self.attempt_state]
        )

    @property
    def public_state(self) -> PublicState:
        """The state shown to people; total, so it never raises."""
        phase = self.lifecycle_phase
        if phase is LifecyclePhase.TERMINAL:
            return _PUBLIC_BY_OUTCOME[self.terminal_outcome]
        if phase is LifecyclePhase.RUNNABLE:
            return _PUBLIC_BY_ELIGIBILITY[self.eligibility_state]
        return _PUBLIC_BY_PHASE[phase]


# Bounded by the number of valid codes: corrupt ones raise and are never kept.
_CACHE: dict[str, StateVector] = {}


def _corrupt(context: str, message: str) -> CorruptionError:
    return CorruptionError("corruption", f"{context}: state: {message}")


def _decode(code: str, context: str) -> StateVector:
    if len(code) != 6:
        raise _corrupt(context, f"expected six letters, got {code!r}")
    for (dimension, letters), letter in zip(CODE_LETTERS.items(), code, strict=True):
        if letter not in letters:
            raise _corrupt(context, f"unknown {dimension} letter {letter!r} in {code!r}")
    return StateVector(
        _PHASES[code[0]],
        _OWNERSHIPS[code[1]],
        _ELIGIBILITIES[code[2]],
        _BLOCKINGS[code[3]],
        _OUTCOMES[code[4]],
        _ATTEMPTS[code[5]],
    )


_Dimension = TypeVar("_Dimension", bound=StrEnum)


def _named(
    fields: Mapping[str, str], name: str, dimension: type[_Dimension], context: str
) -> _Dimension:
    text = fields.get(name)
    try:
        return dimension(text)
    except ValueError:
        problem = "missing" if text is None else f"unknown value {text!r}"
        raise _corrupt(context, f"{name}: {problem}") from None


def parse_state(fields: Mapping[str, str], context: str = "execution") -> StateVector:
    """Read a vector from named dimensions, as reads and exports carry it.

    A `public_state` among the fields must name a public state; whether it agrees with the derived
    one is for the caller to report (`is_consistent`).
    """
    if "public_state" in fields:
        _named(fields, "public_state", PublicState, context)
    return StateVector(
        _named(fields, "lifecycle_phase", LifecyclePhase, context),
        _named(fields, "ownership_state", OwnershipState, context),
        _named(fields, "eligibility_state", EligibilityState, context),
        _named(fields, "blocking_reason", BlockingReason, context),
        _named(fields, "terminal_outcome", TerminalOutcome, context),
        _named(fields, "attempt_state", AttemptState, context),
    )


def is_consistent(vector: StateVector, public_state: str) -> bool:
    """Whether a public state seen elsewhere is the one the vector implies."""
    return vector.public_state == public_state


def index_suffix(vector: StateVector) -> str:
    """Which index of the lane holds the execution, for example ``blocked:budget``.

    ``""`` means none: the vector is transient or inconsistent, and must not become claimable.
    """
    if vector.lifecycle_phase is LifecyclePhase.RUNNABLE:
        return _INDEX_BY_ELIGIBILITY[vector.eligibility_state]
    return _INDEX_BY_PHASE[vector.lifecycle_phase]


def violations(vector: StateVector) -> list[str]:
    """The validity constraints that the vector breaks, empty when it is valid.

    V8 also needs the record's `delay_until` and is checked by the index reconciler.
    """
    phase = vector.lifecycle_phase
    attempt = vector.attempt_state
    terminal = phase is LifecyclePhase.TERMINAL
    active = phase is LifecyclePhase.ACTIVE
    leased = vector.ownership_state is OwnershipState.LEASED
    running = attempt is AttemptState.RUNNING_ATTEMPT
    interrupted = attempt is AttemptState.ATTEMPT_INTERRUPTED
    broken = (
        (
            terminal == (vector.terminal_outcome is TerminalOutcome.NONE),
            "V1: terminal if and only if there is an outcome",
        ),
        (
            active == (vector.ownership_state is OwnershipState.UNOWNED),
            "V2: active if and only if owned",
        ),
        (
            (phase is LifecyclePhase.RUNNABLE)
            == (vector.eligibility_state is EligibilityState.NOT_APPLICABLE),
            "V3: runnable if and only if eligibility applies",
        ),
        (
            running != (active and leased) or (active and not leased and not interrupted),
            "V4: an attempt runs exactly while leased; a lost lease interrupts it",
        ),
        (
            phase is LifecyclePhase.SUSPENDED and not interrupted,
            "V5: a suspended execution has an interrupted attempt",
        ),
        (
            terminal and not _ends_attempt(vector),
            "V6: a terminal execution has a finished attempt, or never had one",
        ),
        (
            (terminal or (active and leased)) and vector.blocking_reason is not BlockingReason.NONE,
            "V7: nothing blocks a terminal or a leased execution",
        ),
    )
    return [message for failed, message in broken if failed]


def _ends_attempt(vector: StateVector) -> bool:
    attempt = vector.attempt_state
    if attempt is AttemptState.NONE:
        return vector.terminal_outcome is TerminalOutcome.SKIPPED
    return attempt in _TERMINAL_ATTEMPTS


# A cancel or expiry keeps the pending value of an execution that was never claimed; a skipped flow
# member that was replayed is such an execution too.
_TERMINAL_ATTEMPTS = frozenset(
    {
        AttemptState.ATTEMPT_TERMINAL,
        AttemptState.PENDING_FIRST_ATTEMPT,
        AttemptState.PENDING_REPLAY_ATTEMPT,
    }
)
