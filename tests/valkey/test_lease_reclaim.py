"""Reclaim grants, reclaim, and the cap at both places (03 §15, D6, D13)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import (
    Claim,
    GrantNotFound,
    NotReclaimable,
    ReclaimCapExceeded,
)
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import StateVector
from flowfabric.engine.valkey import keys
from tests.conformance.test_lease_reclaim import a_grant, lose_once_more, use
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import (
    OTHER,
    WORKER,
    event_types,
    lapsed,
    reclaim,
    reclaim_grant,
    running,
)
from tests.support.server import TestServer
from tests.support.storage import grant_fields, indexes, lossy, record, write

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}
FAILED = StateVector.from_code("tunnfz")


# --- the grant -----------------------------------------------------------------------


async def test_a_reclaim_grant_reserves_and_moves_nothing(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    placed = await indexes(engine, execution_id)
    await engine.freeze(await engine.now())
    held = await reclaim_grant(engine, execution_id, grant_ttl_ms=900, capability_hash="abc")
    now = await engine.now()
    assert (held.expires_at_ms, held.lane_id) == (now + 900, "default")
    stored = await grant_fields(engine, execution_id)
    assert (stored["worker_id"], stored["capability_hash"]) == ("v", "abc")
    assert await indexes(engine, execution_id) == placed
    assert await engine.vector(execution_id) == StateVector.from_code("axnwni")


async def test_capabilities_are_checked_when_the_grant_is_issued(engine: Engine) -> None:
    await engine.create(policy=GPU)
    handle = (await engine.claim(capabilities=["gpu", "cuda"])).handle
    execution_id = handle.execution_id
    await lose_once_more(engine, execution_id)
    outcome = await engine.backend.claims.issue_reclaim_grant(
        execution_id, **OTHER, worker_capabilities=["gpu"]
    )
    assert outcome == NotReclaimable(execution_id, "capability_mismatch: cuda")
    assert "last_capability_mismatch_at" in await record(engine, execution_id)
    assert await grant_fields(engine, execution_id) == {}
    held = await reclaim_grant(engine, execution_id, worker_capabilities=["gpu", "cuda"])
    assert isinstance(await use(engine, held), Claim)


@pytest.mark.corrupts
async def test_check_order_of_a_reclaim_grant(engine: Engine) -> None:
    many = ",".join(f"t{i:03}" for i in range(257))
    execution_id = (await lapsed(engine, policy={"max_reclaim_count": 0})).execution_id

    async def attempt(csv: str, lane: str = "") -> None:
        args = (execution_id, lane, "v v-1", csv, 5000, "token", "", "", "", "")
        await engine.backend.calls.fcall(
            "ff_issue_reclaim_grant", execution_id.tag, args, op="grant"
        )

    await write(
        engine,
        execution_id,
        required_capabilities=many,
        grant_expires_at=await engine.now() + 60_000,
    )
    await refused(attempt(many, "elsewhere"), "invalid_input")
    await refused(attempt(many), "grant_already_exists")
    await write(engine, execution_id, grant_expires_at=1)
    error = await refused(attempt(many), "invalid_capabilities")
    assert error.detail == "required:too_many_tokens"
    await write(engine, execution_id, required_capabilities="gpu")
    error = await refused(attempt(many), "invalid_capabilities")
    assert error.detail == "worker:too_many_tokens"
    await refused(attempt("cpu"), "capability_mismatch")
    await refused(attempt("gpu"), "max_retries_exhausted")
    # Also to those who ask later: the execution is over for that reason.
    await refused(attempt(many), "max_retries_exhausted")
    await refused(attempt("gpu", "elsewhere"), "invalid_input")


# --- the reclaim -----------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["expired", "revoked"])
async def test_a_reclaim_starts_a_new_attempt(engine: Engine, lost: str) -> None:
    handle = await running(
        engine,
        input_payload=b"in",
        tags={"a.b": "c"},
        policy={"timeout_policy": {"attempt_timeout_ms": 90_000}, "max_reclaim_count": 5},
    )
    execution_id = handle.execution_id
    started = (await engine.backend.reads.read_execution_info(execution_id)).started_at
    await engine.backend.executions.progress(handle, 10, "x")
    await engine.backend.leases.renew(handle)
    if lost == "expired":
        await lose_once_more(engine, execution_id)
    else:
        await engine.backend.leases.revoke_lease(execution_id, reason="r")
    held = await reclaim_grant(engine, execution_id)
    now = await engine.now() + 5
    await engine.freeze(now)
    lease_id, attempt_id = new_uuid(), new_uuid()
    claim = await use(engine, held, lease_id=lease_id, attempt_id=attempt_id)

    assert claim.handle.kind == "reclaimed"
    assert (claim.handle.lease_id, claim.handle.lease_epoch) == (lease_id, 2)
    assert (claim.handle.attempt_id, claim.attempt_index) == (attempt_id, 1)
    assert (claim.attempt_type, claim.handle.lane_id) == ("reclaim", "default")
    assert (claim.input_payload, claim.tags) == (b"in", {"a.b": "c"})
    assert await engine.vector(execution_id) == StateVector.from_code("alnnnr")
    assert await indexes(engine, execution_id) == {
        "lane:default:active": now + TTL,
        "lease_expiry": now + TTL,
        "worker:v-1:leases": None,
        "attempt_timeout": now + 90_000,
    }
    assert await grant_fields(engine, execution_id) == {}
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.retry_count, info.lease_reclaim_count, info.total_attempt_count) == (0, 1, 2)
    assert (info.started_at, info.progress_pct, info.blocking_detail) == (started, None, "")
    first, second = await engine.backend.reads.read_attempts(execution_id)
    reason = f"lease_{lost}"
    assert (first.attempt_state, first.failure_reason) == ("interrupted_reclaimed", reason)
    assert (first.ended_at, first.attempt_id) == (now, handle.attempt_id)
    assert (second.attempt_state, second.attempt_type) == ("started", "reclaim")
    assert (second.reclaim_reason, second.previous_attempt_index) == (reason, 0)
    assert (second.started_at, second.ended_at) == (now, None)
    event = (await engine.events(execution_id))[-1]
    assert (event.type, event.at) == ("reclaimed", now)
    assert dict(event.fields) == {
        "old_lease_epoch": 1,
        "new_lease_id": lease_id,
        "new_lease_epoch": 2,
        "new_attempt_id": attempt_id,
        "new_attempt_index": 1,
        "worker_id": "v",
        "worker_instance_id": "v-1",
    }
    await refused(engine.backend.executions.complete(handle), "stale_lease")
    await engine.backend.executions.complete(claim.handle)


async def test_the_same_process_may_reclaim_its_own_loss(engine: Engine) -> None:
    handle = await lapsed(engine)
    held = await reclaim_grant(engine, handle.execution_id, **WORKER)
    claim = await use(engine, held, **WORKER)
    assert (await indexes(engine, handle.execution_id)).keys() >= {"worker:w-1:leases"}
    await refused(engine.backend.executions.complete(handle), "stale_lease")
    await engine.backend.executions.complete(claim.handle)
    assert "worker:w-1:leases" not in await indexes(engine, handle.execution_id)


async def test_a_grant_that_cannot_be_used(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    missing = GrantNotFound(execution_id)
    async with untouched(engine):
        assert await use(engine, a_grant(execution_id)) == missing
    held = await reclaim_grant(engine, execution_id)
    forged = msgspec.structs.replace(held, grant_key=held.grant_key[:-1])
    async with untouched(engine):
        assert await use(engine, forged) == missing
        assert await use(engine, held, **WORKER) == missing
    await engine.advance(5001)
    assert await use(engine, held) == missing
    assert await grant_fields(engine, execution_id) == {}
    assert "grant_expires_at" not in await record(engine, execution_id)
    assert isinstance(await use(engine, await reclaim_grant(engine, execution_id)), Claim)
    # Consumed, and the execution is leased again.
    assert (await use(engine, held)).kind == "not_reclaimable"


# --- the cap -----------------------------------------------------------------------------


@pytest.mark.parametrize("via", ["grant", "reclaim"])
async def test_at_the_cap_the_execution_fails_with_every_effect(engine: Engine, via: str) -> None:
    handle = await running(
        engine,
        policy={"max_reclaim_count": 1, "timeout_policy": {"attempt_timeout_ms": 90_000}},
        execution_deadline_at=await engine.now() + 10_000_000,
    )
    execution_id = handle.execution_id
    await lose_once_more(engine, execution_id)
    second = await reclaim(engine, execution_id)
    await engine.backend.leases.renew(second.handle)
    await lose_once_more(engine, execution_id)
    await engine.freeze(await engine.now())
    if via == "grant":
        outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **WORKER)
    else:
        # The cap comes before the grant.
        outcome = await use(engine, a_grant(execution_id), **WORKER)
    now = await engine.now()
    assert outcome == ReclaimCapExceeded(execution_id, 1)
    assert await engine.vector(execution_id) == FAILED
    assert set(await indexes(engine, execution_id)) == {"lane:default:terminal"}
    assert await grant_fields(engine, execution_id) == {}
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.failure_reason, info.completed_at) == ("max_reclaims_exceeded", str(now))
    assert (info.lease_reclaim_count, info.retry_count) == (1, 0)
    assert info.blocking_detail == ""
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None
    stored = await record(engine, execution_id)
    assert not {"lease_expired_at", "lease_revoked_at", "grant_expires_at"} & set(stored)
    cleared = {
        "current_lease_id": None,
        "current_worker_instance_id": None,
        "lease_expires_at": None,
        "current_lease_epoch": "2",
    }
    assert await engine.backend.reads.read_exec_core_fields(execution_id, list(cleared)) == cleared
    attempts = await engine.backend.reads.read_attempts(execution_id)
    assert [attempt.attempt_state for attempt in attempts] == ["interrupted_reclaimed"] * 2
    assert [attempt.ended_at is not None for attempt in attempts] == [True, True]
    event = (await engine.events(execution_id))[-1]
    assert (event.type, event.get("outcome")) == ("completion", "failed")
    assert event.get("reason") == "max_reclaims_exceeded"
    error = await refused(engine.backend.executions.complete(second.handle), "execution_not_active")
    assert error.details[0] == "failed"
    async with untouched(engine):
        again = await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
        assert again == ReclaimCapExceeded(execution_id, 1)
        assert await use(engine, a_grant(execution_id)) == again
    # A replay starts counting anew, and the capped attempt keeps what it was.
    await engine.backend.executions.replay_execution(execution_id)
    claim = await engine.claim()
    assert (claim.attempt_type, claim.attempt_index, claim.handle.lease_epoch) == ("replay", 2, 3)
    attempts = await engine.backend.reads.read_attempts(execution_id)
    assert attempts[1].attempt_state == "interrupted_reclaimed"
    assert (await engine.backend.reads.read_execution_info(execution_id)).lease_reclaim_count == 0


async def test_the_callers_cap_counts_without_a_policy(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    held = await reclaim_grant(engine, execution_id)
    outcome = await use(engine, held, max_reclaim_count=0)
    assert outcome == ReclaimCapExceeded(execution_id, 0)
    # The grant went with the execution.
    assert await grant_fields(engine, execution_id) == {}


@pytest.mark.parametrize(
    ("policy", "count", "cap"),
    [
        (None, 999, None),
        (None, 1000, 1000),
        ({}, 100, None),  # an empty object is no policy
        ({"priority": 1}, 99, None),
        ({"priority": 1}, 100, 100),
        ({"max_reclaim_count": 3}, 2, None),
        ({"max_reclaim_count": 3}, 3, 3),
        ({"timeout_policy": {"max_reclaim_count": 1}}, 99, None),
    ],
)
async def test_which_cap_is_in_force(
    engine: Engine, policy: dict[str, Any] | None, count: int, cap: int | None
) -> None:
    """The count is written as if that many reclaims had happened."""
    execution_id = (await lapsed(engine, policy=policy)).execution_id
    await write(engine, execution_id, lease_reclaim_count=count)
    outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
    if cap is None:
        assert outcome.kind == "granted"
    else:
        assert outcome == ReclaimCapExceeded(execution_id, cap)


async def test_a_lost_reclaim_reply_is_answered_again(engine: Engine, valkey: TestServer) -> None:
    execution_id = (await lapsed(engine)).execution_id
    held = await reclaim_grant(engine, execution_id)
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_reclaim")
        claim = await client.claims.reclaim_execution(held, **OTHER, lease_ttl_ms=TTL)
        assert proxy.dropped == 1
    assert isinstance(claim, Claim)
    assert await event_types(engine, execution_id) == ["acquired", "expired", "reclaimed"]


async def test_a_lost_reply_at_the_cap(engine: Engine, valkey: TestServer) -> None:
    """The repeat finds the execution ended; either answer says that there is nothing to take."""
    execution_id = (await lapsed(engine, policy={"max_reclaim_count": 0})).execution_id
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_issue_reclaim_grant")
        outcome = await client.claims.issue_reclaim_grant(execution_id, **OTHER)
        assert proxy.dropped == 1
    assert outcome.kind in {"reclaim_cap_exceeded", "not_reclaimable"}
    assert (await event_types(engine, execution_id)).count("completion") == 1


async def test_a_reclaimed_attempt_can_fail_pause_and_be_lost_again(engine: Engine) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 5}}}
    handle = await lapsed(engine, policy=policy)
    execution_id = handle.execution_id
    claim = await reclaim(engine, execution_id)
    await engine.backend.executions.delay(claim.handle, 1)
    resumed = await engine.claim()
    assert (resumed.handle.kind, resumed.attempt_type) == ("resumed", "reclaim")
    outcome = await engine.backend.executions.fail(resumed.handle, "boom", "transient")
    assert outcome.kind == "retry_scheduled"
    await engine.advance(10)
    await engine.backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    retried = await engine.claim()
    assert (retried.attempt_type, retried.attempt_index) == ("retry", 2)
    attempts = await engine.backend.reads.read_attempts(execution_id)
    assert [attempt.attempt_type for attempt in attempts] == ["initial", "reclaim", "retry"]
    assert attempts[1].resumed_at is not None
    assert (attempts[1].reclaim_reason, attempts[2].reclaim_reason) == ("lease_expired", None)
    assert keys.attempt(execution_id.tag, execution_id, 2).encode() not in await engine.dump()
