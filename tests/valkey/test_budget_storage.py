"""Budgets as they are stored: names of marks, damage, wrong types, the slots of a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.contracts.budgets import BudgetChange, Exhausted
from flowfabric.core.errors import CorruptionError
from flowfabric.core.partition import PartitionCounts, budget_partition
from flowfabric.engine.api.budgets import Budgets
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support import lua_keys
from tests.support.budgets import budget, held, hold, new_budget, spend, used
from tests.support.cluster import TestCluster
from tests.support.engine import Engine, refused


def tag_of(engine: Engine, budget_id: str) -> str:
    return f"{{b:{budget_partition(budget_id, engine.backend.counts)}}}"


async def test_the_mark_carries_the_tag_and_the_budget(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    budget_id = await new_budget(engine.backend, dedup_ttl_ms=5000)
    await budgets.report_usage_admin(budget_id, {"a": 1}, dedup_key="{k}:1")
    mark = lua_keys.usage_mark(tag_of(engine, budget_id), budget_id, "{k}:1")
    life: Any = await call("PTTL", mark)
    assert 0 < life <= 5000
    await budgets.update_budget_limits(budget_id, BudgetChange(dedup_ttl_ms=90_000))
    await budgets.report_usage_admin(budget_id, {"a": 1}, dedup_key="later")
    life = await call("PTTL", lua_keys.usage_mark(tag_of(engine, budget_id), budget_id, "later"))
    assert 80_000 < life <= 90_000


async def test_a_budget_that_no_longer_recurs_leaves_the_schedule(engine: Engine) -> None:
    budget_id = await new_budget(engine.backend, reset_interval_ms=1000)
    schedule = keys.index(tag_of(engine, budget_id), "budget_resets")
    assert await engine.backend.transport.call("ZCARD", schedule) == 1
    await engine.backend.budgets.update_budget_limits(budget_id, BudgetChange(reset_interval_ms=0))
    assert await engine.backend.transport.call("ZCARD", schedule) == 0


async def test_a_mark_lives_for_a_day(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    budget_id = await new_budget(engine.backend)
    await budgets.report_usage_admin(budget_id, {"a": 1}, dedup_key="k")
    life: Any = await call("PTTL", lua_keys.usage_mark(tag_of(engine, budget_id), budget_id, "k"))
    assert 86_390_000 < life <= 86_400_000


async def test_a_report_without_a_key_leaves_nothing_for_long(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    budget_id = await new_budget(engine.backend)
    await spend(budgets, budget_id, a=1)
    names: Any = await call("KEYS", "ff:usagededup:*")
    lives: list[Any] = [await call("PTTL", name) for name in names]
    assert len(lives) == 2
    assert all(0 < life <= 60_000 for life in lives)


async def test_large_counters_are_plain_numbers(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    budget_id = await new_budget(engine.backend)
    await spend(budgets, budget_id, a=10**15)
    usage = keys.budget_part(tag_of(engine, budget_id), budget_id, "usage")
    assert await call("HGET", usage, "a") == b"1000000000000000"


Use = Callable[[Budgets, str, Any], Awaitable[Any]]
USES: dict[str, Use] = {
    "status": lambda b, i, _: b.get_budget_status(i),
    "report": lambda b, i, _: b.report_usage_admin(i, {"a": 1}),
    "reserve": lambda b, i, h: b.reserve(h, i, {"a": 1}, "new"),
    "settle": lambda b, i, _: b.settle(i, "r"),
    "admission": lambda b, i, _: b.read_budget_usage_and_limits(i),
}


@pytest.mark.corrupts
@pytest.mark.parametrize("part", ["limits", "usage", "reserved"])
@pytest.mark.parametrize("how", ["number", "type"])
@pytest.mark.parametrize("use", sorted(USES))
async def test_damage_is_an_error_and_never_zero(
    engine: Engine, part: str, how: str, use: str
) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    handle, budget_id = await engine.running(), await new_budget(engine.backend, {"a": 10})
    await spend(budgets, budget_id, a=1)
    await hold(budgets, handle, budget_id, a=1)
    key = keys.budget_part(tag_of(engine, budget_id), budget_id, part)
    if how == "number":
        await call("HSET", key, "hard:a" if part == "limits" else "a", "1e3")
    else:
        await call("DEL", key)
        await call("SET", key, "garbage")
    if (use, part) == ("report", "reserved"):
        assert (await USES[use](budgets, budget_id, handle)).kind == "ok"
        return
    with pytest.raises(CorruptionError) as caught:
        await USES[use](budgets, budget_id, handle)
    assert budget_id in str(caught.value)


@pytest.mark.corrupts
@pytest.mark.parametrize("how", ["number", "type", "definition"])
async def test_admission_fails_closed_for_the_damaged_one_only(engine: Engine, how: str) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    broken, fine = await new_budget(engine.backend, {"a": 10}), await new_budget(engine.backend)
    full = await new_budget(engine.backend, {"a": 1})
    await spend(budgets, full, a=1)
    tag = tag_of(engine, broken)
    if how == "number":
        await call("HSET", keys.budget_part(tag, broken, "limits"), "hard:a", "many")
    else:
        key = keys.budget(tag, broken)
        if how == "type":
            key = keys.budget_part(tag, broken, "limits")
        await call("DEL", key)
        await call("SET", key, "garbage")
    found = await budgets.exhausted([broken, fine, full])
    assert isinstance(found[broken], CorruptionError)
    assert found[fine] is None
    assert found[full] == Exhausted(full, "a", 1, 1)


@pytest.mark.corrupts
async def test_a_damaged_budget_hides_no_other(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    broken, fine = await new_budget(engine.backend), await new_budget(engine.backend)
    await call("HSET", keys.budget(tag_of(engine, broken), broken), "breach_count", "x")
    page = await budgets.list_budgets()
    assert [status.budget_id for status in page.entries] == [fine]
    assert len(page.damaged) == 1
    assert broken in page.damaged[0]


@pytest.mark.corrupts
async def test_unreadable_holds_are_reported(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    handle, budget_id = await engine.running(), await new_budget(engine.backend)
    await hold(budgets, handle, budget_id, a=1)
    holds = keys.budget_part(tag_of(engine, budget_id), budget_id, "holds")
    await call("HSET", holds, "r", "garbage")
    with pytest.raises(CorruptionError):
        await budgets.holders(budget_id)
    with pytest.raises(CorruptionError):
        await budgets.settle(budget_id, "r")


@pytest.mark.corrupts
async def test_an_entry_without_its_hold_stops_no_pass(engine: Engine) -> None:
    budgets, call = engine.backend.budgets, engine.backend.transport.call
    handle, budget_id = await engine.running(), await new_budget(engine.backend)
    await hold(budgets, handle, budget_id, a=1)
    tag = tag_of(engine, budget_id)
    await call("ZADD", keys.budget_part(tag, budget_id, "hold_expiry"), 1, "ghost")
    await engine.advance(10**9)
    (audit,) = await budgets.reconcile_budget_counters(tag, [budget_id])
    assert (audit.returned, audit.has_holders) == (2, False)
    assert (await budgets.get_budget_status(budget_id)).reserved == {}
    (audit,) = await budgets.reconcile_budget_counters(tag, [budget_id])
    assert audit.returned == 0


async def test_a_repeated_create_repairs_the_index(engine: Engine) -> None:
    budgets, new = engine.backend.budgets, budget({"a": 1})
    await budgets.create_budget(new)
    index = keys.index(tag_of(engine, new.budget_id), "budget_policies")
    await engine.backend.transport.call("DEL", index)
    await budgets.create_budget(new)
    assert [each.budget_id for each in (await budgets.list_budgets()).entries] == [new.budget_id]


async def test_on_a_cluster_every_call_stays_in_its_slot(cluster: TestCluster) -> None:
    url = parse_url(cluster.url)
    async with await ValkeyBackend.connect(url, prepare_with=PartitionCounts(flow=8)) as backend:
        await backend.transport.call_all_primaries("FLUSHALL")
        await backend.meta.prepare()
        engine, budgets = Engine(backend), backend.budgets
        ids = [await new_budget(backend, {"a": 10}, reset_interval_ms=60_000) for _ in range(12)]
        handle = await engine.running()
        for budget_id in ids:
            await budgets.record_spend(budget_id, handle.execution_id, {"a": 4}, "k")
            await hold(budgets, handle, budget_id, budget_id, a=5)
            assert (await budgets.reserve(handle, budget_id, {"a": 5}, "x")).kind == "hard_breach"
            await budgets.settle(budget_id, budget_id, {"a": 6})
            assert (await used(budgets, budget_id), await held(budgets, budget_id)) == (
                {"a": 10},
                {},
            )
            tag = tag_of(engine, budget_id)
            (audit,) = await budgets.reconcile_budget_counters(tag, [budget_id])
            assert audit.has_ledgers
            assert await budgets.reset_due(tag, [budget_id]) == ["not_due"]
        found = await budgets.exhausted(ids)
        assert {each for each, state in found.items() if isinstance(state, Exhausted)} == set(ids)
        page = await budgets.list_budgets(limit=5)
        assert [status.budget_id for status in page.entries] == sorted(ids)[:5]
        feed = await backend.events.subscribe_operator_events("start")
        seen = set[str]()
        async with feed:
            async for event in feed:
                seen.add(getattr(event, "fields", {}).get("budget_id", ""))
                if seen >= set(ids):
                    break
        for budget_id in ids:
            await budgets.delete_budget(budget_id)


@pytest.mark.parametrize("tag", ["{b:32}", "{fp:1}", "b:1", 5])
async def test_tags_of_other_partitions_are_refused(engine: Engine, tag: Any) -> None:
    await refused(engine.backend.budgets.reset_due(tag, []), "invalid_input")
