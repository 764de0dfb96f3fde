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
    ReclaimGrant,
)
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import StateVector
from flowfabric.engine.valkey import keys
from tests.engine.probes import (
    OTHER,
    WORKER,
    event_types,
    fields,
    freeze,
    grant_fields,
    lapsed,
    lossy,
    mark,
    paused,
    placed,
    reclaim,
    reclaim_grant,
    refused,
    running,
    untouched,
    write,
)
from tests.support.engine import TTL, Engine
from tests.support.server import TestServer

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu", "cuda"]}}
FAILED = StateVector.from_code("tunnfz")


def a_grant(execution_id: ExecutionId) -> ReclaimGrant:
    """A grant nobody issued."""
    return ReclaimGrant(
        execution_id=execution_id,
        partition_key=execution_id.tag,
        grant_key="k#t",
        expires_at_ms=2**53,
        lane_id="default",
    )


async def use(engine: Engine, held: ReclaimGrant, **options: Any) -> Any:
    arguments: dict[str, Any] = OTHER | {"lease_ttl_ms": TTL} | options
    return await engine.backend.claims.reclaim_execution(held, **arguments)


async def lose_once_more(engine: Engine, execution_id: ExecutionId) -> None:
    """The lease of the present holder runs out and is marked."""
    await engine.advance(TTL + 1)
    assert await mark(engine, [execution_id]) == ["marked_expired"]


# --- the grant -----------------------------------------------------------------------


async def test_a_reclaim_grant_reserves_and_moves_nothing(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    indexes = await placed(engine, execution_id)
    await freeze(engine, await engine.now())
    held = await reclaim_grant(engine, execution_id, grant_ttl_ms=900, capability_hash="abc")
    now = await engine.now()
    assert (held.expires_at_ms, held.lane_id) == (now + 900, "default")
    stored = await grant_fields(engine, execution_id)
    assert (stored["worker_id"], stored["capability_hash"]) == ("v", "abc")
    assert await placed(engine, execution_id) == indexes
    assert await engine.vector(execution_id) == StateVector.from_code("axnwni")


async def test_what_cannot_be_reclaimed(engine: Engine) -> None:
    backend = engine.backend
    await refused(
        "execution_not_found", backend.claims.issue_reclaim_grant(engine.new_id(), **OTHER)
    )
    waiting = await engine.create()
    held = (await running(engine)).execution_id
    given_back = (await paused(engine)).execution_id
    ended = (await running(engine)).execution_id
    await backend.executions.cancel_execution(ended)
    async with untouched(engine):
        for execution_id in (waiting, held, given_back, ended):
            outcome = await backend.claims.issue_reclaim_grant(execution_id, **OTHER)
            assert outcome == NotReclaimable(execution_id, "execution_not_reclaimable")
            # The state comes before the grant.
            assert await use(engine, a_grant(execution_id)) == outcome
    await refused("execution_not_found", use(engine, a_grant(engine.new_id())))


async def test_a_lapsed_lease_must_be_marked_first(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL + 1)
    outcome = await engine.backend.claims.issue_reclaim_grant(handle.execution_id, **OTHER)
    assert outcome.kind == "not_reclaimable"
    await refused("lease_expired", engine.backend.leases.renew(handle))
    await reclaim_grant(engine, handle.execution_id)


async def test_capabilities_are_checked_when_the_grant_is_issued(engine: Engine) -> None:
    await engine.create(policy=GPU)
    handle = (await engine.claim(capabilities=["gpu", "cuda"])).handle
    execution_id = handle.execution_id
    await lose_once_more(engine, execution_id)
    outcome = await engine.backend.claims.issue_reclaim_grant(
        execution_id, **OTHER, worker_capabilities=["gpu"]
    )
    assert outcome == NotReclaimable(execution_id, "capability_mismatch: cuda")
    assert "last_capability_mismatch_at" in await fields(engine, execution_id)
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
    await refused("invalid_input", attempt(many, "elsewhere"))
    await refused("grant_already_exists", attempt(many))
    await write(engine, execution_id, grant_expires_at=1)
    error = await refused("invalid_capabilities", attempt(many))
    assert error.detail == "required:too_many_tokens"
    await write(engine, execution_id, required_capabilities="gpu")
    error = await refused("invalid_capabilities", attempt(many))
    assert error.detail == "worker:too_many_tokens"
    await refused("capability_mismatch", attempt("cpu"))
    await refused("max_retries_exhausted", attempt("gpu"))
    # Also to those who ask later: the execution is over for that reason.
    await refused("max_retries_exhausted", attempt(many))
    await refused("invalid_input", attempt("gpu", "elsewhere"))


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_closed_lane_gives_nothing_back(engine: Engine, state: str) -> None:
    first, second = (await lapsed(engine)).execution_id, (await lapsed(engine)).execution_id
    held = await reclaim_grant(engine, first)
    await engine.backend.lanes.set_lane_state("default", state)
    async with untouched(engine):
        assert (await use(engine, held)).kind == "not_reclaimable"
        outcome = await engine.backend.claims.issue_reclaim_grant(second, **OTHER)
        assert outcome.kind == "not_reclaimable"
    await engine.backend.lanes.set_lane_state("default", "draining")
    assert isinstance(await use(engine, held), Claim)


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
    await freeze(engine, now)
    lease_id, attempt_id = new_uuid(), new_uuid()
    claim = await use(engine, held, lease_id=lease_id, attempt_id=attempt_id)

    assert claim.handle.kind == "reclaimed"
    assert (claim.handle.lease_id, claim.handle.lease_epoch) == (lease_id, 2)
    assert (claim.handle.attempt_id, claim.attempt_index) == (attempt_id, 1)
    assert (claim.attempt_type, claim.handle.lane_id) == ("reclaim", "default")
    assert (claim.input_payload, claim.tags) == (b"in", {"a.b": "c"})
    assert await engine.vector(execution_id) == StateVector.from_code("alnnnr")
    assert await placed(engine, execution_id) == {
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
    await refused("stale_lease", engine.backend.executions.complete(handle))
    await engine.backend.executions.complete(claim.handle)


async def test_the_same_process_may_reclaim_its_own_loss(engine: Engine) -> None:
    handle = await lapsed(engine)
    held = await reclaim_grant(engine, handle.execution_id, **WORKER)
    claim = await use(engine, held, **WORKER)
    assert (await placed(engine, handle.execution_id)).keys() >= {"worker:w-1:leases"}
    await refused("stale_lease", engine.backend.executions.complete(handle))
    await engine.backend.executions.complete(claim.handle)
    assert "worker:w-1:leases" not in await placed(engine, handle.execution_id)


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
    assert "grant_expires_at" not in await fields(engine, execution_id)
    assert isinstance(await use(engine, await reclaim_grant(engine, execution_id)), Claim)
    # Consumed, and the execution is leased again.
    assert (await use(engine, held)).kind == "not_reclaimable"


async def test_another_instance_may_use_the_grant(engine: Engine) -> None:
    held = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    claim = await use(engine, held, worker_instance_id="v-2")
    assert claim.handle.worker_instance_id == "v-2"


async def test_a_grants_lane_must_be_the_executions(engine: Engine) -> None:
    held = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    async with untouched(engine):
        wrong = msgspec.structs.replace(held, lane_id="elsewhere")
        assert "lane_mismatch" in (await refused("invalid_input", use(engine, wrong))).detail


@pytest.mark.parametrize("cap", [-1, 1.5, "3", True, 2**32])
async def test_a_cap_is_a_whole_number(engine: Engine, cap: Any) -> None:
    execution_id = (await lapsed(engine)).execution_id
    async with untouched(engine):
        work = use(engine, a_grant(execution_id), max_reclaim_count=cap)
        await refused("invalid_input", work)


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
    await freeze(engine, await engine.now())
    if via == "grant":
        outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **WORKER)
    else:
        # The cap comes before the grant.
        outcome = await use(engine, a_grant(execution_id), **WORKER)
    now = await engine.now()
    assert outcome == ReclaimCapExceeded(execution_id, 1)
    assert await engine.vector(execution_id) == FAILED
    assert set(await placed(engine, execution_id)) == {"lane:default:terminal"}
    assert await grant_fields(engine, execution_id) == {}
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.failure_reason, info.completed_at) == ("max_reclaims_exceeded", str(now))
    assert (info.lease_reclaim_count, info.retry_count) == (1, 0)
    assert info.blocking_detail == ""
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None
    stored = await fields(engine, execution_id)
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
    error = await refused("execution_not_active", engine.backend.executions.complete(second.handle))
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


