"""The operator's fused claim, and claims whose reply was lost (03 §8, D1, D3)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Blocked
from flowfabric.core.errors import ContentionError
from flowfabric.core.ids import new_uuid
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import WORKER, fused, grant, lapsed, paused


async def test_an_operator_resumes_a_paused_execution(engine: Engine) -> None:
    handle = await paused(engine)
    claim = await fused(engine, handle.execution_id, worker_id="me", worker_instance_id="me-1")
    assert (claim.handle.kind, claim.handle.attempt_id) == ("resumed", handle.attempt_id)
    assert (claim.handle.lease_epoch, claim.handle.worker_instance_id) == (2, "me-1")
    last = (await engine.events(handle.execution_id))[-1]
    assert last.get("reason") == "issue_grant_and_claim_resumed"
    await engine.backend.executions.complete(claim.handle)


async def test_an_operator_passes_by_a_paused_lane(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert (await fused(engine, execution_id)).execution_id == execution_id


async def test_an_operator_does_not_lift_a_block(engine: Engine) -> None:
    for execution_id in ((await paused(engine)).execution_id, await engine.create()):
        block = engine.backend.claims.block_execution_for_admission
        assert await block(execution_id, "paused_by_operator") == Blocked(
            execution_id, "paused_by_operator"
        )
        async with untouched(engine):
            with pytest.raises(ContentionError, match="execution_not_"):
                await fused(engine, execution_id)


# --- lost replies (D1) ---------------------------------------------------------


async def test_a_repeated_fresh_claim_gives_the_same_claim(engine: Engine) -> None:
    execution_id = await engine.create(input_payload=b"x", tags={"a.b": "c"})
    held = await grant(engine, execution_id)
    ids: dict[str, Any] = {"lease_id": new_uuid(), "attempt_id": new_uuid()}
    first = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids)
    async with untouched(engine):
        again = await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids)
        assert again == first
        for other in ({**ids, "lease_id": new_uuid()}, {**ids, "attempt_id": new_uuid()}):
            await refused(
                engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **other),
                "execution_not_leaseable",
            )


async def test_a_repeated_resumed_claim_gives_the_same_claim(engine: Engine) -> None:
    held = await grant(engine, (await paused(engine)).execution_id)
    lease_id = new_uuid()
    first = await engine.backend.claims.claim_resumed_execution(
        held, **WORKER, lease_ttl_ms=TTL, lease_id=lease_id
    )
    async with untouched(engine):
        again = await engine.backend.claims.claim_resumed_execution(
            held, **WORKER, lease_ttl_ms=TTL, lease_id=lease_id
        )
    assert again == first


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_repeated_fused_claim_gives_the_same_claim(engine: Engine, resumed: bool) -> None:
    execution_id = (await paused(engine)).execution_id if resumed else await engine.create()
    request_id = new_uuid()
    first = await fused(engine, execution_id, request_id=request_id)
    async with untouched(engine):
        assert await fused(engine, execution_id, request_id=request_id) == first
        await refused(fused(engine, execution_id, request_id=new_uuid()), "execution_not_eligible")
    await refused(fused(engine, execution_id, request_id="mine"), "invalid_input")


async def test_a_repeat_after_the_lease_ran_out_is_refused(engine: Engine) -> None:
    execution_id = await engine.create()
    held = await grant(engine, execution_id)
    ids: dict[str, Any] = {"lease_id": new_uuid(), "attempt_id": new_uuid()}
    await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids)
    await engine.advance(TTL)
    async with untouched(engine):
        await refused(
            engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL, **ids),
            "execution_not_leaseable",
        )


async def test_terminal_and_lost_executions_take_no_claim(engine: Engine) -> None:
    lost = await lapsed(engine)
    await refused(grant(engine, lost.execution_id), "execution_not_eligible")
    await engine.backend.executions.cancel_execution(lost.execution_id)
    await refused(grant(engine, lost.execution_id), "execution_not_eligible")
    await refused(fused(engine, lost.execution_id), "execution_not_eligible")
