"""delay, waiting for children, and promotion: the same attempt goes on later."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Delayed, Moved, Ready
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from tests.engine.exec_support import (
    block,
    expire_attempt,
    freeze,
    indexes,
    promote,
    record,
    refused,
    unchanged,
)
from tests.support.engine import LANE, Engine

TIMEOUT = {"timeout_policy": {"attempt_timeout_ms": 1000}}


async def test_delay_until_a_time(engine: Engine) -> None:
    handle = await engine.running()
    until = await engine.now() + 5000
    outcome = await engine.backend.executions.delay(handle, until)
    assert outcome == Delayed(handle.execution_id, PublicState.DELAYED)
    assert await indexes(engine, handle.execution_id) == {f"lane:{LANE}:delayed": until}
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert attempt.attempt_state == "suspended"
    assert attempt.suspension_id == "worker_delay"
    assert attempt.suspended_at is not None
    assert attempt.ended_at is None
    event = (await engine.events(handle.execution_id))[-1]
    assert (event.type, event.get("reason")) == ("released", "worker_delay")
    assert event.get("delay_until") == until
    snapshot = await engine.backend.reads.describe_execution(handle.execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None
    assert snapshot.current_attempt is not None


@pytest.mark.parametrize("offset", [-(10**6), 0])
async def test_delay_that_is_due_gives_the_lease_back(engine: Engine, offset: int) -> None:
    handle = await engine.running()
    now = await engine.now()
    await freeze(engine, now)
    outcome = await engine.backend.executions.delay(handle, now + offset)
    assert outcome == Delayed(handle.execution_id, PublicState.WAITING)
    assert list(await indexes(engine, handle.execution_id)) == [f"lane:{LANE}:eligible"]
    claim = await engine.claim()
    assert claim.handle.kind == "resumed"


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


async def test_the_unused_attempt_time_is_kept(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    claimed = await engine.now()
    armed = (await indexes(engine, handle.execution_id))["attempt_timeout"]
    assert armed is not None
    await freeze(engine, claimed + 300)
    await engine.backend.executions.delay(handle, 1)
    left = armed - (claimed + 300)
    assert "attempt_timeout" not in await indexes(engine, handle.execution_id)
    fields = await record(engine, handle.execution_id)
    assert float(fields["attempt_timeout_remaining_ms"]) == left
    await freeze(engine, claimed + 900_000)
    handle = (await engine.claim()).handle
    held = await indexes(engine, handle.execution_id)
    assert held["attempt_timeout"] == claimed + 900_000 + left
    assert "attempt_timeout_remaining_ms" not in await record(engine, handle.execution_id)
    # A second pause counts on from there.
    await freeze(engine, claimed + 900_100)
    await engine.backend.executions.delay(handle, 1)
    fields = await record(engine, handle.execution_id)
    assert float(fields["attempt_timeout_remaining_ms"]) == left - 100


async def test_an_overdue_timer_keeps_one_millisecond(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    await engine.advance(5000)
    await engine.backend.executions.delay(handle, 1)
    assert (await record(engine, handle.execution_id))["attempt_timeout_remaining_ms"] == "1"
    now = await engine.now()
    await freeze(engine, now)
    await engine.claim()
    assert (await indexes(engine, handle.execution_id))["attempt_timeout"] == now + 1
    await freeze(engine, now + 1)
    assert await expire_attempt(engine, handle.execution_id) == "expired"


async def test_the_deadline_stays_armed(engine: Engine) -> None:
    deadline = await engine.now() + 60_000
    handle = await engine.running(execution_deadline_at=deadline)
    await engine.backend.executions.delay(handle, await engine.now() + 5000)
    assert (await indexes(engine, handle.execution_id))["execution_deadline"] == deadline


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


async def test_moved(engine: Engine) -> None:
    handle = await engine.running(policy=TIMEOUT)
    await block(engine, handle.execution_id)
    outcome = await engine.backend.executions.wait_children(handle)
    assert outcome == Moved(handle.execution_id)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert await indexes(engine, handle.execution_id) == {
        f"lane:{LANE}:blocked:dependencies": int(info.created_at)
    }
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.suspension_id) == ("suspended", "waiting_children")
    event = (await engine.events(handle.execution_id))[-1]
    assert (event.type, event.get("reason")) == ("released", "waiting_children")
    assert event.get("delay_until") is None
    assert int((await record(engine, handle.execution_id))["attempt_timeout_remaining_ms"]) > 0
    why = await engine.backend.reads.explain_execution(handle.execution_id)
    assert (why.blocking_reason, why.unresolved_edges) == ("waiting_for_children", 1)
    assert (
        await unchanged(engine, lambda: engine.backend.executions.wait_children(handle)) == outcome
    )
    await refused(engine.backend.executions.delay(handle, 1), "execution_not_active")


async def test_a_move_that_would_be_ready_is_not_repeated(engine: Engine) -> None:
    """The answer stored with the pause wins over what the edges say now."""
    handle = await engine.running()
    await block(engine, handle.execution_id)
    await engine.backend.executions.wait_children(handle)
    await engine.backend.transport.call(
        "DEL", keys.unresolved(handle.execution_id.tag, handle.execution_id)
    )
    assert await engine.backend.executions.wait_children(handle) == Moved(handle.execution_id)


# --- promotion ----------------------------------------------------------------------------------


async def test_promotion_on_the_millisecond(engine: Engine) -> None:
    due = await engine.now() + 5000
    execution_id = await engine.create(delay_until=due, priority=3)
    await freeze(engine, due - 1)
    assert await unchanged(engine, lambda: promote(engine, execution_id)) == "not_yet_due"
    await freeze(engine, due)
    assert await promote(engine, execution_id) == "promoted"
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.delay_until is None
    assert await indexes(engine, execution_id) == {
        f"lane:{LANE}:eligible": int(info.created_at) - 3 * 10**12
    }
    assert await engine.events(execution_id) == []


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


@pytest.mark.corrupts
async def test_promotion_cleans_what_does_not_belong(engine: Engine) -> None:
    call = engine.backend.transport.call
    missing, handle = engine.new_id(), await engine.running()
    waiting = await engine.create()
    index = keys.lane(missing.tag, LANE, "delayed")
    await call("ZADD", index, 1, missing, 1, handle.execution_id, 1, waiting)
    ids = [missing, handle.execution_id, waiting]
    verdicts = await engine.backend.upkeep.promote_delayed(missing.tag, LANE, ids)
    assert verdicts == ["not_found_cleaned", "not_runnable_cleaned", "not_delayed_cleaned"]
    assert await call("EXISTS", index) == 0
    assert (await engine.vector(waiting)).code == "ruewnf"


@pytest.mark.corrupts
async def test_a_delayed_record_without_a_time_is_promoted(engine: Engine) -> None:
    execution_id = await engine.create(delay_until=await engine.now() + 60_000)
    key = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HDEL", key, "delay_until")
    assert await promote(engine, execution_id) == "promoted"
