"""Reserving parts of a budget before spending them (07 §3), and what ends a hold."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from flowfabric.core.contracts.budgets import (
    BudgetChange,
    HardBreach,
    Reserved,
    SoftBreach,
    UsageAlreadyApplied,
    UsageOk,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import budget_partition
from tests.support.budgets import held, hold, new_budget, spend, used
from tests.support.engine import TTL, Engine, refused

GRACE = 30_000


async def test_a_hold_becomes_usage(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100})
    assert await budgets.reserve(handle, budget_id, {"a": 60}, "r") == Reserved("r", {"a": 60})
    assert (await used(budgets, budget_id), await held(budgets, budget_id)) == ({}, {"a": 60})
    assert await budgets.settle(budget_id, "r", {"a": 40}) == UsageOk()
    assert (await used(budgets, budget_id), await held(budgets, budget_id)) == ({"a": 40}, {})


async def test_holds_count_against_hard_limits(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100, "b": 5})
    await spend(budgets, budget_id, a=30)
    assert await hold(budgets, handle, budget_id, "one", a=70, b=5) == "reserved"
    outcome = await budgets.reserve(handle, budget_id, {"a": 1}, "two")
    assert outcome == HardBreach("a", 30, 100, "fail", 70)
    assert await held(budgets, budget_id) == {"a": 70, "b": 5}
    status = await budgets.get_budget_status(budget_id)
    assert (status.breach_count, status.last_breach_dim) == (1, "a")
    # Nothing is held of any dimension, and the id can be tried again.
    await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits={"a": 101}))
    assert await hold(budgets, handle, budget_id, "two", a=1) == "reserved"


async def test_a_soft_limit_answers_and_holds(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100}, {"a": 10})
    outcome = await budgets.reserve(handle, budget_id, {"a": 11}, "r")
    assert outcome == SoftBreach("a", 0, 10, "warn")
    assert await held(budgets, budget_id) == {"a": 11}
    assert (await budgets.get_budget_status(budget_id)).soft_breach_count == 1
    assert (await budgets.settle(budget_id, "r")).kind == "soft_breach"


async def test_a_budget_that_warns_holds_above_its_limit(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 10}, enforcement_mode="warn")
    outcome = await budgets.reserve(handle, budget_id, {"a": 11}, "r")
    assert outcome == SoftBreach("a", 0, 10, "warn")
    assert await held(budgets, budget_id) == {"a": 11}
    assert (await budgets.settle(budget_id, "r", {"a": 50})).kind == "soft_breach"
    assert await used(budgets, budget_id) == {"a": 50}


async def test_a_repeat_gets_the_first_answer(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100}, {"a": 50})
    first = await budgets.reserve(handle, budget_id, {"a": 60}, "r")
    assert first.kind == "soft_breach"
    assert await budgets.reserve(handle, budget_id, {"a": 60}, "r") == first
    assert await held(budgets, budget_id) == {"a": 60}
    await budgets.settle(budget_id, "r")
    assert await budgets.reserve(handle, budget_id, {"a": 60}, "r") == first
    assert await held(budgets, budget_id) == {}
    assert await hold(budgets, handle, budget_id, "s", a=1) == "soft_breach"
    await budgets.release_reservation(budget_id, "s")
    assert await hold(budgets, handle, budget_id, "s", a=1) == "soft_breach"
    assert await held(budgets, budget_id) == {}


async def test_a_repeat_that_asks_for_other_amounts_gets_what_is_held(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100})
    first = Reserved("r", {"a": 11, "b": 2**53 - 1})
    assert await budgets.reserve(handle, budget_id, {"b": 2**53 - 1, "a": 11}, "r") == first
    assert await budgets.reserve(handle, budget_id, {"a": 5}, "r") == first
    assert await held(budgets, budget_id) == first.held
    await budgets.release_reservation(budget_id, "r")
    assert await budgets.reserve(handle, budget_id, {"c": 7}, "r") == first
    assert await held(budgets, budget_id) == {}


async def test_an_id_belongs_to_one_execution(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend)
    one, two = await engine.running(), await engine.running()
    assert await hold(budgets, one, budget_id, "r", a=1) == "reserved"
    await refused(budgets.reserve(two, budget_id, {"a": 1}, "r"), "invalid_input")
    # The first answer would promise a hold that nobody has, and settling it would count nothing.
    await budgets.settle(budget_id, "r")
    await refused(budgets.reserve(two, budget_id, {"a": 1}, "r"), "invalid_input")


async def test_what_settling_answers_afterwards(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend)
    await refused(budgets.settle(budget_id, "never"), "reservation_not_found")
    await hold(budgets, handle, budget_id, "r", a=5)
    assert await budgets.settle(budget_id, "r") == UsageOk()
    assert await budgets.settle(budget_id, "r", {"a": 1}) == UsageAlreadyApplied()
    assert await budgets.release_reservation(budget_id, "r") == "noop"
    await hold(budgets, handle, budget_id, "s", a=5)
    assert await budgets.release_reservation(budget_id, "s") == "released"
    assert await budgets.release_reservation(budget_id, "s") == "noop"
    await refused(budgets.settle(budget_id, "s"), "reservation_not_found")
    assert await used(budgets, budget_id) == {"a": 5}


async def test_unknown_cost_counts_as_held(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100})
    await hold(budgets, handle, budget_id, "all", a=7, b=3)
    await budgets.settle(budget_id, "all")
    assert await used(budgets, budget_id) == {"a": 7, "b": 3}
    await hold(budgets, handle, budget_id, "part", a=7, b=3)
    await budgets.settle(budget_id, "part", {"b": 0})
    assert await used(budgets, budget_id) == {"a": 14, "b": 3}


async def test_what_is_held_counts_among_the_most_dimensions(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend)
    assert await spend(budgets, budget_id, **{f"d{n}": 1 for n in range(63)}) == "ok"
    assert await hold(budgets, handle, budget_id, "last", a=1) == "reserved"
    await refused(budgets.reserve(handle, budget_id, {"b": 1}, "more"), "invalid_input")
    assert await hold(budgets, handle, budget_id, "again", a=1) == "reserved"
    # A report may take the last place meanwhile: what is held is settled all the same.
    assert await spend(budgets, budget_id, c=1) == "ok"
    assert await budgets.settle(budget_id, "last") == UsageOk()
    assert await budgets.settle(budget_id, "again") == UsageOk()
    assert (await used(budgets, budget_id))["a"] == 2
    await refused(budgets.report_usage_admin(budget_id, {"b": 1}), "invalid_input")
    assert await spend(budgets, budget_id, a=1) == "ok"


async def test_a_dimension_that_is_used_and_held_counts_once(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend)
    assert await spend(budgets, budget_id, **{f"d{n}": 1 for n in range(62)}) == "ok"
    assert await hold(budgets, handle, budget_id, "used", d0=1, d1=1) == "reserved"
    assert await hold(budgets, handle, budget_id, "new", a=1, b=1) == "reserved"


async def test_what_exceeds_the_hold_counts_if_it_fits(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100})
    await hold(budgets, handle, budget_id, "mine", a=10)
    await hold(budgets, handle, budget_id, "other", a=50)
    # 40 are free: the excess of 30 fits beside the other hold.
    assert await budgets.settle(budget_id, "mine", {"a": 40, "extra": 2}) == UsageOk()
    assert await used(budgets, budget_id) == {"a": 40, "extra": 2}
    outcome = await budgets.settle(budget_id, "other", {"a": 61})
    assert outcome == HardBreach("a", 90, 100, "fail")
    assert (await used(budgets, budget_id))["a"] == 90
    assert await held(budgets, budget_id) == {}


async def test_reports_ignore_holds(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 10})
    assert await hold(budgets, handle, budget_id, "r", a=8) == "reserved"
    assert await spend(budgets, budget_id, a=10) == "ok"
    assert await budgets.settle(budget_id, "r") == UsageOk()
    assert await used(budgets, budget_id) == {"a": 18}


async def test_an_excess_never_takes_the_room_of_another_hold(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 100})
    await hold(budgets, handle, budget_id, "mine", a=50)
    await hold(budgets, handle, budget_id, "other", a=50)
    assert await budgets.settle(budget_id, "mine", {"a": 60}) == HardBreach(
        "a", 50, 100, "fail", 50
    )
    assert await budgets.settle(budget_id, "other") == UsageOk()
    assert await used(budgets, budget_id) == {"a": 100}


@pytest.mark.parametrize("how", ["lapsed", "revoked", "completed", "unknown", "another"])
async def test_only_the_holder_of_the_lease_reserves(engine: Engine, how: str) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id, code = await new_budget(engine.backend), "execution_not_active"
    if how == "lapsed":
        await engine.advance(TTL + 1)
        code = "lease_expired"
    elif how == "revoked":
        await engine.backend.leases.revoke_lease(handle.execution_id)
        code = "lease_revoked"
    elif how == "completed":
        await engine.backend.executions.complete(handle)
    elif how == "unknown":
        handle = _of(handle, execution_id=engine.new_id())
        code = "execution_not_found"
    else:
        handle = _of(handle, lease=f"{new_uuid()}/1")
        code = "stale_lease"
    await refused(budgets.reserve(handle, budget_id, {"a": 1}, "r"), code)
    assert await held(budgets, budget_id) == {}


def _of(handle: Handle, **changes: object) -> Handle:
    return msgspec.structs.replace(handle, **changes)


async def test_arguments_of_a_reservation(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend)
    await refused(budgets.reserve(handle, budget_id, {"a": 0}, "r"), "invalid_input")
    await refused(budgets.reserve(handle, budget_id, {"a": 1}, ""), "invalid_input")
    await refused(budgets.reserve(handle, budget_id, {"a": 1}, "x" * 257), "invalid_input")
    await refused(budgets.reserve(handle, budget_id, {"a": 1}, "r", ttl_ms=0), "invalid_input")
    await refused(budgets.reserve(handle, "team", {"a": 1}, "r"), "invalid_input")
    await refused(budgets.reserve(handle, new_uuid(), {"a": 1}, "r"), "budget_not_found")


async def test_the_most_budgets_that_one_execution_holds(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    ids = [await new_budget(engine.backend) for _ in range(17)]
    for budget_id in [*ids[:16], ids[0]]:
        assert await hold(budgets, handle, budget_id, new_uuid(), a=1) == "reserved"
    await refused(budgets.reserve(handle, ids[16], {"a": 1}, "r"), "invalid_input")


async def test_returning_the_holds_of_ended_leases(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend)
    one, two = await engine.running(), await engine.running()
    for name in ("x", "y"):
        await hold(budgets, one, budget_id, f"1{name}", a=1)
    await hold(budgets, two, budget_id, "2", a=1)
    eid = one.execution_id
    assert await budgets.return_holds(budget_id, eid, one.lease_epoch - 1) == 0
    assert await budgets.return_holds(budget_id, eid, one.lease_epoch) == 2
    assert await budgets.return_holds(budget_id, eid, one.lease_epoch) == 0
    assert await held(budgets, budget_id) == {"a": 1}
    # A later attempt may use the same id again: nothing was settled under it.
    assert await hold(budgets, one, budget_id, "1x", a=1) == "reserved"
    assert await held(budgets, budget_id) == {"a": 2}
    (first, second) = sorted([one.execution_id, two.execution_id])
    assert [h.execution_id for h in await budgets.holders(budget_id)] == [first, second]


async def test_overdue_holds_are_given_back(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend)
    tag = _tag(engine, budget_id)
    await hold(budgets, handle, budget_id, "long", a=1)
    await budgets.reserve(handle, budget_id, {"b": 1}, "short", ttl_ms=1000)
    await engine.advance(1001)
    (audit,) = await budgets.reconcile_budget_counters(tag, [budget_id])
    assert (audit.returned, audit.has_holders) == (1, True)
    assert await held(budgets, budget_id) == {"a": 1}
    await engine.advance(TTL + GRACE - 2000)
    (audit,) = await budgets.reconcile_budget_counters(tag, [budget_id])
    assert audit.returned == 0
    await engine.advance(2000)
    (audit,) = await budgets.reconcile_budget_counters(tag, [budget_id])
    assert (audit.returned, audit.has_holders) == (1, False)
    assert await held(budgets, budget_id) == {}


async def test_holds_last_as_long_as_a_renewed_lease(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id, eid = await new_budget(engine.backend), handle.execution_id
    await hold(budgets, handle, budget_id, "long", a=1)
    await budgets.reserve(handle, budget_id, {"b": 1}, "short", ttl_ms=5000)
    epoch, until = handle.lease_epoch, await engine.now() + 10 * TTL
    assert await budgets.extend_holds(budget_id, eid, epoch - 1, until) == 0
    assert await budgets.extend_holds(budget_id, eid, epoch, until) == 2
    await engine.advance(9 * TTL)
    await budgets.reconcile_budget_counters(_tag(engine, budget_id), [budget_id])
    assert await held(budgets, budget_id) == {"a": 1}
    # An extension never shortens.
    assert await budgets.extend_holds(budget_id, eid, epoch, await engine.now()) == 1
    await engine.advance(TTL)
    await budgets.reconcile_budget_counters(_tag(engine, budget_id), [budget_id])
    assert await held(budgets, budget_id) == {"a": 1}


def _tag(engine: Engine, budget_id: str) -> str:
    return f"{{b:{budget_partition(budget_id, engine.backend.counts)}}}"


async def test_parallel_holds_never_overshoot(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend, {"a": 100})
    handles = [await engine.running() for _ in range(20)]

    async def work(handle: Handle, number: int) -> str:
        kind = await hold(budgets, handle, budget_id, f"r{number}", a=9)
        if kind == "reserved" and number % 2:
            await budgets.settle(budget_id, f"r{number}", {"a": number % 9})
        elif kind == "reserved":
            await budgets.settle(budget_id, f"r{number}")
        return kind

    await asyncio.gather(*(work(handle, number) for number, handle in enumerate(handles)))
    assert (await used(budgets, budget_id))["a"] <= 100
    assert await held(budgets, budget_id) == {}
