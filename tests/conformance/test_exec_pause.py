"""Delays, waiting for children, and promotion: the same attempt resumes later."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Ready
from flowfabric.core.state import PublicState
from tests.support.engine import LANE, Engine, refused, unchanged
from tests.support.executions import promote

TIMEOUT = {"timeout_policy": {"attempt_timeout_ms": 1000}}


@pytest.mark.parametrize("until", [0, -1, 2**63, 1.5, "soon", True])
async def test_delay_input(engine: Engine, until: Any) -> None:
    handle = await engine.running()
    answer = await unchanged(engine, lambda: engine.backend.executions.delay(handle, until))
    assert answer.code == "invalid_input"
    assert answer.detail.startswith("delay_until")


@pytest.mark.parametrize("until", [2**53 - 1, 2**53, 2**63 - 1])
async def test_a_delay_beyond_all_times_is_the_latest_one(engine: Engine, until: int) -> None:
    handle = await engine.running()
    await engine.backend.executions.delay(handle, until)
    created = await engine.create(delay_until=until, execution_deadline_at=until)
    for execution_id in (handle.execution_id, created):
        info = await engine.backend.reads.read_execution_info(execution_id)
        assert (info.public_state, info.delay_until) == (PublicState.DELAYED, 2**53 - 1)
    assert info.execution_deadline_at == 2**53 - 1


async def test_the_same_attempt_resumes(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.progress(handle, 30, "third")
    await engine.backend.executions.delay(handle, await engine.now() + 5000)
    assert await engine.claim_all() == []
    assert await promote(engine, handle.execution_id) == "not_yet_due"
    await engine.advance(5000)
    assert await promote(engine, handle.execution_id) == "promoted"
    grant = await engine.backend.claims.issue_claim_grant(
        handle.execution_id, worker_id="w", worker_instance_id="w-1"
    )
    worker: dict[str, Any] = {
        "worker_id": "w",
        "worker_instance_id": "w-1",
        "lease_ttl_ms": 5000,
    }
    await refused(
        engine.backend.claims.claim_execution(grant, **worker), "use_claim_resumed_execution"
    )
    claim = await engine.backend.claims.claim_resumed_execution(grant, **worker)
    assert claim.handle.attempt_id == handle.attempt_id
    assert claim.handle.attempt_index == 0
    assert claim.handle.lease_epoch == handle.lease_epoch + 1
    assert claim.handle.lease_id != handle.lease_id
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert attempt.attempt_state == "started"
    assert attempt.resumed_at is not None
    assert (attempt.suspended_at, attempt.suspension_id) == (None, None)
    # Progress belongs to the attempt, which is still the same.
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert (info.progress_pct, info.total_attempt_count) == (30, 1)


async def test_a_delay_repeated(engine: Engine) -> None:
    handle = await engine.running()
    until = await engine.now() + 5000
    first = await engine.backend.executions.delay(handle, until)
    assert await unchanged(engine, lambda: engine.backend.executions.delay(handle, until)) == first
    await engine.advance(5000)
    await promote(engine, handle.execution_id)
    assert await unchanged(engine, lambda: engine.backend.executions.delay(handle, until)) == first
    await engine.claim()
    answer = await unchanged(engine, lambda: engine.backend.executions.delay(handle, until))
    assert answer.code == "stale_lease"


async def test_a_delay_that_was_due_repeated(engine: Engine) -> None:
    handle = await engine.running()
    first = await engine.backend.executions.delay(handle, 1)
    assert await unchanged(engine, lambda: engine.backend.executions.delay(handle, 1)) == first
    assert first.public_state is PublicState.WAITING


async def test_a_delay_is_no_move(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.delay(handle, 1)
    await refused(engine.backend.executions.wait_children(handle), "execution_not_active")


# --- waiting for children -----------------------------------------------------------------------


async def test_ready_keeps_the_lease(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    answer = await unchanged(engine, lambda: engine.backend.executions.wait_children(handle))
    assert answer == Ready()
    await engine.backend.executions.complete(handle)


async def test_promotion_of_many(engine: Engine) -> None:
    now = await engine.now()
    ids = [await engine.create(delay_until=now + 1000 * (i + 1)) for i in range(3)]
    missing = engine.new_id()
    await engine.advance(2500)
    verdicts = await engine.backend.upkeep.promote_delayed(
        ids[0].tag, LANE, [*ids, missing, ids[0]]
    )
    assert verdicts == [
        *("promoted", "promoted", "not_yet_due", "not_found_cleaned", "not_delayed_cleaned")
    ]
