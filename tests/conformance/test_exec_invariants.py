"""Invariants over random lives, and a clock that steps back."""

from __future__ import annotations

from typing import Any

from tests.support.engine import Engine
from tests.support.executions import POLICY, expire_deadline, mark, promote

# --- a clock that steps back --------------------------------------------------------------------


async def test_timers_wait_again(engine: Engine) -> None:
    due = await engine.now() + 1000
    delayed = await engine.create(delay_until=due)
    deadline = await engine.create(execution_deadline_at=due)
    await engine.advance(1000)
    await engine.advance(-600_000)
    assert await promote(engine, delayed) == "not_yet_due"
    assert await expire_deadline(engine, deadline) == "not_yet_due"
    await engine.advance(600_000)
    assert await promote(engine, delayed) == "promoted"


async def test_a_lease_lives_longer_not_shorter(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(-600_000)
    assert await mark(engine, handle.execution_id) == "not_yet_expired"
    renewed = await engine.backend.leases.renew(handle)
    assert renewed.expires_at <= await engine.now() + handle.lease_ttl_ms
    await engine.backend.executions.complete(handle)


async def test_ages_and_reads_survive(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(-600_000)
    later = await engine.create()
    await engine.backend.executions.complete(handle)
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert int(info.completed_at or 0) < int(info.created_at)
    snapshot = await engine.backend.reads.describe_execution(handle.execution_id)
    assert snapshot is not None
    assert snapshot.last_mutation_at >= int(info.created_at)
    feed = await engine.events(handle.execution_id)
    assert [event.type for event in feed] == ["acquired", "completion"]
    assert (await engine.claim()).execution_id == later


async def test_a_retry_counts_from_the_new_time(engine: Engine) -> None:
    handle = await engine.running(policy=POLICY)
    await engine.advance(-600_000)
    outcome: Any = await engine.backend.executions.fail(handle, "x", "transient")
    assert outcome.delay_until <= await engine.now() + 1000
    await engine.advance(1000)
    assert await promote(engine, handle.execution_id) == "promoted"
