"""Claims by grant: fresh, resumed and the operator's fused form (03 §6, §7, §8, D1 to D5)."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import Claim, ClaimGrant
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import StateVector
from tests.conformance.test_claim_execution import claim_fresh
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import OTHER, WORKER, a_grant, grant, reclaim
from tests.support.storage import grant_fields, indexes, record, write

ACTIVE = StateVector.from_code("alnnnr")


# --- fresh ---------------------------------------------------------------------


async def test_a_fresh_claim_carries_everything_and_moves_to_active(engine: Engine) -> None:
    execution_id = await engine.create(
        lane="a:b%",
        input_payload=b"\x00\xff",
        payload_encoding="raw",
        namespace="tenant",
        tags={"app.k": "v", "odd key": ""},
        policy={"timeout_policy": {"attempt_timeout_ms": 700}},
        execution_kind="mail",
    )
    await engine.freeze(await engine.now())
    lease_id, attempt_id = new_uuid(), new_uuid()
    claim = await claim_fresh(engine, execution_id, lease_id=lease_id, attempt_id=attempt_id)
    now = await engine.now()

    handle = claim.handle
    assert (handle.lease_id, handle.lease_epoch) == (lease_id, 1)
    assert (handle.attempt_id, handle.attempt_index) == (attempt_id, 0)
    assert (handle.kind, handle.lane_id, handle.worker_instance_id) == ("fresh", "a:b%", "w-1")
    assert (handle.lease_ttl_ms, claim.lease_expires_at) == (TTL, now + TTL)
    assert (claim.input_payload, claim.payload_encoding) == (b"\x00\xff", "raw")
    assert (claim.execution_kind, claim.attempt_type) == ("mail", "initial")
    assert (claim.namespace, claim.tags) == ("tenant", {"app.k": "v", "odd key": ""})
    assert claim.attempt_timeout_ms == 700

    assert await engine.vector(execution_id) == ACTIVE
    assert await indexes(engine, execution_id) == {
        "lane:a%3Ab%25:active": now + TTL,
        "lease_expiry": now + TTL,
        "worker:w-1:leases": None,
        "attempt_timeout": now + 700,
    }
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is not None
    assert snapshot.current_lease.lease_id == lease_id
    assert snapshot.current_lease.worker_instance_id == "w-1"
    assert snapshot.current_attempt is not None
    assert snapshot.current_attempt.attempt_id == attempt_id
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.started_at, info.total_attempt_count) == (str(now), 1)
    assert await grant_fields(engine, execution_id) == {}
    assert "grant_expires_at" not in await record(engine, execution_id)

    (event,) = await engine.events(execution_id)
    assert (event.type, event.at, event.lane_id) == ("acquired", now, "a:b%")
    assert (event.namespace, event.execution_kind) == ("tenant", "mail")
    assert dict(event.fields) == {
        "lease_id": lease_id,
        "lease_epoch": 1,
        "attempt_id": attempt_id,
        "attempt_index": 0,
        "attempt_type": "initial",
        "worker_id": "w",
        "worker_instance_id": "w-1",
    }


async def test_a_replay_attempt_has_its_lineage(engine: Engine) -> None:
    handle = await engine.running()
    execution_id = handle.execution_id
    await engine.backend.executions.complete(handle)
    await engine.backend.executions.replay_execution(
        execution_id, reason="again", requested_by="ops"
    )
    claim = await claim_fresh(engine, execution_id)
    assert (claim.attempt_type, claim.attempt_index, claim.handle.lease_epoch) == ("replay", 1, 2)
    first, second = await engine.backend.reads.read_attempts(execution_id)
    assert (first.attempt_state, first.attempt_type) == ("ended_success", "initial")
    assert (second.replay_reason, second.replay_requested_by) == ("again", "ops")
    assert (second.previous_attempt_index, second.replayed_from_attempt_index) == (0, 0)
    await engine.backend.leases.revoke_lease(execution_id)
    await reclaim(engine, execution_id)
    _, second, third = await engine.backend.reads.read_attempts(execution_id)
    assert second.replayed_from_attempt_index == 0, "archived, too"
    assert (third.previous_attempt_index, third.replayed_from_attempt_index) == (1, None)
    stored = await record(engine, execution_id)
    assert not {name for name in stored if name.startswith("pending_")}


@pytest.mark.corrupts
async def test_check_order_of_a_fresh_claim(engine: Engine) -> None:
    """The state is set to each fault in turn while no grant exists: state comes before grant."""
    execution_id = engine.new_id()
    held = a_grant(execution_id)

    async def attempt(grant_value: ClaimGrant) -> Claim:
        return await engine.backend.claims.claim_execution(grant_value, **WORKER, lease_ttl_ms=TTL)

    await refused(attempt(held), "execution_not_found")
    await engine.create(execution_id=execution_id)
    await write(engine, execution_id, lease=f"{new_uuid()}/1", lease_expires_at=1)
    for state, code in (
        ("tlnnsr", "execution_not_leaseable"),  # the phase comes before the ownership
        ("alnnnr", "execution_not_leaseable"),
        ("axnwni", "execution_not_leaseable"),
        ("punsni", "execution_not_leaseable"),
        ("rlddnr", "lease_conflict"),  # before the eligibility
        ("ruddsr", "execution_not_leaseable"),
        ("ruccnf", "execution_not_leaseable"),
        ("ruewsr", "execution_not_leaseable"),  # an outcome, before the attempt
        ("ruewnr", "active_attempt_exists"),
        ("ruewni", "use_claim_resumed_execution"),
        ("ruewnf", "invalid_claim_grant"),
        ("ruewnt", "invalid_claim_grant"),
    ):
        await write(engine, execution_id, state=state)
        async with untouched(engine):
            await refused(attempt(held), code)
    await write(engine, execution_id, state="ruewnf")
    issued = await grant(engine, execution_id)
    await engine.advance(5001)
    await refused(attempt(issued), "claim_grant_expired")


# --- resumed -------------------------------------------------------------------


async def test_a_paused_attempt_is_resumed_with_the_grant_of_the_wrong_claim(
    engine: Engine,
) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 60_000}})
    execution_id = handle.execution_id
    await engine.backend.executions.progress(handle, 10)
    started = (await engine.backend.reads.read_execution_info(execution_id)).started_at
    await engine.backend.executions.delay(handle, 1)
    held = await grant(engine, execution_id, **OTHER)
    async with untouched(engine):
        await refused(
            engine.backend.claims.claim_execution(held, **OTHER, lease_ttl_ms=TTL),
            "use_claim_resumed_execution",
        )
    await engine.freeze(await engine.now())
    lease_id = new_uuid()
    claim = await engine.backend.claims.claim_resumed_execution(
        held, **OTHER, lease_ttl_ms=TTL, lease_id=lease_id
    )
    now = await engine.now()
    assert claim.handle.kind == "resumed"
    assert (claim.handle.lease_id, claim.handle.lease_epoch) == (lease_id, 2)
    assert (claim.handle.attempt_id, claim.attempt_index) == (handle.attempt_id, 0)
    assert claim.attempt_type == "initial"
    assert await engine.vector(execution_id) == ACTIVE
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.total_attempt_count, info.started_at, info.progress_pct) == (1, started, 10)
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert (attempt.attempt_state, attempt.resumed_at) == ("started", now)
    assert (attempt.suspended_at, attempt.suspension_id) == (None, None)
    assert (attempt.lease_id, attempt.worker_instance_id) == (lease_id, "v-1")
    placed = await indexes(engine, execution_id)
    assert set(placed) == {
        "lane:default:active",
        "lease_expiry",
        "attempt_timeout",
        "worker:v-1:leases",
    }
    assert await grant_fields(engine, execution_id) == {}
    last = (await engine.events(execution_id))[-1]
    assert (last.type, last.get("reason")) == ("acquired", "claim_resumed")
    assert (last.get("lease_epoch"), last.get("attempt_type")) == (2, "initial")


@pytest.mark.corrupts
async def test_check_order_of_a_resumed_claim(engine: Engine) -> None:
    execution_id = engine.new_id()
    held = a_grant(execution_id)

    async def attempt(grant_value: ClaimGrant) -> Claim:
        return await engine.backend.claims.claim_resumed_execution(
            grant_value, **WORKER, lease_ttl_ms=TTL
        )

    await refused(attempt(held), "execution_not_found")
    await engine.create(execution_id=execution_id)
    await write(engine, execution_id, lease=f"{new_uuid()}/1", lease_expires_at=1)
    for state, code in (
        ("alnnnr", "execution_not_leaseable"),
        ("axnwni", "execution_not_leaseable"),
        ("tunncz", "execution_not_leaseable"),
        ("ruewnf", "not_a_resumed_execution"),
        ("ruewnt", "not_a_resumed_execution"),
        ("ruewnp", "not_a_resumed_execution"),
        ("ruddnf", "not_a_resumed_execution"),
        ("ruddni", "execution_not_leaseable"),
        ("ruccni", "execution_not_leaseable"),
        ("ruewni", "invalid_claim_grant"),
    ):
        await write(engine, execution_id, state=state)
        async with untouched(engine):
            await refused(attempt(held), code)
    issued = await grant(engine, execution_id)
    await engine.advance(5001)
    await refused(attempt(issued), "claim_grant_expired")
    assert await grant_fields(engine, execution_id) == {}
