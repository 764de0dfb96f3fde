"""The engine's operations with their log records: operator calls, ends, wearing reclaims."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ParamSpec, cast

from flowfabric.core import keys
from flowfabric.core.contracts.executions import Completed
from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle, ReclaimOutcome
from flowfabric.core.errors import EngineError
from flowfabric.core.state import ExpireReason
from flowfabric.engine.arguments import each_stored
from flowfabric.engine.audit import (
    Method,
    audited,
    batch_ended,
    operator_call,
    subject_of,
    timed_out,
)
from flowfabric.engine.executions import Completion
from flowfabric.engine.leases import Leases
from flowfabric.engine.scheduling import Scheduling, Want
from flowfabric.engine.secrets import Secrets
from flowfabric.engine.signals import Signals
from flowfabric.engine.suspensions import Suspensions
from flowfabric.engine.upkeep import Upkeep

__all__ = ["AuditTrail"]

log = logging.getLogger(__name__)

P = ParamSpec("P")

_WORN = 100
"""Every so many reclaims of one execution are worth a warning."""


def _watched(method: Method[P, ReclaimOutcome]) -> Method[P, ReclaimOutcome]:
    """A reclaim by grant wears an execution like one by an ordinary claim."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> ReclaimOutcome:
        outcome = await method(*args, **kwargs)
        if isinstance(outcome, Claim) and (worn := _worn([outcome])):
            await cast("AuditTrail", args[0]).warn_of_reclaims(worn)
        return outcome

    return call


def _worn(claims: Sequence[Claim]) -> list[Handle]:
    """Reclaims that may be a round number: each makes an attempt, so early ones cannot."""
    return [
        claim.handle
        for claim in claims
        if claim.handle.kind == "reclaimed" and claim.handle.attempt_index >= _WORN
    ]


def _without_a_lease(given: Mapping[str, Any]) -> bool:
    return given.get("handle") is None


class AuditTrail(Scheduling, Leases, Suspensions, Signals, Secrets, Upkeep):
    """Adds records to operations that stand for themselves; the hot ones pay one level check."""

    complete_execution = audited(Scheduling.complete_execution)
    fail_execution = audited(Scheduling.fail_execution)
    cancel_execution = audited(Scheduling.cancel_execution)
    delay_execution = audited(Scheduling.delay_execution)
    move_to_waiting_children = audited(Scheduling.move_to_waiting_children)
    change_priority = operator_call(Scheduling.change_priority)
    replay_execution = operator_call(Scheduling.replay_execution)
    set_lane_state = operator_call(Scheduling.set_lane_state)
    set_lane_config = operator_call(Scheduling.set_lane_config)
    revoke_lease = operator_call(Leases.revoke_lease)
    issue_grant_and_claim = operator_call(Leases.issue_grant_and_claim)
    issue_reclaim_grant = operator_call(Leases.issue_reclaim_grant)
    resume_execution = operator_call(Suspensions.resume_execution)
    close_waitpoint = operator_call(Suspensions.close_waitpoint, by=_without_a_lease)
    deliver_approval_signal = operator_call(Signals.deliver_approval_signal)
    read_waitpoint_token = operator_call(Signals.read_waitpoint_token)
    rotate_waitpoint_hmac_secret = operator_call(Secrets.rotate_waitpoint_hmac_secret)
    rotate_waitpoint_hmac_secret_all = operator_call(Secrets.rotate_waitpoint_hmac_secret_all)
    seed_waitpoint_hmac_secret = operator_call(Secrets.seed_waitpoint_hmac_secret)
    reclaim_execution = audited(_watched(Leases.reclaim_execution))

    async def complete_many(self, items: Sequence[Completion]) -> list[Completed | EngineError]:
        """Complete many; answers stand in input order and one item's error affects no other."""
        outcomes = await super().complete_many(items)
        batch_ended("complete_many", items, outcomes)
        return outcomes

    async def complete_and_claim(
        self,
        tag: str,
        items: Sequence[Completion],
        want: Want,
        max_n: int,
        *,
        request_id: str | None = None,
    ) -> tuple[list[EngineError | None], ClaimedMany]:
        """Complete executions of one partition and take the next ones there, in one trip.

        The completions commit first and never depend on the claim. None stands for success.
        """
        outcomes, claimed = await super().complete_and_claim(
            tag, items, want, max_n, request_id=request_id
        )
        batch_ended("complete_many", items, outcomes)
        if worn := _worn(claimed.claims):
            await self.warn_of_reclaims(worn)
        return outcomes, claimed

    async def claim_many(
        self, want: Want, tag: str, max_n: int, *, request_id: str | None = None
    ) -> ClaimedMany:
        """Take up to `max_n` executions of one lane and partition in one step.

        The engine picks fresh, resumed or reclaimed per candidate. Repeating a request id gives
        the first answer again.
        """
        claimed = await super().claim_many(want, tag, max_n, request_id=request_id)
        if worn := _worn(claimed.claims):
            await self.warn_of_reclaims(worn)
        return claimed

    async def expire_execution(
        self, tag: str, reason: ExpireReason, ids: Iterable[str]
    ) -> list[str]:
        """End executions whose attempt ran too long or whose lifetime is over."""
        ids = each_stored(ids, "ids")
        answers = await super().expire_execution(tag, reason, ids)
        timed_out(reason.value, ids, answers)
        return answers

    async def expire_suspension(self, tag: str, ids: Sequence[str]) -> list[str]:
        """Carry out what due suspensions want; each is checked again."""
        answers = await super().expire_suspension(tag, ids)
        timed_out("suspension_timeout", ids, answers)
        return answers

    async def warn_of_reclaims(self, worn: list[Handle]) -> None:
        """An execution that loses its worker again and again is likely what kills it."""
        for handle in worn:
            key = keys.core(handle.execution_id.tag, handle.execution_id)
            try:
                stored: Any = await self.transport.call("HGET", key, "lease_reclaim_count", key=key)
                count = int(stored or 0)
            except (EngineError, ValueError) as error:
                # The claim stands whatever becomes of a warning about it.
                log.debug("reclaims of %s not read: %s", handle.execution_id, error)
                continue
            if count and count % _WORN == 0:
                log.warning(
                    "%s was reclaimed %d times",
                    handle.execution_id,
                    count,
                    extra={
                        "action": "reclaimed_often",
                        "reclaim_count": count,
                        **subject_of(handle),
                    },
                )
