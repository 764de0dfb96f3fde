"""Log records around the engine's operations: operator calls, ends, and often reclaimed work."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from flowfabric.core.contracts.executions import Completed
from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.arguments import each_stored
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest, Claims
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.layers.audit_log import (
    Method,
    audited,
    batch_ended,
    operator_call,
    subject_of,
    timed_out,
)

log = logging.getLogger(__name__)

_RECLAIMS_PER_WARNING = 100

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _wrapped(concern: T, **methods: Callable[..., Any]) -> T:
    """A copy of the concern with some of its operations replaced."""
    layered = copy.copy(concern)
    for name, method in methods.items():
        setattr(layered, name, method)
    return layered


def audit(backend: Backend) -> None:
    """Add log records to a backend's operations. The hot ones pay one check of the level."""
    executions, claims, upkeep = backend.executions, backend.claims, backend.upkeep
    watch = ReclaimWatch(backend)
    backend.executions = _wrapped(
        executions,
        complete_execution=audited(executions.complete_execution),
        fail_execution=audited(executions.fail_execution),
        cancel_execution=audited(executions.cancel_execution),
        delay_execution=audited(executions.delay_execution),
        move_to_waiting_children=audited(executions.move_to_waiting_children),
        change_priority=operator_call(executions.change_priority),
        replay_execution=operator_call(executions.replay_execution),
        complete_many=_batch_logged(executions.complete_many),
    )
    backend.claims = _wrapped(
        claims,
        claim_many=watch.claims(claims.claim_many),
        complete_and_claim=watch.completions(claims),
        reclaim_execution=audited(watch.reclaim(claims.reclaim_execution)),
        issue_grant_and_claim=operator_call(claims.issue_grant_and_claim),
        issue_reclaim_grant=operator_call(claims.issue_reclaim_grant),
    )
    backend.upkeep = _wrapped(upkeep, expire_execution=_expiry_logged(upkeep.expire_execution))
    backend.suspensions = _wrapped(
        backend.suspensions,
        resume_execution=operator_call(backend.suspensions.resume_execution),
        expire_suspension=_timeout_logged(backend.suspensions.expire_suspension),
    )
    backend.lanes = _wrapped(
        backend.lanes,
        set_lane_state=operator_call(backend.lanes.set_lane_state),
        set_lane_config=operator_call(backend.lanes.set_lane_config),
    )
    backend.leases = _wrapped(
        backend.leases, revoke_lease=operator_call(backend.leases.revoke_lease)
    )
    backend.waitpoints = _wrapped(
        backend.waitpoints,
        close_waitpoint=operator_call(
            backend.waitpoints.close_waitpoint, by=lambda given: given.get("handle") is None
        ),
    )
    backend.signals = _wrapped(
        backend.signals,
        deliver_approval_signal=operator_call(backend.signals.deliver_approval_signal),
        read_waitpoint_token=operator_call(backend.signals.read_waitpoint_token),
    )
    secrets = backend.secrets
    backend.secrets = _wrapped(
        secrets,
        rotate_waitpoint_hmac_secret=operator_call(secrets.rotate_waitpoint_hmac_secret),
        rotate_waitpoint_hmac_secret_all=operator_call(secrets.rotate_waitpoint_hmac_secret_all),
        seed_waitpoint_hmac_secret=operator_call(secrets.seed_waitpoint_hmac_secret),
    )


def _batch_logged(
    complete_many: Callable[
        [Sequence[Completion]], Coroutine[Any, Any, list[Completed | EngineError]]
    ],
) -> Callable[[Sequence[Completion]], Coroutine[Any, Any, list[Completed | EngineError]]]:
    @functools.wraps(complete_many)
    async def call(items: Sequence[Completion]) -> list[Completed | EngineError]:
        outcomes = await complete_many(items)
        batch_ended("complete_many", items, outcomes)
        return outcomes

    return call


def _expiry_logged(
    expire: Callable[[str, ExpireReason, Iterable[str]], Coroutine[Any, Any, list[str]]],
) -> Callable[[str, ExpireReason, Iterable[str]], Coroutine[Any, Any, list[str]]]:
    @functools.wraps(expire)
    async def call(tag: str, reason: ExpireReason, ids: Iterable[str]) -> list[str]:
        ids = each_stored(ids, "ids")
        answers = await expire(tag, reason, ids)
        timed_out(reason.value, ids, answers)
        return answers

    return call


def _timeout_logged(
    expire: Callable[[str, Sequence[str]], Coroutine[Any, Any, list[str]]],
) -> Callable[[str, Sequence[str]], Coroutine[Any, Any, list[str]]]:
    @functools.wraps(expire)
    async def call(tag: str, ids: Sequence[str]) -> list[str]:
        answers = await expire(tag, ids)
        timed_out("suspension_timeout", ids, answers)
        return answers

    return call


class ReclaimWatch:
    """Warns of executions that lose their worker again and again: likely what kills it."""

    def __init__(self, backend: Backend) -> None:
        self._reads = backend.reads

    def claims(self, claim_many: Method[P, ClaimedMany]) -> Method[P, ClaimedMany]:
        @functools.wraps(claim_many)
        async def call(*args: P.args, **kwargs: P.kwargs) -> ClaimedMany:
            claimed = await claim_many(*args, **kwargs)
            await self._look(claimed.claims)
            return claimed

        return call

    def completions(self, claims: Claims) -> Callable[..., Any]:
        complete_and_claim = claims.complete_and_claim

        @functools.wraps(complete_and_claim)
        async def call(
            tag: str,
            items: Sequence[Completion],
            want: ClaimRequest,
            max_n: int,
            *,
            request_id: str | None = None,
        ) -> tuple[list[EngineError | None], ClaimedMany]:
            outcomes, claimed = await complete_and_claim(
                tag, items, want, max_n, request_id=request_id
            )
            batch_ended("complete_many", items, outcomes)
            await self._look(claimed.claims)
            return outcomes, claimed

        return call

    def reclaim(self, reclaim_execution: Method[P, R]) -> Method[P, R]:
        @functools.wraps(reclaim_execution)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            outcome = await reclaim_execution(*args, **kwargs)
            if isinstance(outcome, Claim):
                await self._look([outcome])
            return outcome

        return call

    async def _look(self, claims: Sequence[Claim]) -> None:
        # Every reclaim makes an attempt, so early attempts cannot be a round number.
        for claim in claims:
            handle = claim.handle
            if handle.kind == "reclaimed" and handle.attempt_index >= _RECLAIMS_PER_WARNING:
                await self.warn(handle)

    async def warn(self, handle: Handle) -> None:
        """Warn if the number of reclaims is a round one; the claim stands in any case."""
        field = "lease_reclaim_count"
        try:
            fields = await self._reads.read_exec_core_fields(handle.execution_id, [field])
            count = int(fields[field] or 0)
        except (EngineError, ValueError) as error:
            log.debug("reclaim count of %s not read: %s", handle.execution_id, error)
            return
        if count and count % _RECLAIMS_PER_WARNING == 0:
            log.warning(
                "%s was reclaimed %d times",
                handle.execution_id,
                count,
                extra={"action": "reclaimed_often", "reclaim_count": count, **subject_of(handle)},
            )
