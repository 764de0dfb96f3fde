"""Scheduled resets, and what the reconciler of budgets finds and repairs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.budgets import BudgetChange
from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import budget_partition
from flowfabric.engine.api.upkeep import Index
from flowfabric.engine.valkey import keys
from flowfabric.scanners.base import ScanResult
from tests.support.budgets import held, hold, new_budget, spend, used
from tests.support.engine import Engine
from tests.support.scanning import idle, members, plant, running, until

HOUR = 3_600_000


def tag_of(engine: Engine, budget_id: str) -> str:
    return f"{{b:{budget_partition(budget_id, engine.backend.counts)}}}"


async def next_reset(engine: Engine, budget_id: str) -> int:
    return int((await engine.backend.budgets.get_budget_status(budget_id)).next_reset_at or 0)


async def test_due_budgets_are_reset_without_drift(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10}, reset_interval_ms=HOUR)
    later = await new_budget(engine.backend, reset_interval_ms=9 * HOUR)
    planned = await next_reset(engine, budget_id)
    for each in (budget_id, later):
        await spend(budgets, each, a=7)
    assert await idle(engine).scan_once("budget_reset") == ScanResult()
    # Missed periods collapse into one reset.
    await engine.freeze(planned + 2 * HOUR + 5)
    assert await idle(engine).scan_once("budget_reset") == ScanResult(processed=1)
    assert await next_reset(engine, budget_id) == planned + 3 * HOUR
    assert await used(budgets, budget_id) == {"a": 0}
    assert await used(budgets, later) == {"a": 7}
    assert await idle(engine).scan_once("budget_reset") == ScanResult()
    assert (await budgets.get_budget_status(budget_id)).reset_count == 1


async def test_parallel_scanners_reset_once(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, reset_interval_ms=HOUR)
    await engine.advance(HOUR)
    tag = tag_of(engine, budget_id)
    answers = await asyncio.gather(*(budgets.reset_due(tag, [budget_id]) for _ in range(5)))
    assert sorted(answer for (answer,) in answers) == ["not_due"] * 4 + ["reset"]
    assert (await budgets.get_budget_status(budget_id)).reset_count == 1


async def test_a_running_scanner_resets_on_time(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, reset_interval_ms=300)
    await spend(budgets, budget_id, a=1)

    async def is_reset() -> bool:
        return (await budgets.get_budget_status(budget_id)).reset_count >= 1

    async with running(engine.backend):
        await until(is_reset, 5)


@pytest.mark.corrupts
async def test_a_damaged_schedule_stops_nobody(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, reset_interval_ms=HOUR)
    broken = await new_budget(engine.backend, reset_interval_ms=HOUR)
    tag = tag_of(engine, budget_id)
    await plant(engine, tag, "budget_resets", "nonsense")
    await plant(engine, tag, "budget_resets", new_uuid())
    await engine.backend.transport.call(
        "HSET", keys.budget(tag_of(engine, broken), broken), "next_reset_at", "soon"
    )
    await engine.advance(HOUR)
    assert await idle(engine).scan_once("budget_reset") == ScanResult(processed=2, errors=2)
    assert (await budgets.get_budget_status(budget_id)).reset_count == 1
    # The broken one may share the partition.
    assert set(await members(engine, tag, "budget_resets")) - {broken} == {"nonsense", budget_id}


async def test_only_one_partition(engine: Engine) -> None:
    budget_id = await new_budget(engine.backend, reset_interval_ms=HOUR)
    number = budget_partition(budget_id, engine.backend.counts)
    await engine.advance(HOUR)
    scanners = idle(engine)
    assert await scanners.scan_once("budget_reset", (number + 1) % 32) == ScanResult()
    assert await scanners.scan_once("budget_reset", number) == ScanResult(processed=1)


async def test_marks_of_lowered_limits(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10})
    skipped = await new_budget(engine.backend, {"a": 10}, reset_interval_ms=HOUR)
    await new_budget(engine.backend)
    for each in (budget_id, skipped):
        await spend(budgets, each, a=10)
    scanners = idle(engine)
    assert await scanners.scan_once("budget_reconciler") == ScanResult()
    for each in (budget_id, skipped):
        await budgets.update_budget_limits(each, BudgetChange(hard_limits={"a": 9}))
    assert await scanners.scan_once("budget_reconciler") == ScanResult(processed=1)
    status = await budgets.get_budget_status(budget_id)
    assert status.breached_at is not None
    assert "breached_at" not in status.usage
    assert (await budgets.get_budget_status(skipped)).breached_at is None
    assert await scanners.scan_once("budget_reconciler") == ScanResult()
    await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits={"a": 10}))
    assert await scanners.scan_once("budget_reconciler") == ScanResult(processed=1)
    assert (await budgets.get_budget_status(budget_id)).breached_at is None


@pytest.mark.corrupts
async def test_a_failed_read_is_not_an_absence(engine: Engine) -> None:
    budget_id, gone = await new_budget(engine.backend), new_uuid()
    tag = tag_of(engine, budget_id)
    await plant(engine, tag_of(engine, gone), "budget_policies", gone, 0)
    key = keys.budget(tag, budget_id)
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "garbage")
    result = await idle(engine).scan_once("budget_reconciler")
    assert result == ScanResult(processed=1, errors=1)
    assert await members(engine, tag, "budget_policies") == [budget_id]
    listed = [Index(tag_of(engine, gone), "budget_policies")]
    assert tag_of(engine, gone) == tag or not await engine.backend.upkeep.any_exists(listed)


@pytest.mark.parametrize("how", ["completed", "suspended", "reclaimed", "deleted", "overdue"])
async def test_holds_of_ended_leases_come_back(engine: Engine, how: str) -> None:
    """Also if the process that ended the lease dies before it returns them."""
    backend, budgets = engine.backend, engine.backend.budgets
    engine.backend.calls.on_returns = lambda _: None
    budget_id, handle = await new_budget(backend, {"a": 10}), await engine.running()
    await hold(budgets, handle, budget_id, a=4)
    scanners = idle(engine)
    assert await scanners.scan_once("budget_reconciler") == ScanResult()
    if how == "completed":
        await backend.executions.complete(handle)
    elif how == "suspended":
        await backend.executions.delay(handle, await engine.now() + HOUR)
    elif how == "reclaimed":
        await engine.advance(30_001)
        eid = handle.execution_id
        await backend.upkeep.mark_lease_expired_if_due(eid.tag, [eid])
        again = (await engine.claim(instance="w-2")).handle
        assert again.lease_epoch > handle.lease_epoch
        await hold(budgets, again, budget_id, "second", a=3)
    elif how == "deleted":
        await backend.executions.complete(handle)
        await backend.executions.purge_execution(handle.execution_id)
    else:
        await engine.advance(60_001)
    assert await scanners.scan_once("budget_reconciler") == ScanResult(processed=1)
    assert await held(budgets, budget_id) == ({"a": 3} if how == "reclaimed" else {})
    assert await used(budgets, budget_id) == {}


async def test_ledgers_without_an_execution_go_and_usage_stays(engine: Engine) -> None:
    backend, budgets = engine.backend, engine.backend.budgets
    budget_id = await new_budget(backend)
    handle, kept = await engine.running(), await engine.create()
    ids = {kept, handle.execution_id}
    for each in ids:
        await budgets.record_spend(budget_id, each, {"a": 1})
    scanners = idle(engine)
    assert await scanners.scan_once("budget_reconciler") == ScanResult()
    await backend.executions.complete(handle)
    await backend.executions.purge_execution(handle.execution_id)
    assert await scanners.scan_once("budget_reconciler") == ScanResult(processed=1)
    assert await budgets.ledgers(budget_id) == sorted(ids - {handle.execution_id})
    assert await used(budgets, budget_id) == {"a": 2}


async def test_an_idle_deployment_costs_one_command(engine: Engine) -> None:
    scanners, call = idle(engine), engine.backend.transport.call
    await scanners.scan_once("budget_reconciler")
    before: Any = await call("INFO", "commandstats")
    await scanners.scan_once("budget_reconciler")
    after: Any = await call("INFO", "commandstats")

    def exists(text: bytes) -> int:
        line = next(each for each in text.splitlines() if b"cmdstat_exists:" in each)
        return int(line.split(b"calls=")[1].split(b",")[0])

    assert exists(after) - exists(before) == 1


async def test_the_feed_is_trimmed_by_age(engine: Engine) -> None:
    budget_id = await new_budget(engine.backend)
    feed = keys.events(tag_of(engine, budget_id))
    call = engine.backend.transport.call
    assert await call("XLEN", feed) == 1
    await engine.advance(2 * 86_400_000)
    await idle(engine).scan_once("budget_reconciler")
    assert await call("XLEN", feed) == 0
