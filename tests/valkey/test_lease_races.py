"""Two calls that meet, in both orders (02 §18, 03 §16); the server serialises them."""

from __future__ import annotations

from flowfabric.core.contracts.leases import Claim, NotReclaimable
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from tests.conformance.test_lease_races import FIRST_OR_SECOND, RETRY
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import (
    OTHER,
    WORKER,
    grant,
    lapsed,
    mark,
    reclaim,
    reclaim_grant,
    running,
)
from tests.support.storage import indexes


async def ended_once(engine: Engine, execution_id: ExecutionId, outcome: str) -> None:
    completions = [e for e in await engine.events(execution_id) if e.type == "completion"]
    assert [event.get("outcome") for event in completions] == [outcome]
    assert set(await indexes(engine, execution_id)) == {"lane:default:terminal"}


@FIRST_OR_SECOND
async def test_complete_and_expiry_scan(engine: Engine, first: bool) -> None:
    handle = await running(engine)
    if first:
        await engine.backend.executions.complete(handle)
        await engine.advance(TTL + 1)
        async with untouched(engine):
            assert await mark(engine, [handle.execution_id]) == ["not_active"]
        await ended_once(engine, handle.execution_id, "success")
    else:
        await engine.advance(TTL + 1)
        await mark(engine, [handle.execution_id])
        async with untouched(engine):
            await refused(engine.backend.executions.complete(handle), "lease_expired")


@FIRST_OR_SECOND
async def test_complete_and_operator_cancel(engine: Engine, first: bool) -> None:
    handle = await running(engine)
    if first:
        await engine.backend.executions.complete(handle)
        error = await refused(
            engine.backend.executions.cancel_execution(handle.execution_id), "execution_not_active"
        )
    else:
        await engine.backend.executions.cancel_execution(handle.execution_id)
        error = await refused(engine.backend.executions.complete(handle), "execution_not_active")
    assert error.details[0] == ("success" if first else "cancelled")
    await ended_once(engine, handle.execution_id, error.details[0])


async def test_fail_and_deadline(engine: Engine) -> None:
    """The deadline entry survives the retry and later expires the waiting execution."""
    deadline = await engine.now() + 10_000
    handle = await running(engine, policy=RETRY, execution_deadline_at=deadline)
    execution_id = handle.execution_id
    await engine.backend.executions.fail(handle, "boom", "transient")
    await engine.advance(10_001)
    assert await engine.backend.upkeep.expire_execution(
        execution_id.tag, ExpireReason.EXECUTION_DEADLINE, [execution_id]
    ) == ["expired"]
    await ended_once(engine, execution_id, "expired")
    # The lost reply of the failure is still answered as it was.
    assert (
        await engine.backend.executions.fail(handle, "boom", "transient")
    ).kind == "retry_scheduled"


@FIRST_OR_SECOND
async def test_cancel_and_claim(engine: Engine, first: bool) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    if first:
        await engine.backend.executions.cancel_execution(execution_id)
        await refused(
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL),
            "execution_not_leaseable",
        )
        assert await engine.claim_all() == []
    else:
        claim = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)
        await engine.backend.executions.cancel_execution(execution_id)
        await refused(engine.backend.leases.renew(claim.handle), "execution_not_active")
    await ended_once(engine, execution_id, "cancelled")


@FIRST_OR_SECOND
async def test_cancel_and_reclaim(engine: Engine, first: bool) -> None:
    handle = await lapsed(engine)
    held = await reclaim_grant(engine, handle.execution_id)
    if first:
        await engine.backend.executions.cancel_execution(handle.execution_id)
        outcome = await engine.backend.claims.reclaim_execution(held, **OTHER, lease_ttl_ms=TTL)
        assert isinstance(outcome, NotReclaimable)
    else:
        outcome = await engine.backend.claims.reclaim_execution(held, **OTHER, lease_ttl_ms=TTL)
        assert isinstance(outcome, Claim)
        await engine.backend.executions.cancel_execution(handle.execution_id)
    await ended_once(engine, handle.execution_id, "cancelled")


async def test_a_worker_that_slept_through_its_lease(engine: Engine) -> None:
    zombie = await running(engine)
    await engine.advance(TTL + 1)
    await mark(engine, [zombie.execution_id])
    owner = await reclaim(engine, zombie.execution_id)
    await refused(engine.backend.executions.complete(zombie, b"old"), "stale_lease")
    await engine.backend.executions.complete(owner.handle, b"new")
    await refused(engine.backend.executions.complete(zombie, b"old"), "execution_not_active")
    assert await engine.backend.reads.get_execution_result(zombie.execution_id) == b"new"
    await ended_once(engine, zombie.execution_id, "success")
