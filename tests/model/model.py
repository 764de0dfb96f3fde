"""What the engine promises, as plain Python: one lane, one partition, time as a number.

Written from the rules, not from the Lua: no keys, no storage, only executions and what each
operation does to them. Every operation answers as the engine does, in one word: the result, or the
error code.
"""

from __future__ import annotations

from collections.abc import Callable

from flowfabric.core.ids import ExecutionId
from tests.model.parts import (
    BACKING_OFF,
    EXPIRED,
    LEASED,
    NEW_DELAYED,
    PAUSED,
    PAUSED_UNTIL,
    REPLAYED,
    RETENTION_MS,
    REVOKED,
    Attempt,
    Execution,
    Lease,
    Offer,
    Policy,
)

NEVER_RETRIED = {
    *("permanent", "cancelled", "budget_exceeded"),
    *("step_kind_mismatch", "extractor_payload_decode"),
}
MAX_REPLAYS = 10
OUTCOMES = {"success": "s", "failed": "f", "cancelled": "c", "expired": "x"}
ATTEMPT_ENDS = {
    "success": "ended_success",
    "failed": "ended_failure",
    "cancelled": "ended_cancelled",
    "expired": "ended_failure",
}


class Model:
    """The engine as it should be."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.executions: dict[ExecutionId, Execution] = {}
        self.lane_state = "active"
        self.reclaim_grace = 0

    @property
    def closed(self) -> bool:
        """Whether the lane hands out nothing."""
        return self.lane_state in ("paused", "disabled")

    # --- creating ---------------------------------------------------------------------

    def create(
        self,
        execution_id: ExecutionId,
        policy: Policy,
        priority: int,
        delay_until: int | None,
        namespace: str,
    ) -> str:
        if self.lane_state in ("draining", "disabled"):
            return "lane_not_accepting"
        made = Execution(execution_id, self.now, priority, policy, namespace)
        if delay_until is not None and delay_until > self.now:
            made.code, made.delay_until = NEW_DELAYED, delay_until
        if policy.lifetime_ms:
            made.deadline = self.now + policy.lifetime_ms
        self.executions[execution_id] = made
        return made.vector.public_state.value

    # --- leases -----------------------------------------------------------------------

    def _open(self, held: Execution, mode: str, worker: str, ttl: int) -> tuple[str, int, int]:
        """Give a lease; returns attempt type, index and epoch."""
        held.epoch += 1
        limit = held.policy.attempt_timeout_ms
        if mode == "resumed":
            attempt = held.attempts[-1]
            attempt.epoch, attempt.state, attempt.marker = held.epoch, "started", None
            limit = held.remaining or limit
        else:
            kinds = {"f": "initial", "t": "retry", "p": "replay"}
            kind = "reclaim" if mode == "reclaimed" else kinds[held.code[5]]
            if mode == "reclaimed":
                held.attempts[-1].state = "interrupted_reclaimed"
                held.reclaims += 1
            held.attempts.append(Attempt("", kind, held.epoch))
            held.progress = None
        held.code, held.worker, held.expires_at = LEASED, worker, self.now + ttl
        held.timer = self.now + max(1, limit) if limit else None
        held.remaining = held.delay_until = held.grant_until = None
        held.events.append("reclaimed" if mode == "reclaimed" else "acquired")
        return held.attempts[-1].kind, len(held.attempts) - 1, held.epoch

    def bind(self, lease: Lease) -> None:
        """Note the ids the claim was given; a resumed attempt keeps its own."""
        held = self.executions[lease.execution_id]
        held.lease_id = lease.lease_id
        attempt = held.attempts[-1]
        assert attempt.attempt_id in ("", lease.attempt_id)
        attempt.attempt_id = lease.attempt_id

    def _covered(self, held: Execution, offer: Offer) -> bool:
        knows = "job" in offer.tasks or not held.waits_for_task
        return knows and (offer.gpu or not held.policy.needs_gpu)

    def _claimable(self, held: Execution, offer: Offer) -> str | None:
        """How it can be taken now, if it can."""
        if held.namespace != offer.serves or not self._covered(held, offer):
            return None
        if held.grant_until is not None and held.grant_until >= self.now:
            return None
        if held.code == EXPIRED and held.expires_at + self.reclaim_grace > self.now:
            return None
        if held.code in (EXPIRED, REVOKED):
            return "reclaimed"
        if held.phase == "runnable" and held.code[2] == "e":
            return "resumed" if held.code == PAUSED else "fresh"
        return None

    def claim_many(
        self, count: int, worker: str, ttl: int, offer: Offer
    ) -> list[tuple[ExecutionId, str, str, int, int]]:
        """Id, mode, attempt type, index and epoch of each claim, in order."""
        found: list[tuple[ExecutionId, str, str, int, int]] = []
        if self.closed:
            return found
        for held in sorted(self.executions.values(), key=lambda e: (e.score, e.execution_id)):
            mode = self._claimable(held, offer)
            if mode is None:
                continue
            if len(found) == count:
                break
            if offer.no_others and "job" not in offer.tasks:
                held.waits_for_task = True
                continue
            if mode == "reclaimed" and held.reclaims >= held.policy.reclaim_cap:
                self._end(held, "failed", "reclaim_cap")
                continue
            found.append((held.execution_id, mode, *self._open(held, mode, worker, ttl)))
        return found

    def takeable(self, offer: Offer) -> int:
        """How many a claim would find now."""
        held = self.executions.values()
        return 0 if self.closed else sum(self._claimable(each, offer) is not None for each in held)

    def issue_grant(self, execution_id: ExecutionId, ttl: int, offer: Offer) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase != "runnable" or held.code[2] != "e" or self.closed:
            return "execution_not_eligible"
        if held.grant_until is not None and held.grant_until >= self.now:
            return "grant_already_exists"
        if not self._covered(held, offer):
            return "capability_mismatch"
        held.grant_until = self.now + ttl
        return "granted"

    def use_grant(self, execution_id: ExecutionId, worker: str, ttl: int) -> str:
        """Consume the last grant that was issued, if it is still there."""
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase != "runnable" or held.code[2] != "e" or self.closed:
            return "execution_not_leaseable"
        resumed = held.code == PAUSED
        if held.grant_until is None:
            return "invalid_claim_grant"
        if held.grant_until < self.now:
            held.grant_until = None
            return "claim_grant_expired"
        self._open(held, "resumed" if resumed else "fresh", worker, ttl)
        return "claimed"

    def reclaim(self, execution_id: ExecutionId, worker: str, ttl: int, offer: Offer) -> str:
        """A reclaim grant, used at once."""
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.code == "tunnfz" and held.attempts[-1].ended_by == "reclaim_cap":
            return "reclaim_cap_exceeded"
        if held.code not in (EXPIRED, REVOKED) or self.closed:
            return "not_reclaimable"
        if not self._covered(held, offer):
            return "not_reclaimable"
        if held.reclaims >= held.policy.reclaim_cap:
            self._end(held, "failed", "reclaim_cap")
            return "reclaim_cap_exceeded"
        self._open(held, "reclaimed", worker, ttl)
        return "claimed"

    def _mark(self, held: Execution) -> None:
        held.code = EXPIRED
        held.events.append("expired")

    def mark_expired(self, execution_id: ExecutionId) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase != "active":
            return "not_active"
        if not held.leased:
            return "already_expired" if held.code == EXPIRED else "already_revoked"
        if held.expires_at > self.now:
            return "not_yet_expired"
        self._mark(held)
        return "marked_expired"

    def revoke(self, execution_id: ExecutionId) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase != "active":
            return "no_active_lease"
        if not held.leased:
            return "already_expired" if held.code == EXPIRED else "already_revoked"
        held.code = REVOKED
        held.events.append("revoked")
        return "revoked"

    # --- the holder's verbs --------------------------------------------------------------

    def _refusal(self, held: Execution, lease: Lease, *, marks: bool = True) -> str | None:
        if held.phase != "active":
            return "execution_not_active"
        if held.code == REVOKED:
            return "lease_revoked"
        if held.expires_at <= self.now:
            if marks and held.leased:
                self._mark(held)
            return "lease_expired"
        current = held.attempts[-1]
        mine = (lease.lease_id, lease.epoch, lease.attempt_id, lease.index)
        if mine != (held.lease_id, held.epoch, current.attempt_id, len(held.attempts) - 1):
            return "stale_lease"
        return None

    def _verb(
        self,
        lease: Lease,
        act: Callable[[Execution], str],
        answered: Callable[[Attempt], str | None],
        *,
        marks: bool = True,
    ) -> str:
        """A fenced call: act when the lease is current, else repeat an earlier answer or refuse."""
        held = self.executions.get(lease.execution_id)
        if held is None:
            return "execution_not_found"
        refusal = self._refusal(held, lease, marks=marks)
        if refusal is None:
            return act(held)
        own = held.attempts[lease.index]
        if own.attempt_id == lease.attempt_id and own.epoch == lease.epoch:
            return answered(own) or refusal
        return refusal

    def renew(self, lease: Lease) -> str:
        def act(held: Execution) -> str:
            held.expires_at = self.now + lease.ttl
            return "renewed"

        return self._verb(lease, act, lambda _: None)

    def progress(self, lease: Lease, pct: int) -> str:
        def act(held: Execution) -> str:
            held.progress = pct
            return "updated"

        return self._verb(lease, act, lambda _: None, marks=False)

    def complete(self, lease: Lease, result: bytes | None) -> str:
        def act(held: Execution) -> str:
            held.result = result
            self._end(held, "success", "complete")
            return "completed"

        return self._verb(
            lease, act, lambda own: "completed" if own.state == "ended_success" else None
        )

    def fail(self, lease: Lease, category: str) -> str:
        def act(held: Execution) -> str:
            if self._retry(held, category, "fail"):
                due, index = held.attempts[-1].retry or (0, 0)
                return f"retry_scheduled {due} {index}"
            self._end(held, "failed", "fail")
            return "terminal_failed"

        def answered(own: Attempt) -> str | None:
            if own.state != "ended_failure" or own.ended_by != "fail":
                return None
            if own.retry is None:
                return "terminal_failed"
            return f"retry_scheduled {own.retry[0]} {own.retry[1]}"

        return self._verb(lease, act, answered)

    def cancel_by_worker(self, lease: Lease) -> str:
        def act(held: Execution) -> str:
            self._end(held, "cancelled", "cancel")
            return "cancelled"

        return self._verb(
            lease,
            act,
            lambda own: "cancelled" if own.state == "ended_cancelled" else None,
            marks=False,
        )

    def delay(self, lease: Lease, until: int) -> str:
        def act(held: Execution) -> str:
            waits = until > self.now
            answer = "delayed" if waits else "waiting"
            self._pause(held, PAUSED_UNTIL if waits else PAUSED, ("delay", answer))
            held.delay_until = until if waits else None
            return answer

        def answered(own: Attempt) -> str | None:
            return own.marker[1] if own.marker is not None and own.marker[0] == "delay" else None

        return self._verb(lease, act, answered)

    def release_unknown(self, lease: Lease) -> str:
        def act(held: Execution) -> str:
            self._pause(held, PAUSED, ("release_unknown", "waiting"))
            held.waits_for_task, held.delay_until = True, None
            return "waiting"

        def answered(own: Attempt) -> str | None:
            mine = own.marker is not None and own.marker[0] == "release_unknown"
            return "waiting" if mine else None

        return self._verb(lease, act, answered)

    def wait_children(self, lease: Lease) -> str:
        return self._verb(lease, lambda _: "ready", lambda _: None)

    # --- transitions ---------------------------------------------------------------------

    def _pause(self, held: Execution, code: str, marker: tuple[str, str]) -> None:
        held.code = code
        held.attempts[-1].state, held.attempts[-1].marker = "suspended", marker
        held.remaining = None if held.timer is None else max(1, held.timer - self.now)
        held.timer = held.grant_until = None
        held.events.append("released")

    def _retry(self, held: Execution, category: str, ended_by: str) -> bool:
        policy = held.policy
        if policy.max_retries is None or category in NEVER_RETRIED:
            return False
        if held.retries >= policy.max_retries:
            return False
        held.delay_until = self.now + policy.backoff_ms
        attempt = held.attempts[-1]
        attempt.state, attempt.ended_by = "ended_failure", ended_by
        attempt.retry = (held.delay_until, len(held.attempts))
        held.code = BACKING_OFF
        held.retries += 1
        held.timer = held.grant_until = None
        held.events.append("released")
        return True

    def _end(self, held: Execution, outcome: str, ended_by: str) -> None:
        if held.attempts and held.attempts[-1].state in ("started", "suspended"):
            last = held.attempts[-1]
            last.state, last.ended_by = ATTEMPT_ENDS[outcome], ended_by
            if ended_by == "reclaim_cap":
                last.state = "interrupted_reclaimed"
        held.code = "tunn" + OUTCOMES[outcome] + ("z" if held.attempts else held.code[5])
        held.completed_at = self.now
        held.timer = held.delay_until = held.grant_until = None
        held.events.append("completion")

    # --- operators and scanners ------------------------------------------------------------

    def cancel(self, execution_id: ExecutionId) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase == "terminal":
            return "cancelled" if held.code[4] == "c" else "execution_not_active"
        self._end(held, "cancelled", "cancel")
        return "cancelled"

    def replay(self, execution_id: ExecutionId) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase != "terminal":
            return "execution_not_terminal"
        limit = held.policy.max_replays
        if held.replays >= (MAX_REPLAYS if limit is None else limit):
            return "max_replays_exhausted"
        held.code = REPLAYED
        held.replays += 1
        held.retries = held.reclaims = 0
        held.completed_at = held.result = held.progress = held.remaining = None
        lifetime = held.policy.lifetime_ms
        held.deadline = self.now + lifetime if lifetime else None
        held.events.append("replayed")
        return "waiting"

    def promote(self, execution_id: ExecutionId) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "not_found_cleaned"
        if held.phase != "runnable":
            return "not_runnable_cleaned"
        if held.delay_until is None:
            return "not_delayed_cleaned"
        if held.delay_until > self.now:
            return "not_yet_due"
        held.code = "ruewn" + held.code[5]
        held.delay_until = None
        return "promoted"

    def expire(self, execution_id: ExecutionId, reason: str) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "not_found_cleaned"
        if held.phase == "terminal":
            return "already_terminal"
        due = held.timer if reason == "attempt_timeout" else held.deadline
        if due is None or due > self.now:
            return "not_yet_due"
        if reason == "attempt_timeout" and held.policy.retry_on_timeout:
            if self._retry(held, "timeout", "expire"):
                return "retry_scheduled"
            self._end(held, "failed", "expire")
            return "failed"
        self._end(held, "expired", "expire")
        return "expired"

    def trim(self, execution_id: ExecutionId) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "orphan_removed"
        if held.phase != "terminal":
            return "not_terminal"
        if (held.completed_at or 0) + RETENTION_MS > self.now:
            return "not_due"
        del self.executions[execution_id]
        return "purged"

    def change_priority(self, execution_id: ExecutionId, priority: int) -> str:
        held = self.executions.get(execution_id)
        if held is None:
            return "execution_not_found"
        if held.phase != "runnable":
            return "execution_not_eligible"
        held.priority = priority
        held.events.append("priority_changed")
        return "changed"
