"""Calls about budgets stay short at their limits."""

from __future__ import annotations

from flowfabric.core.contracts.budgets import BudgetChange
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import budget_partition
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.budgets import budget, new_budget
from tests.support.engine import Engine
from tests.support.server_time import ONCE_US, assert_short, command, times, uuids

WIDE = {f"dimension-{n}-{'x' * 100}": 2**50 for n in range(64)}
ONE_EACH = dict.fromkeys(WIDE, 1)


def ids(count: int) -> list[ExecutionId]:
    return [ExecutionId.parse(f"{{fp:1}}:{each}") for each in uuids(count)]


def tag_of(engine: Engine, budget_id: str) -> str:
    return f"{{b:{budget_partition(budget_id, engine.backend.counts)}}}"


async def test_budgets_of_many_dimensions(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, WIDE, WIDE, reset_interval_ms=1)
    tag, handle = tag_of(engine, budget_id), await engine.running()
    await budgets.record_spend(budget_id, handle.execution_id, ONE_EACH)
    numbers = iter(range(1000))

    async def create() -> None:
        await budgets.create_budget(budget(WIDE, WIDE))

    async def update() -> None:
        await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits=WIDE))

    async def spend() -> None:
        await budgets.record_spend(budget_id, handle.execution_id, ONE_EACH)

    async def release() -> None:
        await budgets.release_budget(budget_id, handle.execution_id)

    async def reserve() -> None:
        await budgets.reserve(handle, budget_id, ONE_EACH, f"r{next(numbers)}")

    async def settle() -> None:
        await reserve()
        await budgets.settle(budget_id, f"r{next(numbers) - 1}")

    async def unreserve() -> None:
        await reserve()
        await budgets.release_reservation(budget_id, f"r{next(numbers) - 1}")

    async def ask() -> None:
        await budgets.exhausted([budget_id] + [new_uuid() for _ in range(199)])

    async def reset() -> None:
        await budgets.reset_budget(budget_id)

    async def reset_due() -> None:
        await engine.advance(10)
        assert await budgets.reset_due(tag, [budget_id] * 20) == ["reset"] + ["not_due"] * 19

    await assert_short(engine, "ff_budget_create", create)
    await assert_short(engine, "ff_budget_update", update)
    await assert_short(engine, "ff_budget_spend", spend)
    await assert_short(engine, "ff_budget_release", release, spend)
    await assert_short(engine, "ff_budget_reserve", reserve)
    await assert_short(engine, "ff_budget_settle", settle)
    await assert_short(engine, "ff_budget_unreserve", unreserve)
    await assert_short(engine, "ff_budget_exhausted", ask)
    await assert_short(engine, "ff_budget_reset", reset)
    await assert_short(engine, "ff_budget_reset_due", reset_due)


async def test_reading_a_page_of_budgets(engine: Engine) -> None:
    for _ in range(100):
        await new_budget(engine.backend, WIDE, WIDE)

    async def read() -> None:
        await engine.backend.budgets.list_budgets(limit=100)

    await assert_short(engine, "ff_budget_read", read)


async def test_many_holds_of_one_execution(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id, eid = await new_budget(engine.backend, {"a": 1000}), handle.execution_id
    numbers = iter(range(100_000))

    async def hold() -> None:
        for _ in range(100):
            await budgets.reserve(handle, budget_id, {"a": 1}, f"r{next(numbers)}")

    async def extend() -> None:
        until = await engine.now() + 60_000
        assert await budgets.extend_holds(budget_id, eid, handle.lease_epoch, until) >= 100

    async def give_back() -> None:
        assert await budgets.return_holds(budget_id, eid, handle.lease_epoch) == 100

    await hold()
    await assert_short(engine, "ff_budget_extend_holds", extend)
    await give_back()
    await assert_short(engine, "ff_budget_return_holds", give_back, hold)
    await hold()
    await engine.advance(100_000)

    async def overdue() -> None:
        (audit,) = await budgets.reconcile_budget_counters(tag_of(engine, budget_id), [budget_id])
        assert audit.returned == 100

    assert max(await times(engine, "ff_budget_reconcile", overdue)) <= ONCE_US


async def test_many_ledgers_and_waiting_executions(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend)
    tag, many = tag_of(engine, budget_id), ids(2000)
    index = keys.budget_part(tag, budget_id, "by_exec:index")

    async def spend() -> None:
        for execution_id in many:
            await command(engine, "HSET", lua_keys.ledger(tag, budget_id, execution_id), "a", 1)
        await command(engine, "ZADD", index, *(part for each in many for part in (0, each)))

    async def forget() -> None:
        assert await budgets.forget_ledgers(budget_id, many[:200]) == 200

    async def block() -> None:
        await budgets.note_blocked(budget_id, many[:1000])

    async def delete() -> None:
        await budgets.delete_budget(budget_id)

    await assert_short(engine, "ff_budget_forget", forget, spend)
    await assert_short(engine, "ff_budget_blocked", block)
    await budgets.forget_blocked(budget_id, many)
    assert max(await times(engine, "ff_budget_delete", delete)) <= ONCE_US
    assert await command(engine, "KEYS", f"ff:budget:{tag}*") == []
    assert await budgets.stored_budgets(tag) == []
