"""What holds for every valid state of an execution, and which index holds it (01 §4)."""

from __future__ import annotations

from flowfabric.core.state import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    StateVector,
    TerminalOutcome,
)

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
