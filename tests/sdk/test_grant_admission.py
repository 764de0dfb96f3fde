"""claim_for_worker reserves nothing that budgets and quotas do not admit."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import ExecutionId
from flowfabric.scheduler.grants import NoWork, WorkerGrants
from tests.sdk.test_admission import blocking, spoil
from tests.support.admission import budget, claimed, limited, quota, settled, slots
from tests.support.engine import TTL, Engine, refused

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


async def granted(grants: WorkerGrants, **options: Any) -> ClaimGrant:
    grant = await grants.claim_for_worker("default", "w", "w-1", **options)
    assert isinstance(grant, ClaimGrant)
    return grant


async def test_an_admitted_execution_is_granted_and_its_slot_confirmed(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, await budget(engine), quota=policy)
    grants = WorkerGrants(engine.backend)
    grant = await granted(grants, grant_ttl_ms=2000)
    assert grant.execution_id == execution_id
    claim = await engine.backend.claims.claim_execution(grant, **WORKER, lease_ttl_ms=TTL)
    await engine.advance(10_000)
    assert await slots(engine, policy) == 1
    await engine.backend.executions.complete(claim.handle)
    await settled(engine)
    assert await slots(engine, policy) == 0


async def test_a_lost_run_needs_no_second_admission(engine: Engine) -> None:
    spent, policy = await budget(engine, 1), await quota(engine, rate=1)
    execution_id = await limited(engine, spent, quota=policy)
    assert await claimed(engine) == [execution_id]
    await engine.backend.budgets.report_usage_admin(spent, {"tokens": 1})
    await engine.backend.leases.revoke_lease(execution_id)
    assert (await granted(WorkerGrants(engine.backend))).execution_id == execution_id


async def test_denied_work_is_held_back_before_the_answer(engine: Engine) -> None:
    spent = await budget(engine, 1, spent=1)
    held = await limited(engine, spent)
    grants = WorkerGrants(engine.backend)
    assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()
    assert (await blocking(engine, held))[:2] == ("rate_limited", "waiting_for_budget")
    free = await limited(engine, await budget(engine))
    assert (await granted(grants)).execution_id == free


async def test_denied_work_does_not_hide_what_follows(engine: Engine) -> None:
    spent = await budget(engine, 1, spent=1)
    for _ in range(10):
        await limited(engine, spent, priority=9)
    plain = await engine.create()
    assert (await granted(WorkerGrants(engine.backend))).execution_id == plain


@pytest.mark.corrupts
async def test_a_fault_is_raised_if_nothing_else_is_found(engine: Engine) -> None:
    damaged = await budget(engine)
    await spoil(engine, damaged)
    await limited(engine, damaged)
    grants = WorkerGrants(engine.backend)
    with pytest.raises(CorruptionError):
        await grants.claim_for_worker("default", "w", "w-1")
    await limited(engine, damaged, priority=9)
    plain = await engine.create()
    assert (await granted(grants)).execution_id == plain


async def test_a_grant_that_lapses_frees_its_slot(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    first = await limited(engine, quota=policy)
    grants = WorkerGrants(engine.backend)
    assert (await granted(grants, grant_ttl_ms=1000)).execution_id == first
    second = await limited(engine, quota=policy)
    assert await grants.claim_for_worker("default", "v", "v-1") == NoWork()
    assert (await blocking(engine, second))[0] == "rate_limited"
    await engine.advance(2000)
    assert await slots(engine, policy) == 0
    assert await engine.backend.admission.open_quota(policy) is None
    assert {(await granted(grants)).execution_id} <= {first, second}


async def test_cancelling_what_is_granted_frees_its_slot_at_once(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    await granted(WorkerGrants(engine.backend))
    assert await slots(engine, policy) == 1
    await engine.backend.executions.cancel_execution(execution_id)
    await settled(engine)
    assert await slots(engine, policy) == 0


async def test_a_resumed_attempt_is_admitted_by_its_grant(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    await limited(engine, quota=policy)
    grants = WorkerGrants(engine.backend)
    claims = engine.backend.claims
    claim = await claims.claim_execution(await granted(grants), **WORKER, lease_ttl_ms=TTL)
    await engine.backend.executions.delay(claim.handle, 1)
    await settled(engine)
    assert await slots(engine, policy) == 0
    grant = await granted(grants)
    assert await slots(engine, policy) == 1
    again = await claims.claim_resumed_execution(grant, **WORKER, lease_ttl_ms=TTL)
    assert (again.handle.kind, again.quota_policy_id) == ("resumed", policy)


async def test_only_admission_grants_limited_work(engine: Engine) -> None:
    execution_id = await limited(engine, await budget(engine))
    grant = engine.backend.claims.issue_claim_grant
    error = await refused(grant(execution_id, **WORKER), "execution_not_eligible")
    assert error.details == ("needs admission",)
    # Every other check comes first: admission would be recorded in vain.
    error = await refused(grant(execution_id, **WORKER, admitted=2), "execution_not_eligible")
    assert error.details == ("needs admission",)
    await grant(execution_id, **WORKER, admitted=1)
    await refused(grant(execution_id, **WORKER), "grant_already_exists")
    other: ExecutionId = await limited(engine, await budget(engine), delay_until=2**42)
    error = await refused(grant(other, **WORKER), "execution_not_eligible")
    assert error.details == ()
