"""Budgets: definition, usage, dedup, breaches, reset, ledgers (07 §2 to §5)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from flowfabric.core.contracts.budgets import (
    BudgetChange,
    BudgetCreated,
    BudgetExists,
    BudgetReset,
    BudgetUpdated,
    Exhausted,
    HardBreach,
    SoftBreach,
    UsageAlreadyApplied,
    UsageOk,
)
from flowfabric.core.ids import new_uuid
from tests.support.budgets import budget, new_budget, spend, used
from tests.support.engine import Engine, refused

MAX = 2**53 - 1
DAY = 86_400_000


async def test_creating_twice_keeps_the_first_limits(engine: Engine) -> None:
    budgets = engine.backend.budgets
    first = budget({"tokens": 100}, {"tokens": 80}, scope_type="team", scope_id="ml")
    assert await budgets.create_budget(first) == BudgetCreated(first.budget_id)
    assert await budgets.create_budget(first) == BudgetExists(first.budget_id)
    other = budget({"tokens": 5}, budget_id=first.budget_id)
    assert await budgets.create_budget(other) == BudgetExists(first.budget_id, differs=True)
    status = await budgets.get_budget_status(first.budget_id)
    assert (status.hard_limits, status.soft_limits) == ({"tokens": 100}, {"tokens": 80})
    assert (status.scope_type, status.scope_id, status.usage) == ("team", "ml", {})
    assert (status.breach_count, status.soft_breach_count, status.next_reset_at) == (0, 0, None)
    assert status.created_at is not None


@pytest.mark.parametrize(
    "other",
    [
        {"scope_id": "x"},
        {"enforcement_mode": "warn"},
        {"on_hard_limit": "suspend"},
        {"on_soft_limit": "allow"},
        {"reset_interval_ms": 5},
        {"dedup_ttl_ms": 5},
        {"hard": {"tokens": 100, "cents": 1}},
        {"hard": {}, "soft": {}},
        {"soft": {"tokens": 1}},
    ],
)
async def test_whether_it_differs(engine: Engine, other: dict[str, object]) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"tokens": 100})
    fields = {"hard": {"tokens": 100}} | other
    outcome = await budgets.create_budget(budget(budget_id=budget_id, **fields))  # pyright: ignore[reportArgumentType]
    assert outcome == BudgetExists(budget_id, differs=True)


async def test_the_sequence_of_reports(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"tokens": 100}, {"tokens": 80})
    report = budgets.report_usage_admin
    assert await report(budget_id, {"tokens": 60}) == UsageOk()
    assert await report(budget_id, {"tokens": 25}) == SoftBreach("tokens", 85, 80, "warn")
    assert await report(budget_id, {"tokens": 50}) == HardBreach("tokens", 85, 100, "fail")
    status = await budgets.get_budget_status(budget_id)
    assert status.usage == {"tokens": 85}
    assert (status.breach_count, status.soft_breach_count) == (1, 1)
    assert status.last_breach_dim == "tokens"
    assert status.last_breach_at is not None


async def test_reaching_a_limit_is_no_breach(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"t": 10}, {"t": 8})
    assert await spend(budgets, budget_id, t=8) == "ok"
    assert await spend(budgets, budget_id, t=2) == "soft_breach"
    assert await used(budgets, budget_id) == {"t": 10}


async def test_all_dimensions_or_none(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"tokens": 1000, "cost": 50})
    outcome = await budgets.report_usage_admin(budget_id, {"tokens": 100, "cost": 60})
    assert outcome == HardBreach("cost", 0, 50, "fail")
    assert await used(budgets, budget_id) == {}


async def test_the_first_dimension_is_that_of_the_list_or_by_name(engine: Engine) -> None:
    report = engine.backend.budgets.report_usage_admin
    budget_id = await new_budget(engine.backend, {"a": 1, "b": 1})
    by_name = await report(budget_id, {"b": 5, "a": 5})
    assert isinstance(by_name, HardBreach)
    assert by_name.dimension == "a"
    as_listed = await report(budget_id, ["b", "a"], [5, 5])
    assert isinstance(as_listed, HardBreach)
    assert as_listed.dimension == "b"


async def test_a_repeated_name_is_summed_before_the_check(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10})
    outcome = await budgets.report_usage_admin(budget_id, ["a", "a"], [6, 6])
    assert outcome.kind == "hard_breach"
    assert await used(budgets, budget_id) == {}


async def test_dimensions_without_limits_are_counted(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 0})
    assert await spend(budgets, budget_id, a=5, other=7, zero=0) == "ok"
    assert await used(budgets, budget_id) == {"a": 5, "other": 7, "zero": 0}


async def test_a_key_counts_once(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10}, {"a": 1})
    report = budgets.report_usage_admin
    assert (await report(budget_id, {"a": 5}, dedup_key="k")).kind == "soft_breach"
    assert await report(budget_id, {"a": 5}, dedup_key="k") == UsageAlreadyApplied()
    assert await used(budgets, budget_id) == {"a": 5}
    # Another budget has its own keys, and a spend shares them.
    other = await new_budget(engine.backend)
    assert await report(other, {"a": 5}, dedup_key="k") == UsageOk()
    execution_id = await engine.create()
    assert await budgets.record_spend(other, execution_id, {"a": 1}, "k") == UsageAlreadyApplied()


async def test_a_hard_breach_leaves_the_key_free(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10})
    report = budgets.report_usage_admin
    assert (await report(budget_id, {"a": 11}, dedup_key="k")).kind == "hard_breach"
    await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits={"a": 20}))
    assert await report(budget_id, {"a": 11}, dedup_key="k") == UsageOk()


async def test_a_worker_without_a_lease_may_report(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    budget_id = await new_budget(engine.backend)
    outcome = await engine.backend.budgets.report_usage(handle, budget_id, {"a": 1})
    assert outcome == UsageOk()


async def test_a_budget_that_warns_never_refuses(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10}, enforcement_mode="warn")
    outcome = await budgets.report_usage_admin(budget_id, {"a": 15})
    assert outcome == SoftBreach("a", 15, 10, "warn")
    status = await budgets.get_budget_status(budget_id)
    assert (status.usage, status.breach_count, status.soft_breach_count) == ({"a": 15}, 1, 0)
    assert await budgets.exhausted([budget_id]) == {budget_id: None}
    assert (await budgets.report_usage_admin(budget_id, {"a": MAX - 15})).kind == "soft_breach"
    assert (await budgets.report_usage_admin(budget_id, {"a": 1})).kind == "hard_breach"


@pytest.mark.parametrize("action", ["fail", "suspend", "reject", "page-someone"])
async def test_breaches_carry_the_stored_action(engine: Engine, action: str) -> None:
    budget_id = await new_budget(engine.backend, {"a": 1}, on_hard_limit=action)
    outcome = await engine.backend.budgets.report_usage_admin(budget_id, {"a": 2})
    assert outcome == HardBreach("a", 0, 1, action)


async def test_numbers_stay_exact(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"limited": MAX})
    report = budgets.report_usage_admin
    assert await report(budget_id, {"limited": MAX, "free": MAX}) == UsageOk()
    assert await used(budgets, budget_id) == {"free": MAX, "limited": MAX}
    assert await report(budget_id, {"limited": 1}) == HardBreach("limited", MAX, MAX, "fail")
    await refused(report(budget_id, {"free": 1}), "invalid_input")
    await refused(report(budget_id, {"free": MAX + 1}), "invalid_input")
    assert await used(budgets, budget_id) == {"free": MAX, "limited": MAX}


@pytest.mark.parametrize(
    "name", ["", "a b", "a\tb", "a\nb", "_a", "breached_at", "x" * 129, "\x00", "ä" * 65]
)
async def test_bad_names_of_dimensions(engine: Engine, name: str) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend)
    await refused(budgets.report_usage_admin(budget_id, {name: 1}), "invalid_input")
    await refused(budgets.create_budget(budget({name: 1})), "invalid_input")
    change = BudgetChange(hard_limits={name: 1})
    await refused(budgets.update_budget_limits(budget_id, change), "invalid_input")


async def test_the_most_dimensions(engine: Engine) -> None:
    budgets = engine.backend.budgets
    many = {f"d{n}": 1 for n in range(64)}
    budget_id = await new_budget(engine.backend, many)
    assert await spend(budgets, budget_id, **many) == "ok"
    error = await refused(budgets.report_usage_admin(budget_id, {"more": 1}), "invalid_input")
    assert "too_many_dimensions: limit=64, got=65" in str(error)
    error = await refused(budgets.create_budget(budget(many | {"more": 1})), "invalid_input")
    assert "too_many_dimensions: limit=64, got=65" in str(error)
    change = BudgetChange(hard_limits={"more": 1})
    error = await refused(budgets.update_budget_limits(budget_id, change), "invalid_input")
    assert "too_many_dimensions: limit=64, got=65" in str(error)
    same = BudgetChange(hard_limits={"d0": 2}, soft_limits={"d1": 1})
    assert await budgets.update_budget_limits(budget_id, same) == BudgetUpdated()
    too_many = many | {"more": 1}
    await refused(budgets.report_usage_admin(budget_id, too_many), "invalid_input")


async def test_the_order_of_the_checks_of_a_definition(engine: Engine) -> None:
    create = engine.backend.budgets.create_budget
    too_many = {f"d{n}": 1 for n in range(65)}
    wrong = budget(too_many, scope_type="", scope_id="x" * 257)
    await refused(create(wrong), "invalid_budget_scope")
    await refused(create(budget(scope_id="x" * 257)), "invalid_budget_scope")
    await refused(create(budget(scope_id="")), "invalid_budget_scope")
    error = await refused(create(budget(too_many)), "invalid_input")
    assert "too_many_dimensions" in str(error)
    short = msgspec.structs.replace(budget({"a": 1}), hard_limits=())
    error = await refused(create(short), "invalid_input")
    assert "dimension_limit_array_mismatch" in str(error)
    short = msgspec.structs.replace(budget({"a": 1}), soft_limits=(1, 2))
    error = await refused(create(short), "invalid_input")
    assert "dimension_limit_array_mismatch" in str(error)
    twice = msgspec.structs.replace(
        budget({"a": 1}), dimensions=("a", "a"), hard_limits=(1, 1), soft_limits=(1, 1)
    )
    await refused(create(twice), "invalid_input")
    await refused(create(budget({"a": MAX + 1})), "invalid_input")
    for ttl in (0, 7 * DAY + 1):
        await refused(create(budget(dedup_ttl_ms=ttl)), "invalid_input")
    await refused(create(budget(budget_id="team")), "invalid_input")


async def test_how_long_keys_are_remembered(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend)
    assert (await budgets.get_budget_status(budget_id)).dedup_ttl_ms == DAY
    same = await budgets.create_budget(budget(budget_id=budget_id, dedup_ttl_ms=DAY))
    assert same == BudgetExists(budget_id)
    for ttl in (0, 7 * DAY + 1):
        change = BudgetChange(dedup_ttl_ms=ttl)
        await refused(budgets.update_budget_limits(budget_id, change), "invalid_input")
    await budgets.update_budget_limits(budget_id, BudgetChange(dedup_ttl_ms=7 * DAY))
    assert (await budgets.get_budget_status(budget_id)).dedup_ttl_ms == 7 * DAY
    again = await budgets.create_budget(budget(budget_id=budget_id))
    assert again == BudgetExists(budget_id, differs=True)


async def test_unequal_lists_of_deltas(engine: Engine) -> None:
    budget_id = await new_budget(engine.backend)
    call = engine.backend.budgets.report_usage_admin(budget_id, ["a", "b"], [1])
    assert "dimension_delta_array_mismatch" in str(await refused(call, "invalid_input"))


async def test_no_ghosts(engine: Engine) -> None:
    """Calls about a budget that does not exist create nothing."""
    budgets, ghost = engine.backend.budgets, new_uuid()
    handle = await engine.running()
    before = await engine.dump()
    for call in (
        budgets.report_usage(handle, ghost, {"a": 1}),
        budgets.report_usage_admin(ghost, {"a": 1}, dedup_key="k"),
        budgets.record_spend(ghost, handle.execution_id, {"a": 1}),
        budgets.release_budget(ghost, handle.execution_id),
        budgets.reset_budget(ghost),
        budgets.delete_budget(ghost),
        budgets.delete_budget(ghost, force=True),
        budgets.get_budget_status(ghost),
        budgets.update_budget_limits(ghost, BudgetChange(hard_limits={"a": 1})),
        budgets.settle(ghost, "r"),
        budgets.release_reservation(ghost, "r"),
    ):
        await refused(call, "budget_not_found")
    assert await budgets.note_blocked(ghost, [handle.execution_id]) == 0
    assert await budgets.return_holds(ghost, handle.execution_id, 1) == 0
    assert (await budgets.read_budget_usage_and_limits(ghost)).limits == {}
    assert await budgets.exhausted([ghost]) == {ghost: None}
    assert await engine.dump() == before


async def test_a_reset_counts_and_reschedules(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10}, {"a": 1}, reset_interval_ms=60_000)
    planned = int((await budgets.get_budget_status(budget_id)).next_reset_at or 0)
    await spend(budgets, budget_id, a=5, b=1)
    await spend(budgets, budget_id, a=50)
    await engine.advance(10_000)
    outcome = await budgets.reset_budget(budget_id)
    assert isinstance(outcome, BudgetReset)
    assert planned + 10_000 <= outcome.next_reset_at <= planned + 15_000
    status = await budgets.get_budget_status(budget_id)
    assert status.usage == {"a": 0, "b": 0}
    assert (status.reset_count, status.breach_count, status.soft_breach_count) == (1, 1, 1)
    assert (status.last_breach_at, status.last_breach_dim) == (None, None)
    assert status.next_reset_at == str(outcome.next_reset_at)


async def test_a_reset_without_an_interval_answers_0(engine: Engine) -> None:
    budget_id = await new_budget(engine.backend)
    assert await engine.backend.budgets.reset_budget(budget_id) == BudgetReset(0)


async def test_update_merges_limits_and_keeps_usage(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 10, "b": 5}, {"a": 8})
    await spend(budgets, budget_id, a=9)
    change = BudgetChange(
        hard_limits={"a": 20, "c": 1},
        soft_limits={"a": 0},
        reset_interval_ms=1000,
        enforcement_mode="warn",
        on_hard_limit="reject",
        on_soft_limit="allow",
    )
    assert await budgets.update_budget_limits(budget_id, change) == BudgetUpdated()
    status = await budgets.get_budget_status(budget_id)
    assert status.usage == {"a": 9}
    assert status.hard_limits == {"a": 20, "b": 5, "c": 1}
    assert status.soft_limits["a"] == 0
    assert (status.enforcement_mode, status.on_hard_limit) == ("warn", "reject")
    assert (status.on_soft_limit, status.reset_interval_ms) == ("allow", 1000)
    assert status.next_reset_at is not None
    await budgets.update_budget_limits(budget_id, BudgetChange(reset_interval_ms=0))
    assert (await budgets.get_budget_status(budget_id)).next_reset_at is None
    await refused(budgets.update_budget_limits(budget_id, BudgetChange()), "invalid_input")


async def test_spends_have_a_ledger_that_can_be_reversed(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 100})
    one, two = await engine.create(), await engine.create()
    assert await budgets.record_spend(budget_id, one, {"a": 10, "b": 1}, "k") == UsageOk()
    assert await budgets.record_spend(budget_id, one, {"a": 10}) == UsageOk()
    assert await budgets.record_spend(budget_id, one, {"a": 10}, "k") == UsageAlreadyApplied()
    assert await budgets.record_spend(budget_id, two, {"a": 5}) == UsageOk()
    assert (await budgets.record_spend(budget_id, two, {"a": 500})).kind == "hard_breach"
    await spend(budgets, budget_id, a=3)
    assert await budgets.ledgers(budget_id) == sorted([one, two])
    assert await budgets.release_budget(budget_id, one) == "released"
    assert await used(budgets, budget_id) == {"a": 8, "b": 0}
    assert await budgets.release_budget(budget_id, one) == "noop"
    assert await used(budgets, budget_id) == {"a": 8, "b": 0}
    assert await budgets.record_spend(budget_id, one, {"a": 10}, "k") == UsageAlreadyApplied()
    assert await budgets.ledgers(budget_id) == [two]


async def test_a_reset_ends_the_ledgers(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend)
    execution_id = await engine.create()
    await budgets.record_spend(budget_id, execution_id, {"a": 10})
    await budgets.reset_budget(budget_id)
    await spend(budgets, budget_id, a=7)
    assert await budgets.release_budget(budget_id, execution_id) == "noop"
    assert await used(budgets, budget_id) == {"a": 7}
    # A ledger of the new period has nothing of the old one.
    await budgets.record_spend(budget_id, execution_id, {"a": 10})
    await budgets.reset_budget(budget_id)
    await budgets.record_spend(budget_id, execution_id, {"a": 1})
    await spend(budgets, budget_id, a=20)
    assert await budgets.release_budget(budget_id, execution_id) == "released"
    assert await used(budgets, budget_id) == {"a": 20}


async def test_parallel_reports_never_overshoot(engine: Engine) -> None:
    budgets = engine.backend.budgets
    budget_id = await new_budget(engine.backend, {"a": 100})
    kinds = await asyncio.gather(*(spend(budgets, budget_id, a=7) for _ in range(40)))
    assert kinds.count("ok") == 14
    assert await used(budgets, budget_id) == {"a": 98}
    assert (await budgets.get_budget_status(budget_id)).breach_count == 26


async def test_exhausted_compares_usage_with_hard_limits(engine: Engine) -> None:
    budgets = engine.backend.budgets
    full = await new_budget(engine.backend, {"b": 5, "a": 5, "free": 0})
    free = await new_budget(engine.backend, {"a": 5}, {"a": 1, "soft": 1})
    await spend(budgets, full, a=5, b=5)
    await spend(budgets, free, a=4)
    found = await budgets.exhausted([full, free, "nonsense"])
    assert found[free] is None
    assert found[full] == Exhausted(full, "a", 5, 5)
    assert getattr(found["nonsense"], "code", None) == "invalid_input"
    read = await budgets.read_budget_usage_and_limits(full)
    assert read.usage == {"a": 5, "b": 5, "free": 0}
    assert read.limits["hard:a"] == 5


async def test_listing_is_in_the_order_of_ids(engine: Engine) -> None:
    budgets = engine.backend.budgets
    ids = sorted([await new_budget(engine.backend, scope_type="team") for _ in range(7)])
    ids = sorted([*ids, await new_budget(engine.backend, scope_type="user", scope_id="u")])
    page = await budgets.list_budgets(limit=3)
    found = [status.budget_id for status in page.entries]
    while page.next_cursor is not None:
        page = await budgets.list_budgets(after=page.next_cursor, limit=3)
        found += [status.budget_id for status in page.entries]
    assert found == ids
    only = await budgets.list_budgets(scope_type="user", limit=2)
    assert [status.scope_id for status in only.entries] == ["u"]
    assert (await budgets.list_budgets(scope_id="none")).entries == ()
    await refused(budgets.list_budgets(after="?"), "invalid_cursor")
    await refused(budgets.list_budgets(limit=0), "invalid_input")
