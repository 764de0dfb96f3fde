"""One good call of every operation on budgets, to be spoiled like the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flowfabric.core.contracts.budgets import BudgetChange, BudgetCreated
from tests.support.budgets import budget
from tests.support.engine import Engine

Given = dict[str, Any]
Call = Callable[[Engine], Awaitable[Given]]


async def _new(engine: Engine) -> str:
    outcome = await engine.backend.budgets.create_budget(budget({"a": 10}))
    assert isinstance(outcome, BudgetCreated)
    return outcome.budget_id


def of_budget(**given: Any) -> Call:
    async def make(engine: Engine) -> Given:
        return {"budget_id": await _new(engine), **given}

    return make


def with_handle(**given: Any) -> Call:
    async def make(engine: Engine) -> Given:
        return {"handle": await engine.running(), "budget_id": await _new(engine), **given}

    return make


def with_execution(**given: Any) -> Call:
    async def make(engine: Engine) -> Given:
        return {"execution_id": await engine.create(), "budget_id": await _new(engine), **given}

    return make


async def held(engine: Engine) -> Given:
    budget_id = await _new(engine)
    await engine.backend.budgets.reserve(await engine.running(), budget_id, {"a": 5}, "r")
    return {"budget_id": budget_id, "reservation_id": "r"}


async def settled(engine: Engine) -> Given:
    return await held(engine) | {"actual": {"a": 1}}


async def new(_engine: Engine) -> Given:
    return {"budget": budget({"a": 10})}


async def listed(_engine: Engine) -> Given:
    return {"after": "", "limit": 10, "scope_type": "global", "scope_id": "default"}


BUDGET_CALLS: Mapping[str, Call] = {
    "create_budget": new,
    "update_budget_limits": of_budget(change=BudgetChange(hard_limits={"a": 20})),
    "delete_budget": of_budget(force=True),
    "reset_budget": of_budget(),
    "get_budget_status": of_budget(),
    "list_budgets": listed,
    "report_usage": with_handle(dimensions={"a": 1}, dedup_key="k"),
    "report_usage_admin": of_budget(dimensions=["a"], deltas=[1], dedup_key="k"),
    "record_spend": with_execution(deltas={"a": 1}, idempotency_key="k"),
    "release_budget": with_execution(),
    "reserve": with_handle(deltas={"a": 1}, reservation_id="r", ttl_ms=1000),
    "settle": settled,
    "release_reservation": held,
    "read_budget_usage_and_limits": of_budget(),
    "return_holds": with_execution(lease_epoch=1),
    "extend_holds": with_execution(lease_epoch=1, expires_at=2**52),
}

BUDGET_UPKEEP = {
    *("exhausted", "note_blocked", "forget_blocked", "blocked"),
    *("reset_due", "reconcile_budget_counters", "stored_budgets", "holders", "ledgers"),
    "forget_ledgers",
}
"""What admission and the scanners call with what the engine has stored."""
