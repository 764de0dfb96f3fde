"""Reads of one execution, strict about what is stored."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.executions import CurrentAttempt
from flowfabric.core.state import StateVector
from tests.support.engine import LANE, TTL, Engine, refused
from tests.support.executions import CODES, Case
from tests.support.state_rules import violations


async def test_missing_executions(engine: Engine) -> None:
    missing = engine.new_id()
    backend = engine.backend
    for call in (
        backend.reads.read_execution_info(missing),
        backend.reads.read_execution_state(missing),
        backend.reads.read_outcome(missing),
        backend.reads.read_attempts(missing),
        backend.reads.read_execution_history(missing),
        backend.reads.explain_execution(missing),
    ):
        await refused(call, "execution_not_found")
    await refused(backend.reads.read_execution_context(missing), "invalid_input")
    assert await backend.reads.describe_execution(missing) is None
    assert await backend.reads.get_execution_result(missing) is None
    assert await backend.reads.get_execution_namespace(missing) is None
    assert await backend.reads.get_execution_tags(missing) == {}
    assert await backend.reads.read_exec_core_fields(missing, ["priority"]) == {"priority": None}
    assert await backend.reads.read_current_attempt_index(missing) == 0
    assert await backend.reads.read_total_attempt_count(missing) == 0


@pytest.mark.parametrize("state", sorted(CODES))
async def test_every_state_reads(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    backend, execution_id = engine.backend, case.execution_id
    vector = StateVector.from_code(CODES[state])
    assert violations(vector) == []
    info = await backend.reads.read_execution_info(execution_id)
    assert info.state_vector == vector
    assert await backend.reads.read_execution_state(execution_id) is vector.public_state
    snapshot = await backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.public_state is vector.public_state
    reason = vector.blocking_reason.value
    assert snapshot.blocking_reason == (None if reason == "none" else reason)
    assert (snapshot.current_lease is not None) == (CODES[state][0] == "a")
    fields = await backend.reads.read_exec_core_fields(
        execution_id,
        [
            *("lifecycle_phase", "ownership_state", "eligibility_state", "blocking_reason"),
            *("terminal_outcome", "attempt_state", "public_state", "execution_id", "partition_id"),
            *("current_lane", "total_attempt_count", "current_lease_epoch"),
        ],
    )
    assert fields == {
        "lifecycle_phase": vector.lifecycle_phase.value,
        "ownership_state": vector.ownership_state.value,
        "eligibility_state": vector.eligibility_state.value,
        "blocking_reason": reason,
        "terminal_outcome": vector.terminal_outcome.value,
        "attempt_state": vector.attempt_state.value,
        "public_state": vector.public_state.value,
        "execution_id": str(execution_id),
        "partition_id": str(execution_id.partition),
        "current_lane": LANE,
        "total_attempt_count": str(info.total_attempt_count),
        "current_lease_epoch": "0" if case.handle is None else "1",
    }
    attempts = await backend.reads.read_attempts(execution_id)
    assert len(attempts) == await backend.reads.read_total_attempt_count(execution_id)
    assert [attempt.attempt_index for attempt in attempts] == list(range(len(attempts)))
    why = await backend.reads.explain_execution(execution_id)
    assert (why.public_state, why.blocking_reason) == (vector.public_state, reason)


async def test_snapshot_of_a_lease(engine: Engine) -> None:
    execution_id = await engine.create(tags={"a.b": "c"}, namespace="tenant")
    claim = await engine.claim()
    renewed = await engine.backend.leases.renew(claim.handle)
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    handle = claim.handle
    assert snapshot.current_attempt == CurrentAttempt(handle.attempt_id, 0)
    lease = snapshot.current_lease
    assert lease is not None
    assert (lease.lease_id, lease.lease_epoch) == (handle.lease_id, 1)
    assert (lease.worker_instance_id, lease.attempt_index) == ("w-1", 0)
    assert lease.expires_at == renewed.expires_at
    assert lease.last_heartbeat_at == renewed.expires_at - TTL
    assert (snapshot.namespace, snapshot.tags) == ("tenant", {"a.b": "c"})
    assert await engine.backend.reads.get_execution_namespace(execution_id) == "tenant"


@pytest.mark.parametrize("state", ["lease_expired", "revoked"])
async def test_a_lost_lease_is_still_shown(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    snapshot = await engine.backend.reads.describe_execution(case.execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is not None
    assert snapshot.current_lease.lease_id == case.held.lease_id
    why = await engine.backend.reads.explain_execution(case.execution_id)
    assert why.blocking_detail.startswith("lease ")


async def test_attempt_indexes(engine: Engine) -> None:
    execution_id = await engine.create()
    backend = engine.backend
    assert await backend.reads.read_current_attempt_index(execution_id) == 0
    assert await backend.reads.read_total_attempt_count(execution_id) == 0
    await engine.claim()
    assert await backend.reads.read_current_attempt_index(execution_id) == 0
    assert await backend.reads.read_total_attempt_count(execution_id) == 1
    await engine.advance(TTL)
    await backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
    await engine.claim()
    assert await backend.reads.read_current_attempt_index(execution_id) == 1
    assert await backend.reads.read_total_attempt_count(execution_id) == 2


async def test_explain(engine: Engine) -> None:
    due = await engine.now() + 60_000
    execution_id = await engine.create(
        delay_until=due, policy={"routing_requirements": {"required_capabilities": ["gpu"]}}
    )
    why = await engine.backend.reads.explain_execution(execution_id)
    assert (why.blocking_reason, why.retry_at, why.lane_state) == (
        "waiting_for_delay",
        due,
        "active",
    )
    assert why.since == int(
        (await engine.backend.reads.read_execution_info(execution_id)).created_at
    )
    await engine.backend.lanes.set_lane_state(LANE, "paused")
    await engine.advance(60_000)
    await engine.backend.upkeep.promote_delayed(execution_id.tag, LANE, [execution_id])
    why = await engine.backend.reads.explain_execution(execution_id)
    assert (why.blocking_reason, why.lane_state) == ("waiting_for_capable_worker", "paused")
    assert (why.retry_at, why.missing_capabilities, why.live_workers) == (None, ("gpu",), 0)
    await engine.backend.lanes.set_lane_state(LANE, "active")
    await refused(
        engine.backend.claims.issue_claim_grant(
            execution_id, worker_id="w", worker_instance_id="w"
        ),
        "capability_mismatch",
    )
    why = await engine.backend.reads.explain_execution(execution_id)
    assert why.missing_capabilities == ("gpu",)


async def test_reads_write_nothing(engine: Engine) -> None:
    case = await Case.make(engine, "retry_waiting")
    before = await engine.dump()
    backend, execution_id = engine.backend, case.execution_id
    await backend.reads.read_execution_info(execution_id)
    await backend.reads.describe_execution(execution_id)
    await backend.reads.read_outcome(execution_id)
    await backend.reads.read_attempts(execution_id)
    await backend.reads.read_execution_history(execution_id)
    await backend.reads.explain_execution(execution_id)
    await backend.listings.list_executions()
    assert await engine.dump() == before
