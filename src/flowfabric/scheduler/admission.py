"""Admission: which candidates may start within their budgets and their quota.

Workers that claim for themselves and servers that grant to others use the same checks, in the order
of spec 04 §6: budgets, which are only read, then the quota, which records the admission. A fault
denies the candidate that it concerns, and no other.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flowfabric.core.contracts.budgets import Exhausted
from flowfabric.core.contracts.leases import Candidate, Claim
from flowfabric.core.contracts.quotas import (
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    RateExceeded,
    Unlimited,
)
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine import metrics
from flowfabric.engine.api.admission import FOR_BUDGET, FOR_QUOTA, Block
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.quotas import DIRECT_CLAIM_MS

log = logging.getLogger(__name__)
_MAX_TIMERS = 1000
_SHORTEST_PAUSE_S = 0.005
Budgets = dict[str, Exhausted | None]
"""The budgets that a claim call has read: the exhausted dimension, or None for an open one."""


@dataclass(eq=False)
class AdmissionCounts:
    """What was decided; metrics count the denials."""

    admitted: int = 0
    rolled_back: int = 0


@dataclass(eq=False)
class Decision:
    """Which candidates may start, and what to do about the others."""

    admitted: list[Candidate] = field(default_factory=list[Candidate])
    blocks: list[Block] = field(default_factory=list[Block])
    faults: list[EngineError] = field(default_factory=list[EngineError])
    recorded: dict[ExecutionId, tuple[str, str]] = field(
        default_factory=dict[ExecutionId, tuple[str, str]]
    )
    """The policy and the request of each admission that this decision recorded."""


@dataclass(eq=False)
class AdmittedClaims:
    """The claims of admitted candidates, and the outcome for the others."""

    claims: list[Claim]
    held_back: int
    fault: EngineError | None
    unanswered: bool = False
    """Whether the claim may have been made; if so, repeat its request."""


class Admissions:
    """Decides which candidates may start, and releases blocked ones when a quota admits again."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._timers: dict[str, tuple[float, asyncio.Task[None]]] = {}
        """When each quota policy releases executions, on the loop's clock."""
        self.counts = AdmissionCounts()

    async def claim(
        self, request: ClaimRequest, tag: str, candidates: Sequence[Candidate], request_id: str
    ) -> AdmittedClaims:
        """Claim the candidates of a partition that are admitted, and hold the others back.

        Raises no engine error: what the caller claimed before must not be lost with it.
        """
        decision = await self.decide(candidates, slot_ttl_ms=DIRECT_CLAIM_MS)
        ids = [each.execution_id for each in decision.admitted]
        outcome, held_back = await asyncio.gather(
            self._claimed(request, tag, decision.admitted, request_id),
            self.hold_back(tag, decision.blocks),
        )
        if isinstance(outcome, EngineError):
            unanswered = isinstance(outcome, TransportError) and outcome.ambiguous
            if not unanswered:
                await self.undo(decision, ids)
            return AdmittedClaims([], held_back, outcome, unanswered=unanswered)
        claimed = {claim.execution_id for claim in outcome}
        await self.undo(decision, [each for each in ids if each not in claimed])
        return AdmittedClaims(outcome, held_back, next(iter(decision.faults), None))

    async def _claimed(
        self, request: ClaimRequest, tag: str, admitted: Sequence[Candidate], request_id: str
    ) -> list[Claim] | EngineError:
        claim = self._backend.claims.claim_admitted
        try:
            return await claim(request, tag, admitted, request_id=request_id) if admitted else []
        except EngineError as error:
            return error

    async def decide(
        self, candidates: Sequence[Candidate], *, slot_ttl_ms: int, known: Budgets | None = None
    ) -> Decision:
        """Ask budgets, then quotas, about candidates in order. `known`: budgets already read."""
        decision = Decision()
        open_now = await self._within_budgets(candidates, decision, {} if known is None else known)
        by_policy: dict[str, list[Candidate]] = {}
        for each in open_now:
            if each.quota_policy_id is None:
                decision.admitted.append(each)
            else:
                by_policy.setdefault(each.quota_policy_id, []).append(each)
        await asyncio.gather(
            *(
                self._within_quota(policy, asking, decision, slot_ttl_ms)
                for policy, asking in by_policy.items()
            )
        )
        if by_policy:
            place = {each.execution_id: n for n, each in enumerate(candidates)}
            decision.admitted.sort(key=lambda each: place[each.execution_id])
        self.counts.admitted += len(decision.admitted)
        return decision

    async def _within_budgets(
        self, candidates: Sequence[Candidate], decision: Decision, known: Budgets
    ) -> list[Candidate]:
        named = {budget for each in candidates for budget in each.budget_ids} - known.keys()
        faults: dict[str, EngineError] = {}
        if named:
            try:
                answers = await self._backend.budgets.exhausted(named)
            except EngineError as error:
                answers = dict.fromkeys(named, error)
            for budget, answer in answers.items():
                if isinstance(answer, EngineError):
                    faults[budget] = answer
                else:
                    known[budget] = answer
        passed: list[Candidate] = []
        for each in candidates:
            closed = next((b for b in each.budget_ids if b in faults or known[b] is not None), None)
            if closed is None:
                passed.append(each)
            elif closed in faults:
                self._fault(each, FOR_BUDGET, f"budget {closed}", faults[closed], decision)
            elif (exhausted := known[closed]) is not None:
                metrics.count("ff_budget_hit_total", exhausted.dimension)
                used = f"{exhausted.dimension} {exhausted.used}/{exhausted.limit}"
                decision.blocks.append(
                    Block(
                        execution_id=each.execution_id,
                        reason=FOR_BUDGET,
                        detail=f"budget {exhausted.label}: {used}",
                        waits_for=closed,
                    )
                )
        return passed

    async def _within_quota(
        self, policy: str, asking: Sequence[Candidate], decision: Decision, slot_ttl_ms: int
    ) -> None:
        ids, runs = [each.execution_id for each in asking], [each.run for each in asking]
        answers = await self._backend.quotas.admit_many(
            policy, ids, runs=runs, slot_ttl_ms=slot_ttl_ms
        )
        about: tuple[str, str] | None = None
        for each, answer in zip(asking, answers, strict=True):
            match answer:
                case Admitted(request_id=request):
                    decision.recorded[each.execution_id] = policy, request
                    decision.admitted.append(each)
                case AlreadyAdmitted() | Unlimited():
                    decision.admitted.append(each)
                case RateExceeded() | ConcurrencyExceeded():
                    about = about or await self._about(policy)
                    reason = "rate" if isinstance(answer, RateExceeded) else "concurrency"
                    metrics.count("ff_quota_hit_total", reason)
                    decision.blocks.append(
                        Block(
                            execution_id=each.execution_id,
                            reason=FOR_QUOTA,
                            detail=f"quota {about[0]}: {reason} limit{about[1]}",
                            retry_in_ms=answer.retry_after_ms,
                            waits_for=policy,
                            place=each.score,
                        )
                    )
                case EngineError():
                    self._fault(each, FOR_QUOTA, f"quota policy {policy}", answer, decision)

    async def _about(self, policy: str) -> tuple[str, str]:
        """The name and the limits of a policy; empty if they cannot be read now."""
        try:
            status = await self._backend.quotas.get_quota_status(policy)
        except EngineError:
            return policy, ""
        parts: list[str] = []
        if status.max_requests_per_window:
            window = status.window_ms // 1000
            parts.append(f"{status.max_requests_per_window} per {window} s")
        if status.max_concurrent:
            parts.append(f"{status.max_concurrent} at a time")
        return status.label, f" ({', '.join(parts)})" if parts else ""

    def _fault(
        self, each: Candidate, reason: str, what: str, error: EngineError, decision: Decision
    ) -> None:
        """Deny a candidate whose limits cannot be read. A scanner tries again."""
        kind = "budget" if reason == FOR_BUDGET else "quota"
        metrics.count("ff_admission_faults_total", kind)
        log.warning(
            *("%s cannot start: %s cannot be read: %s", each.execution_id.short, what, error),
            extra={"action": "admission_fault", "execution_id": str(each.execution_id)},
        )
        decision.faults.append(error)
        detail = f"{what} cannot be read: {error.code}"
        decision.blocks.append(Block(execution_id=each.execution_id, reason=reason, detail=detail))

    async def hold_back(self, tag: str, blocks: Sequence[Block]) -> int:
        """Block what was denied, best effort; returns how many are blocked."""
        if not blocks:
            return 0
        try:
            outcomes = await self._backend.admission.block_many(tag, blocks)
        except EngineError as error:
            extra = {"action": "block_failed", "partition": tag}
            log.warning("cannot mark executions as blocked by their limits: %s", error, extra=extra)
            return 0
        held = 0
        for block, outcome in zip(blocks, outcomes, strict=True):
            if outcome is not None:
                log.debug("%s not blocked: %s", block.execution_id, outcome)
                continue
            held += 1
            if block.reason == FOR_QUOTA and block.retry_in_ms is not None:
                self._open_later(block.waits_for, block.retry_in_ms / 1000)
        return held

    async def undo(self, decision: Decision, ids: Collection[ExecutionId]) -> None:
        """Roll back the admissions of executions that did not start, if this decision made them."""
        by_request: dict[tuple[str, str], list[ExecutionId]] = {}
        for each in ids:
            if each in decision.recorded:
                by_request.setdefault(decision.recorded[each], []).append(each)
        for (policy, request), members in by_request.items():
            try:
                await self._backend.quotas.release_many(policy, members, rollback=request)
                self.counts.rolled_back += len(members)
            except EngineError as error:
                # The slots end by themselves.
                log.debug("cannot roll back admissions of quota %s: %s", policy, error)

    def _open_later(self, policy: str, seconds: float) -> None:
        """Release executions when the quota admits again; scanners do it if this process ends."""
        loop = asyncio.get_running_loop()
        earlier, due = self._timers.get(policy), loop.time() + seconds
        if earlier is not None:
            if earlier[0] <= due:
                return
            earlier[1].cancel()
        elif len(self._timers) >= _MAX_TIMERS:
            return
        task = loop.create_task(self._open_at(policy, seconds))
        self._timers[policy] = due, task
        task.add_done_callback(lambda task: self._forget_timer(policy, task))

    def _forget_timer(self, policy: str, task: asyncio.Task[None]) -> None:
        if policy in self._timers and self._timers[policy][1] is task:
            del self._timers[policy]

    async def _open_at(self, policy: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(max(seconds, _SHORTEST_PAUSE_S))
                again = await self._backend.admission.open_quota(policy)
                if again is None:
                    return
                seconds = again / 1000
                self._timers[policy] = loop.time() + seconds, self._timers[policy][1]
        except EngineError as error:
            log.debug("leaving executions that wait for quota %s to a scanner: %s", policy, error)

    async def aclose(self) -> None:
        """Stop the timers; the scanner takes over."""
        timers = [task for _, task in self._timers.values()]
        for timer in timers:
            timer.cancel()
        if timers:
            await asyncio.wait(timers)
