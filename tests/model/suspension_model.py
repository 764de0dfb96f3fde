"""What suspensions promise, as plain Python: pauses, waitpoints, signals, and time as a number.

Written from the rules, not from the Lua. Every operation answers in one word: the result, or the
error code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowfabric.core.conditions import (
    AcceptedSignal,
    AllOf,
    Condition,
    Count,
    OperatorOnly,
    Single,
    TimeoutOnly,
    accepts,
    referenced_waitpoint_keys,
    satisfied,
)

TTL = 10_000_000


@dataclass
class Waitpoint:
    """A slot for signals."""

    waitpoint_id: str
    key: str
    token: str
    state: str
    expires_at: int | None
    suspension: Pause | None = None
    signals: list[AcceptedSignal] = field(default_factory=list[AcceptedSignal])
    keys: dict[str, str] = field(default_factory=dict[str, str])
    """Idempotency keys and the signal each stands for."""
    close_reason: str | None = None


@dataclass
class Pause:
    """One suspension."""

    suspension_id: str
    condition: Condition
    waitpoints: list[Waitpoint]
    timeout_at: int | None
    behavior: str
    delay: int
    accepted: list[AcceptedSignal] = field(default_factory=list[AcceptedSignal])
    contributed: list[str] = field(default_factory=list[str])
    closed: str | None = None
    trigger: str | None = None
    claimed_epoch: int | None = None


@dataclass
class Run:
    """One execution, which has at most one attempt here."""

    state: str = "waiting"
    epoch: int = 0
    started: bool = False
    pause: Pause | None = None
    met: tuple[int, list[str]] | None = None
    delay_until: int | None = None
    waitpoints: dict[str, Waitpoint] = field(default_factory=dict[str, Waitpoint])
    recorded: int = 0

    @property
    def terminal(self) -> bool:
        return self.state in ("completed", "cancelled", "failed", "expired")

    # --- work ---------------------------------------------------------------------------

    def claim(self) -> str:
        if self.state != "waiting":
            return "refused"
        mode = "resumed" if self.started else "fresh"
        self.state, self.started = "active", True
        self.epoch += 1
        pause = self.pause
        if pause is not None and pause.closed is not None and pause.claimed_epoch is None:
            pause.claimed_epoch = self.epoch
        return mode

    def cause(self) -> tuple[str, str] | None:
        """Why the present lease was resumed: trigger and close reason."""
        pause = self.pause
        if pause is None or pause.claimed_epoch != self.epoch:
            return None
        return str(pause.trigger), str(pause.closed)

    def observed(self) -> list[str]:
        """The signals told to the present lease."""
        if self.met is not None and self.met[0] == self.epoch:
            return self.met[1]
        pause = self.pause
        if pause is None or pause.claimed_epoch != self.epoch or pause.trigger != "signal":
            return []
        return pause.contributed

    def complete(self) -> str:
        return self._end("completed", "never_committed") if self.state == "active" else "refused"

    def cancel(self) -> str:
        if self.terminal:
            return "cancelled" if self.state == "cancelled" else "refused"
        return self._end("cancelled", "cancelled")

    def give_back(self) -> str:
        if self.state != "active":
            return "refused"
        self.state = "waiting"
        if self.pause is not None and self.pause.claimed_epoch is None:
            self.pause.claimed_epoch = -1
        return "ok"

    def promote(self, now: int) -> None:
        if self.state == "delayed" and self.delay_until is not None and self.delay_until <= now:
            self.state, self.delay_until = "waiting", None

    def _end(self, state: str, reason: str) -> str:
        if self.state == "suspended":
            self._close(reason, None)
        self.state, self.delay_until = state, None
        for waitpoint in self.waitpoints.values():
            if waitpoint.state == "pending":
                waitpoint.state, waitpoint.close_reason = "closed", reason
        return state

    # --- pauses -------------------------------------------------------------------------

    def suspend(self, pause: Pause) -> str:
        """Park on fresh waitpoints."""
        self.pause = pause
        self.state = "suspended"
        for waitpoint in pause.waitpoints:
            waitpoint.suspension = pause
            self.waitpoints[waitpoint.waitpoint_id] = waitpoint
        return "suspended"

    def use(self, pause: Pause, now: int) -> str:
        """Park on a pending waitpoint, or go on when it has enough."""
        (waitpoint,) = pause.waitpoints
        if self.state != "active":
            return "refused"
        if waitpoint.state != "pending":
            return "waitpoint_not_pending"
        if waitpoint.expires_at is None or waitpoint.expires_at <= now:
            return "pending_waitpoint_expired"
        if any(key != waitpoint.key for key in referenced_waitpoint_keys(pause.condition)):
            return "invalid_input"
        for seen in waitpoint.signals:
            _contribute(pause, seen)
            if satisfied(pause.condition, pause.accepted):
                waitpoint.state, waitpoint.close_reason = "closed", "resumed"
                self.met = (self.epoch, pause.contributed)
                return "already_satisfied"
        waitpoint.state, waitpoint.expires_at = "active", pause.timeout_at
        return self.suspend(pause)

    def resume(self) -> str:
        if self.state != "suspended":
            return "execution_not_suspended"
        self._close("resumed", "operator")
        self.state = "waiting"
        return "waiting"

    def expire(self, now: int) -> str:
        pause = self.pause
        if self.state != "suspended" or pause is None:
            return "not_suspended_cleaned"
        if pause.timeout_at is None or pause.timeout_at > now:
            return "not_yet_due"
        if pause.behavior == "escalate":
            pause.timeout_at = None
            for waitpoint in pause.waitpoints:
                waitpoint.expires_at = None
            return "escalate"
        if pause.behavior == "auto_resume":
            self._close("timed_out_auto_resume", "timeout")
            self.state = "waiting"
            return "auto_resume"
        states = {"fail": "failed", "cancel": "cancelled", "expire": "expired"}
        self._end(states[pause.behavior], f"timed_out_{pause.behavior}")
        return pause.behavior

    def _close(self, reason: str, trigger: str | None) -> None:
        assert self.pause is not None
        self.pause.closed, self.pause.trigger = reason, trigger
        for waitpoint in self.pause.waitpoints:
            if waitpoint.state == "active":
                waitpoint.state, waitpoint.close_reason = "closed", reason

    # --- waitpoints ---------------------------------------------------------------------

    def close_waitpoint(self, waitpoint: Waitpoint) -> str:
        if waitpoint.state == "closed":
            return "False"
        waitpoint.state, waitpoint.close_reason = "closed", "proactive_close"
        return "True"

    def expire_waitpoint(self, waitpoint: Waitpoint, now: int) -> str:
        if waitpoint.state != "pending":
            return "not_pending_cleaned"
        if waitpoint.expires_at is not None and waitpoint.expires_at > now:
            return "not_yet_due"
        waitpoint.state, waitpoint.close_reason = "closed", "never_committed"
        return "closed"

    def signal(self, waitpoint: Waitpoint, seen: AcceptedSignal, key: str, now: int) -> str:
        """What a signal with the right token does."""
        if key and key in waitpoint.keys:
            return f"duplicate {waitpoint.keys[key]}"
        refusal = self._too_late(waitpoint, now)
        if refusal is not None:
            return refusal
        self._record(waitpoint, seen, key)
        if waitpoint.state == "pending":
            return "buffered_for_pending_waitpoint"
        pause = self.pause
        assert pause is not None
        effect = _contribute(pause, seen)
        if effect != "appended_to_waitpoint" or not satisfied(pause.condition, pause.accepted):
            return effect
        self._close("resumed", "signal")
        self.state = "delayed" if pause.delay else "waiting"
        self.delay_until = now + pause.delay if pause.delay else None
        return "resume_condition_satisfied"

    def _too_late(self, waitpoint: Waitpoint, now: int) -> str | None:
        if self.terminal:
            return "target_not_signalable"
        if waitpoint.state == "pending":
            late = waitpoint.expires_at is not None and waitpoint.expires_at < now
            return "pending_waitpoint_expired" if late else None
        if self.state != "suspended":
            return "target_not_signalable"
        mine = waitpoint.state == "active" and waitpoint.suspension is self.pause
        return None if mine else "waitpoint_closed"

    def _record(self, waitpoint: Waitpoint, seen: AcceptedSignal, key: str) -> None:
        waitpoint.signals.append(seen)
        self.recorded += 1
        if key:
            waitpoint.keys[key] = seen.signal_id


def _leaves(node: Condition) -> list[Single | Count]:
    if isinstance(node, AllOf):
        return [leaf for member in node.members for leaf in _leaves(member)]
    return [] if isinstance(node, OperatorOnly | TimeoutOnly) else [node]


def _hits(leaf: Single | Count, seen: AcceptedSignal) -> tuple[bool, bool]:
    """Whether a leaf refers to the signal's waitpoint, and whether it accepts the signal."""
    keys = (leaf.waitpoint_key,) if isinstance(leaf, Single) else leaf.waitpoints
    return seen.waitpoint_key in keys, (
        seen.waitpoint_key in keys and accepts(leaf.signal_name, seen.signal_name)
    )