@pytest.mark.parametrize("via", ["grant", "reclaim"])
async def test_cap_zero_means_never(engine: Engine, via: str) -> None:
    execution_id = (await lapsed(engine, policy={"max_reclaim_count": 0})).execution_id
    if via == "grant":
        outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
    else:
        # The stored policy wins over the caller.
        outcome = await use(engine, a_grant(execution_id), max_reclaim_count=50)
    assert outcome == ReclaimCapExceeded(execution_id, 0)
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "interrupted_reclaimed"


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


async def test_each_reclaim_counts_once_and_takes_its_own_index(engine: Engine) -> None:
    handle = await running(engine, policy={"max_reclaim_count": 3})
    for number in range(1, 4):
        await lose_once_more(engine, handle.execution_id)
        claim = await reclaim(engine, handle.execution_id)
        assert (claim.attempt_index, claim.handle.lease_epoch) == (number, number + 1)
    await lose_once_more(engine, handle.execution_id)
    outcome = await engine.backend.claims.issue_reclaim_grant(handle.execution_id, **OTHER)
    assert outcome == ReclaimCapExceeded(handle.execution_id, 3)
    attempts = await engine.backend.reads.read_attempts(handle.execution_id)
    assert [attempt.attempt_index for attempt in attempts] == [0, 1, 2, 3]
    assert len({attempt.attempt_id for attempt in attempts}) == 4


# --- lost replies ------------------------------------------------------------------------


async def test_a_repeated_reclaim_gives_the_same_claim(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    held = await reclaim_grant(engine, execution_id)
    ids = {"lease_id": new_uuid(), "attempt_id": new_uuid()}
    first = await use(engine, held, **ids)
    async with untouched(engine):
        assert await use(engine, held, **ids) == first
        assert (await use(engine, held, lease_id=ids["lease_id"])).kind == "not_reclaimable"
    assert (await engine.backend.reads.read_execution_info(execution_id)).lease_reclaim_count == 1


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


async def test_recovery_as_a_worker_does_it(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL + 1)
    await refused("lease_expired", engine.backend.executions.complete(handle, b"late"))
    claim = await reclaim(engine, handle.execution_id)
    await engine.backend.executions.complete(claim.handle, b"in time")
    assert await engine.backend.reads.get_execution_result(handle.execution_id) == b"in time"
    await refused("execution_not_active", engine.backend.executions.complete(handle, b"late"))
    assert await event_types(engine, handle.execution_id) == [
        "acquired",
        "expired",
        "reclaimed",
        "completion",
    ]


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
