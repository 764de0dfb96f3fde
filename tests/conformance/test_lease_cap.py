"""The state after a reclaim cap, and expired grants (03 §15, D6)."""

from __future__ import annotations

import time

import pytest

from flowfabric.core.contracts.leases import Claim, GrantNotFound
from tests.conformance.test_lease_reclaim import a_grant, lose_once_more, use
from tests.support.engine import Engine
from tests.support.leases import OTHER, lapsed, reclaim_grant, running


@pytest.mark.parametrize("via", ["grant", "claim"])
async def test_the_cap_has_no_category_of_an_earlier_failure(engine: Engine, via: str) -> None:
    retries = {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}
    handle = await running(engine, policy={"max_reclaim_count": 0, "retry_policy": retries})
    execution_id = handle.execution_id
    await engine.backend.executions.fail(handle, "boom", "transient")
    await engine.backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    await engine.claim()
    await lose_once_more(engine, execution_id)
    if via == "grant":
        await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
    else:
        assert await engine.claim_all() == []
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.failure_reason, info.failure_category) == ("max_reclaims_exceeded", None)
    first, second = await engine.backend.reads.read_attempts(execution_id)
    assert (first.failure_category, second.failure_category) == ("transient", None)


async def test_only_the_cap_is_told_again(engine: Engine) -> None:
    execution_id = (await lapsed(engine, policy={"max_reclaim_count": 0})).execution_id
    await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
    await engine.backend.executions.replay_execution(execution_id)
    outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
    assert outcome.kind == "not_reclaimable"
    await engine.backend.executions.cancel_execution(execution_id)
    assert (await use(engine, a_grant(execution_id))).kind == "not_reclaimable"


async def test_a_grant_lives_by_the_clock_of_the_engine(engine: Engine) -> None:
    """The clock of this host plays no part, however far it is off."""
    await engine.advance(-3_600_000)
    held = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    assert held.expires_at_ms < time.time() * 1000
    assert isinstance(await use(engine, held), Claim)


async def test_a_grant_that_is_over_is_not_found(engine: Engine) -> None:
    held = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    await engine.advance(3_600_000)
    assert await use(engine, held) == GrantNotFound(held.execution_id)
