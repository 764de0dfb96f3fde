"""Shorthands for tests of budgets."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.budgets import BudgetCreated, NewBudget
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.budgets import Budgets
from flowfabric.engine.valkey.backend import ValkeyBackend


def budget(
    hard: dict[str, int] | None = None, soft: dict[str, int] | None = None, **fields: Any
) -> NewBudget:
    """A budget with these limits; a dimension without one has 0."""
    hard, soft = hard or {}, soft or {}
    names = tuple(sorted(hard.keys() | soft.keys()))
    return NewBudget(
        budget_id=fields.pop("budget_id", None) or new_uuid(),
        dimensions=names,
        hard_limits=tuple(hard.get(name, 0) for name in names),
        soft_limits=tuple(soft.get(name, 0) for name in names),
        **fields,
    )


async def new_budget(
    backend: ValkeyBackend,
    hard: dict[str, int] | None = None,
    soft: dict[str, int] | None = None,
    **fields: Any,
) -> str:
    """Create a budget; its id."""
    created = await backend.budgets.create_budget(budget(hard, soft, **fields))
    assert isinstance(created, BudgetCreated)
    return created.budget_id


async def used(budgets: Budgets, budget_id: str) -> dict[str, int]:
    return dict((await budgets.get_budget_status(budget_id)).usage)


async def held(budgets: Budgets, budget_id: str) -> dict[str, int]:
    return dict((await budgets.get_budget_status(budget_id)).reserved)


async def spend(budgets: Budgets, budget_id: str, **amounts: int) -> str:
    """Report usage; the kind of the answer."""
    return (await budgets.report_usage_admin(budget_id, amounts)).kind


async def hold(
    budgets: Budgets, handle: Handle, budget_id: str, name: str = "r", **amounts: int
) -> str:
    """Reserve; the kind of the answer."""
    return (await budgets.reserve(handle, budget_id, amounts, name)).kind
