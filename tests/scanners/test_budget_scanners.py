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
from flowfabric.scanners.base import Cycle, ScanResult
from flowfabric.scanners.budget_jobs import BudgetReconciler
from tests.support.budgets import held, hold, new_budget, spend, used
from tests.support.engine import Engine
from tests.support.scanning import idle, members, plant, running
from tests.support.sdk import until

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
        await until(is_reset, timeout=5)


@pytest.mark.corrupts
async def test_a_damaged_schedule_does_not_stop_others(engine: Engine) -> None:
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
    await hold(budgets, handle, budget_id, "its own name", a=4)
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


async def lost_holds(engine: Engine, budget_id: str, count: int) -> None:
    """Holds of leases that have ended; the process that ended them died before it returned them."""
    engine.backend.calls.on_returns = lambda _: None
    for _ in range(count):
        handle = await engine.running()
        await hold(engine.backend.budgets, handle, budget_id, handle.execution_id, a=1)
        await engine.backend.executions.complete(handle)


async def lost_ledgers(engine: Engine, budget_id: str, count: int) -> None:
    """Ledgers of executions that no longer exist."""
    for _ in range(count):
        await engine.backend.budgets.record_spend(budget_id, engine.new_id(), {"a": 1})


async def test_one_pass_returns_all_overdue_holds(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend)
    for number in range(250):
        await hold(budgets, handle, budget_id, f"r{number}", a=1)
    await engine.advance(60_001)
    assert await idle(engine).scan_once("budget_reconciler") == ScanResult(processed=250)
    assert await held(budgets, budget_id) == {}


async def test_one_pass_looks_up_all_holders_and_ledgers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.scanners.budget_jobs._LOOKED_UP", 2)
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend)
    await lost_holds(engine, budget_id, 5)
    await lost_ledgers(engine, budget_id, 5)
    live = await engine.running()
    await hold(budgets, live, budget_id, a=7)
    await budgets.record_spend(budget_id, live.execution_id, {"a": 1})
    assert await idle(engine).scan_once("budget_reconciler") == ScanResult(processed=10)
    assert await held(budgets, budget_id) == {"a": 7}
    assert await budgets.ledgers(budget_id) == [live.execution_id]


async def test_one_pass_deletes_all_that_is_left_of_a_deleted_budget(engine: Engine) -> None:
    budget_id = await new_budget(engine.backend)
    await lost_ledgers(engine, budget_id, 1100)
    tag = tag_of(engine, budget_id)
    # As if the process that deletes it had died after its first call.
    await engine.backend.calls.fcall("ff_budget_delete", tag, (budget_id, new_uuid()), op="test")
    assert len(await engine.backend.budgets.ledgers(budget_id)) == 100
    assert await idle(engine).scan_once("budget_reconciler") == ScanResult(processed=1)
    assert await engine.backend.budgets.ledgers(budget_id, limit=2000) == []
    assert await members(engine, tag, "budget_policies") == []


async def test_what_a_dead_process_left_of_a_deleted_budget_goes(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend)
    await budgets.note_blocked(budget_id, [await engine.create()])
    tag = tag_of(engine, budget_id)
    # It died before it let go of those that waited.
    await engine.backend.calls.fcall("ff_budget_delete", tag, (budget_id, new_uuid()), op="test")
    assert await idle(engine).scan_once("budget_reconciler") == ScanResult(processed=1)
    assert await budgets.blocked(budget_id) == []
    assert await members(engine, tag, "budget_policies") == []


class Impatient(Cycle):
    """A cycle that is out of time after some checks of the clock."""

    checks = 0

    def out_of_time(self) -> bool:
        self.checks -= 1
        self.more = self.checks < 0
        return self.more


async def test_a_pass_that_runs_out_of_time_continues_where_it_stopped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if one budget takes all the time of a pass."""
    monkeypatch.setattr("flowfabric.scanners.budget_jobs._LOOKED_UP", 2)
    budgets = engine.backend.budgets
    ids = [await new_budget(engine.backend) for _ in range(3)]
    for budget_id in ids:
        await lost_holds(engine, budget_id, 5)
    reconciler = BudgetReconciler(engine.backend, HOUR)
    for _ in range(32):
        cycle = Impatient(engine.backend, {})
        # Enough for two partitions, or for some holders of one budget.
        cycle.checks = 2
        await reconciler.scan(cycle)
    assert [await held(budgets, each) for each in ids] == [{}, {}, {}]
    # The next pass starts over.
    await lost_holds(engine, ids[0], 1)
    await reconciler.scan(Cycle(engine.backend, {}))
    await reconciler.scan(Cycle(engine.backend, {}))
    assert await held(budgets, ids[0]) == {}


async def test_a_thorough_pass_starts_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.scanners.budget_jobs._LOOKED_UP", 2)
    budget_id = await new_budget(engine.backend)
    await lost_holds(engine, budget_id, 8)
    reconciler = BudgetReconciler(engine.backend, HOUR)
    while await held(engine.backend.budgets, budget_id) == {"a": 8}:
        cycle = Impatient(engine.backend, {})
        cycle.checks = 2
        await reconciler.scan(cycle)
    # Some of them are where the last pass has already been.
    await lost_holds(engine, budget_id, 20)
    await reconciler.scan(Cycle(engine.backend, {}, thorough=True))
    assert await held(engine.backend.budgets, budget_id) == {}


async def test_ledgers_continue_where_the_last_pass_stopped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.scanners.budget_jobs._LOOKED_UP", 2)
    budgets = engine.backend.budgets
    ids = [await new_budget(engine.backend) for _ in range(2)]
    for budget_id in ids:
        await lost_ledgers(engine, budget_id, 5)
    reconciler = BudgetReconciler(engine.backend, HOUR)
    left = list[int]()
    for _ in range(8):
        cycle = Impatient(engine.backend, {})
        # Enough for the budgets and the partitions; then one page of ledgers.
        cycle.checks = len(ids) + 32
        await reconciler.scan(cycle)
        left.append(sum([len(await budgets.ledgers(each)) for each in ids]))
    assert left == [8, 6, 5, 3, 1, 0, 0, 0]


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