def _satisfier(leaf: Single | Count, seen: AcceptedSignal) -> object:
    if isinstance(leaf, Single):
        return True
    return {
        "DistinctWaitpoints": seen.waitpoint_key,
        "DistinctSignals": seen.signal_id,
        "DistinctSources": (seen.source_type, seen.source_identity),
    }[leaf.count_kind.value]


def _contribute(pause: Pause, seen: AcceptedSignal) -> str:
    """The effect of a signal that does not yet satisfy."""
    leaves = _leaves(pause.condition)
    hits = [_hits(leaf, seen) for leaf in leaves]
    before = list(pause.accepted)
    pause.accepted.append(seen)
    if not any(accepted for _, accepted in hits):
        if not isinstance(pause.condition, AllOf | Count):
            return "no_op"
        referred = any(refers for refers, _ in hits)
        return "signal_ignored_matcher_failed" if referred else "signal_ignored_not_in_condition"
    new = any(
        accepted and not any(_satisfier(leaf, seen) == _satisfier(leaf, old) for old in earlier)
        for leaf, (_, accepted) in zip(leaves, hits, strict=True)
        for earlier in [[old for old in before if _hits(leaf, old)[1]]]
    )
    if not new:
        return "appended_to_waitpoint_duplicate"
    pause.contributed.append(seen.signal_id)
    return "appended_to_waitpoint"
