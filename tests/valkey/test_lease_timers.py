"""When the attempt timer is armed, stopped and armed again (03 D4, 02 §9)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from tests.support.engine import TTL, Engine
from tests.support.executions import expire
from tests.support.leases import mark, reclaim, running
from tests.support.storage import indexes

LIMIT = 100_000
TIMED: dict[str, Any] = {
    "timeout_policy": {"attempt_timeout_ms": LIMIT},
    "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5}},
}


async def timer(engine: Engine, execution_id: ExecutionId) -> float | None:
    return (await indexes(engine, execution_id)).get("attempt_timeout")


@pytest.mark.parametrize("policy", [None, {"timeout_policy": {"attempt_timeout_ms": 0}}])
async def test_no_limit_no_timer(engine: Engine, policy: dict[str, Any] | None) -> None:
    handle = await engine.running(policy=policy)
    assert await timer(engine, handle.execution_id) is None


async def test_a_fresh_claim_arms_the_full_time_and_a_renewal_leaves_it(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    handle = await engine.running(policy=TIMED)
    armed = await engine.now() + LIMIT
    assert await timer(engine, handle.execution_id) == armed
    await engine.freeze(await engine.now() + 1000)
    await engine.backend.leases.renew(handle)
    assert await timer(engine, handle.execution_id) == armed


@pytest.mark.parametrize("spent", [0, 1, 40_000, LIMIT - 1, LIMIT, LIMIT + 5])
async def test_a_pause_keeps_the_rest_and_the_resumed_claim_arms_it(
    engine: Engine, spent: int
) -> None:
    start = await engine.now()
    await engine.freeze(start)
    handle = await running(engine, policy=TIMED)
    execution_id = handle.execution_id
    await engine.backend.leases.renew_lease(execution_id, handle, 10 * LIMIT)
    await engine.freeze(start + spent)
    await engine.backend.executions.delay(handle, 1)
    assert await timer(engine, execution_id) is None
    await engine.freeze(start + 500_000)
    claim = await engine.claim()
    assert claim.handle.kind == "resumed"
    due = start + 500_000 + max(1, LIMIT - spent)
    assert await timer(engine, execution_id) == due
    for now, answer in ((start + 500_000, "not_yet_due"), (due, "expired")):
        await engine.freeze(now)
        assert await expire(engine, execution_id, ExpireReason.ATTEMPT_TIMEOUT) == answer


async def test_two_pauses_share_one_allowance(engine: Engine) -> None:
    start = await engine.now()
    await engine.freeze(start)
    handle = await running(engine, policy=TIMED)
    for spent in (30_000, 20_000):
        await engine.backend.leases.renew_lease(handle.execution_id, handle, 10 * LIMIT)
        await engine.freeze(await engine.now() + spent)
        await engine.backend.executions.delay(handle, 1)
        await engine.freeze(await engine.now() + 70_000)
        handle = (await engine.claim()).handle
    now = await engine.now()
    assert await timer(engine, handle.execution_id) == now + LIMIT - 50_000


async def test_a_reclaim_replaces_the_timer_with_the_full_time(engine: Engine) -> None:
    handle = await running(engine, policy=TIMED)
    armed = await timer(engine, handle.execution_id)
    await engine.advance(TTL + 1)
    await mark(engine, [handle.execution_id])
    assert await timer(engine, handle.execution_id) == armed
    await engine.freeze(await engine.now())
    await reclaim(engine, handle.execution_id)
    assert await timer(engine, handle.execution_id) == await engine.now() + LIMIT


async def test_a_reclaim_after_a_pause_has_the_full_time(engine: Engine) -> None:
    handle = await running(engine, policy=TIMED)
    await engine.advance(10_000)
    await engine.backend.executions.delay(handle, 1)
    resumed = await engine.claim()
    await engine.backend.leases.revoke_lease(resumed.execution_id)
    await engine.freeze(await engine.now())
    await reclaim(engine, resumed.execution_id)
    assert await timer(engine, resumed.execution_id) == await engine.now() + LIMIT


async def test_a_retry_has_the_full_time(engine: Engine) -> None:
    handle = await running(engine, policy=TIMED)
    execution_id = handle.execution_id
    await engine.backend.executions.fail(handle, "boom", "transient")
    assert await timer(engine, execution_id) is None
    await engine.advance(10)
    await engine.backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    await engine.freeze(await engine.now())
    await engine.claim()
    assert await timer(engine, execution_id) == await engine.now() + LIMIT


@pytest.mark.parametrize("lost", ["held", "expired", "revoked"])
async def test_the_timer_ends_the_execution_in_any_ownership(engine: Engine, lost: str) -> None:
    start = await engine.now()
    await engine.freeze(start)
    handle = await running(engine, policy={"timeout_policy": {"attempt_timeout_ms": LIMIT}})
    execution_id = handle.execution_id
    if lost == "held":
        await engine.backend.leases.renew_lease(execution_id, handle, 10 * LIMIT)
    elif lost == "revoked":
        await engine.backend.leases.revoke_lease(execution_id)
    await engine.freeze(start + LIMIT - 1)
    if lost == "expired":
        await mark(engine, [execution_id])
    assert await expire(engine, execution_id, ExpireReason.ATTEMPT_TIMEOUT) == "not_yet_due"
    await engine.freeze(start + LIMIT)
    assert await expire(engine, execution_id, ExpireReason.ATTEMPT_TIMEOUT) == "expired"
    assert set(await indexes(engine, execution_id)) == {"lane:default:terminal"}


async def test_a_claim_never_moves_the_deadline(engine: Engine) -> None:
    deadline = await engine.now() + 1_000_000
    handle = await running(engine, policy=TIMED, execution_deadline_at=deadline)
    execution_id = handle.execution_id
    for step in ("claimed", "paused", "resumed", "lost", "reclaimed"):
        if step == "paused":
            await engine.backend.executions.delay(handle, 1)
        elif step == "resumed":
            handle = (await engine.claim()).handle
        elif step == "lost":
            await engine.backend.leases.revoke_lease(execution_id)
        elif step == "reclaimed":
            await reclaim(engine, execution_id)
        assert (await indexes(engine, execution_id))["execution_deadline"] == deadline, step
