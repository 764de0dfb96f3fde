"""Budgets, quotas, and workers that claim within them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.contracts.leases import Candidate, Claim, ClaimedMany
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.scheduler.claims import WorkerClaims
from tests.support.engine import LANE, Engine
from tests.support.sdk import until


async def budget(engine: Engine, limit: int = 10, *, spent: int = 0, **fields: Any) -> str:
    """A budget of so many tokens, some of them spent."""
    budget_id = new_uuid()
    await engine.backend.budgets.create_budget(
        NewBudget(
            budget_id=budget_id,
            scope_type="test",
            scope_id="test",
            dimensions=("tokens",),
            hard_limits=(limit,),
            soft_limits=(0,),
            **fields,
        )
    )
    if spent:
        await engine.backend.budgets.report_usage_admin(budget_id, {"tokens": spent})
    return budget_id


async def quota(engine: Engine, *, rate: int = 0, cap: int = 0, window: int = 60) -> str:
    policy = new_uuid()
    await engine.backend.quotas.create_quota_policy(
        policy, window_seconds=window, max_requests_per_window=rate, max_concurrent=cap
    )
    return policy


async def limited(
    engine: Engine, *budgets: str, quota: str | None = None, **fields: Any
) -> ExecutionId:
    """An execution that names budgets and a quota policy."""
    policy = dict(fields.pop("policy", {}))
    policy["budget_ids"] = list(budgets)
    if quota is not None:
        policy["quota_policy_id"] = quota
    return await engine.create(policy=policy, **fields)


def worker(
    engine: Engine, permits: int = 100, lane: str = LANE, **want: Any
) -> WorkerClaims[Claim]:
    """The claims of a worker, without handlers; each claim is its task."""
    return WorkerClaims(
        backend=engine.backend,
        requests={lane: engine.want(lane=lane, **want)},
        adopt=lambda claim, _: claim,
        free=permits,
        poll_s=0.0,
    )


async def claimed(engine: Engine, max_n: int = 100, **want: Any) -> list[ExecutionId]:
    """What a worker claims in one go, admission included."""
    claims = worker(engine, max_n, **want)
    try:
        return [claim.execution_id for claim in await claims.claim_many(max_n)]
    finally:
        await claims.admissions.aclose()


async def needing(engine: Engine, max_n: int = 100) -> Sequence[Candidate]:
    """The candidates that a claim leaves to admission."""
    found: ClaimedMany = await engine.backend.claims.claim_many(
        engine.want(), engine.new_id().tag, max_n
    )
    return found.needing


async def slots(engine: Engine, policy: str) -> int:
    return (await engine.backend.quotas.get_quota_status(policy)).slots_held


async def slot_taken(engine: Engine, policy: str) -> None:
    """Wait until an execution holds a slot."""

    async def holds() -> bool:
        return await slots(engine, policy) > 0

    await until(holds, "a slot")


async def settled(engine: Engine) -> None:
    """What calls left to the background is done."""
    await engine.backend.drains.finish()
