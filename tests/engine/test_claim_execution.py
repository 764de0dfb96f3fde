"""Claims by grant: fresh, resumed and the operator's fused form (03 §6, §7, §8, D1 to D5)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Claim, ClaimGrant, ResumeGrant
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import StateVector
from tests.engine.probes import (
    OTHER,
    WORKER,
    a_grant,
    fields,
    freeze,
    fused,
    grant,
    grant_fields,
    paused,
    placed,
    reclaim,
    refused,
    untouched,
    write,
)
from tests.support.engine import TTL, Engine

ACTIVE = StateVector.from_code("alnnnr")
RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 10}}}


async def claim_fresh(engine: Engine, execution_id: ExecutionId, **options: Any) -> Claim:
    arguments: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL} | options
    return await engine.backend.claims.claim_execution(
        await grant(engine, execution_id), **arguments
    )


async def claim_resumed(engine: Engine, execution_id: ExecutionId, **options: Any) -> Claim:
    arguments: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL} | options
    held = await grant(engine, execution_id)
    return await engine.backend.claims.claim_resumed_execution(held, **arguments)


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
    await freeze(engine, await engine.now())
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
    assert await placed(engine, execution_id) == {
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
    assert "grant_expires_at" not in await fields(engine, execution_id)

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


async def test_a_bare_claim_has_the_defaults(engine: Engine) -> None:
    claim = await claim_fresh(engine, await engine.create())
    assert (claim.input_payload, claim.payload_encoding, claim.tags) == (b"", "", {})
    assert (claim.namespace, claim.attempt_timeout_ms) == ("default", None)


async def test_minted_ids_differ(engine: Engine) -> None:
    one = await claim_fresh(engine, await engine.create())
    two = await claim_fresh(engine, await engine.create())
    ids = {one.handle.lease_id, two.handle.lease_id, one.handle.attempt_id, two.handle.attempt_id}
    assert len(ids) == 4


async def test_a_retry_attempt_has_its_lineage(engine: Engine) -> None:
    handle = await engine.running(policy=RETRY)
    execution_id = handle.execution_id
    started = (await engine.backend.reads.read_execution_info(execution_id)).started_at
    await engine.backend.executions.progress(handle, 40, "half")
    await engine.backend.executions.fail(handle, "boom", "transient")
    await engine.advance(11)
    assert await engine.backend.upkeep.promote_delayed(
        execution_id.tag, "default", [execution_id]
    ) == ["promoted"]
    claim = await claim_fresh(engine, execution_id, **OTHER | {"worker_id": "w"})
    assert (claim.attempt_type, claim.attempt_index, claim.handle.lease_epoch) == ("retry", 1, 2)
    first, second = await engine.backend.reads.read_attempts(execution_id)
    assert (first.attempt_state, first.failure_reason) == ("ended_failure", "boom")
    assert (first.attempt_id, first.lease_epoch) == (handle.attempt_id, 1)
    assert first.worker_instance_id == "w-1"
    assert (second.attempt_state, second.attempt_type) == ("started", "retry")
    assert (second.retry_reason, second.previous_attempt_index) == ("boom", 0)
    assert second.failure_reason is None
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.started_at == started
    assert (info.progress_pct, info.progress_message) == (None, None)
    assert (info.retry_count, info.total_attempt_count) == (1, 2)


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
    stored = await fields(engine, execution_id)
    assert not {name for name in stored if name.startswith("pending_")}


async def test_a_replay_of_an_execution_that_never_ran_is_a_replay(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.replay_execution(execution_id, reason="again")
    await freeze(engine, await engine.now())
    claim = await claim_fresh(engine, execution_id)
    assert (claim.attempt_type, claim.attempt_index) == ("replay", 0)
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert (attempt.attempt_type, attempt.replay_reason) == ("replay", "again")
    assert attempt.previous_attempt_index is None
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.started_at == str(await engine.now())


async def test_an_execution_that_never_ran_can_end_and_be_replayed_repeatedly(
    engine: Engine,
) -> None:
    execution_id = await engine.create()
    for letter in ("f", "p", "p"):
        await engine.backend.executions.cancel_execution(execution_id)
        assert (await engine.vector(execution_id)).code == f"tunnc{letter}"
        await engine.backend.executions.replay_execution(execution_id)
    assert (await claim_fresh(engine, execution_id)).attempt_index == 0


@pytest.mark.parametrize("ttl", [0, -5, "x", 1.5, True, 2**60])
async def test_a_lease_needs_a_positive_number_of_ms(engine: Engine, ttl: Any) -> None:
    unknown = engine.new_id()
    backend = engine.backend
    async with untouched(engine):
        for work in (
            backend.claims.claim_execution(a_grant(unknown), **WORKER, lease_ttl_ms=ttl),
            backend.claims.claim_resumed_execution(a_grant(unknown), **WORKER, lease_ttl_ms=ttl),
            backend.claims.issue_grant_and_claim(unknown, lease_duration_ms=ttl),
        ):
            await refused("invalid_input", work)


@pytest.mark.parametrize("field", ["lease_id", "attempt_id"])
async def test_given_ids_must_be_uuids(engine: Engine, field: str) -> None:
    ids: dict[str, Any] = {field: "no-uuid"}
    await refused(
        "invalid_input",
        engine.backend.claims.claim_execution(
            a_grant(engine.new_id()), **WORKER, lease_ttl_ms=TTL, **ids
        ),
    )


@pytest.mark.corrupts
async def test_check_order_of_a_fresh_claim(engine: Engine) -> None:
    """The state is set to each fault in turn while no grant exists: state comes before grant."""
    execution_id = engine.new_id()
    held = a_grant(execution_id)

    async def attempt(grant_value: ClaimGrant) -> Claim:
        return await engine.backend.claims.claim_execution(grant_value, **WORKER, lease_ttl_ms=TTL)

    await refused("execution_not_found", attempt(held))
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
            await refused(code, attempt(held))
    await write(engine, execution_id, state="ruewnf")
    issued = await grant(engine, execution_id)
    await engine.advance(5001)
    await refused("claim_grant_expired", attempt(issued))


async def test_a_wrong_lane_is_refused_and_leaves_the_grant(engine: Engine) -> None:
    fresh, resumable = await engine.create(), (await paused(engine, lane="second")).execution_id
    backend = engine.backend
    one, two = await grant(engine, fresh), await grant(engine, resumable)
    async with untouched(engine):
        elsewhere: dict[str, Any] = WORKER | {"lease_ttl_ms": TTL, "lane_id": "x"}
        error = await refused("invalid_input", backend.claims.claim_execution(one, **elsewhere))
        assert "lane_mismatch" in error.detail
        error = await refused(
            "invalid_input", backend.claims.claim_resumed_execution(two, **elsewhere)
        )
        assert "lane_mismatch" in error.detail
        error = await refused("invalid_input", fused(engine, fresh, lane_id="x"))
        assert "lane_mismatch" in error.detail
    await backend.claims.claim_execution(one, **WORKER, lease_ttl_ms=TTL, lane_id="default")
    await backend.claims.claim_resumed_execution(two, **WORKER, lease_ttl_ms=TTL, lane_id="second")


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
            "use_claim_resumed_execution",
            engine.backend.claims.claim_execution(held, **OTHER, lease_ttl_ms=TTL),
        )
    await freeze(engine, await engine.now())
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
    indexes = await placed(engine, execution_id)
    assert set(indexes) == {
        "lane:default:active",
        "lease_expiry",
        "attempt_timeout",
        "worker:v-1:leases",
    }
    assert await grant_fields(engine, execution_id) == {}
    last = (await engine.events(execution_id))[-1]
    assert (last.type, last.get("reason")) == ("acquired", "claim_resumed")
    assert (last.get("lease_epoch"), last.get("attempt_type")) == (2, "initial")


async def test_a_resume_grant_is_consumed_on_its_lane(engine: Engine) -> None:
    handle = await paused(engine)
    held = await grant(engine, handle.execution_id)
    resume = ResumeGrant(
        execution_id=held.execution_id,
        partition_key=held.partition_key,
        grant_key=held.grant_key,
        expires_at_ms=held.expires_at_ms,
        lane_id="default",
    )
    claim = await engine.backend.claims.claim_from_resume_grant(resume, **WORKER, lease_ttl_ms=TTL)
    assert claim.handle.kind == "resumed"


@pytest.mark.corrupts
async def test_check_order_of_a_resumed_claim(engine: Engine) -> None:
    execution_id = engine.new_id()
    held = a_grant(execution_id)

    async def attempt(grant_value: ClaimGrant) -> Claim:
        return await engine.backend.claims.claim_resumed_execution(
            grant_value, **WORKER, lease_ttl_ms=TTL
        )

    await refused("execution_not_found", attempt(held))
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
            await refused(code, attempt(held))
    issued = await grant(engine, execution_id)
    await engine.advance(5001)
    await refused("claim_grant_expired", attempt(issued))
    assert await grant_fields(engine, execution_id) == {}


async def test_a_paused_lane_resumes_nothing(engine: Engine) -> None:
    held = await grant(engine, (await paused(engine)).execution_id)
    await engine.backend.lanes.set_lane_state("default", "paused")
    async with untouched(engine):
        await refused(
            "execution_not_leaseable",
            engine.backend.claims.claim_resumed_execution(held, **WORKER, lease_ttl_ms=TTL),
        )
