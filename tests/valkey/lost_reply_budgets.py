"""One call of every function of budgets that writes, as in `lost_reply_cases.py`."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.budgets import BudgetChange, BudgetCreated
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts, budget_partition
from tests.support.budgets import budget
from tests.support.engine import Engine
from tests.valkey.lost_reply_case import Case, no_answer, nothing

EPOCH = 1_900_000_000_000
BUDGET = "00000000-0000-4000-8000-00000000000b"
TAG = f"{{b:{budget_partition(BUDGET, PartitionCounts())}}}"
EXECUTION = ExecutionId.parse("{fp:86}:00000000-0000-4000-8000-000000000001")
NEW = budget({"a": 10}, {"a": 3}, budget_id=BUDGET, reset_interval_ms=60_000)


async def without_marks(engine: Engine) -> None:
    """The keys of marks are random, so their order in a dump is, too."""
    call: Any = engine.backend.transport.call
    for name in await call("KEYS", "ff:usagededup:*"):
        await call("DEL", name)


async def defined(engine: Engine) -> None:
    assert await engine.backend.budgets.create_budget(NEW) == BudgetCreated(BUDGET)
    await engine.backend.budgets.report_usage_admin(BUDGET, {"a": 1})
    await without_marks(engine)


async def spent(engine: Engine) -> None:
    await defined(engine)
    await engine.create(execution_id=EXECUTION)
    await engine.backend.budgets.record_spend(BUDGET, EXECUTION, {"a": 1})
    await without_marks(engine)


async def running(engine: Engine) -> Any:
    await defined(engine)
    return await engine.running(execution_id=EXECUTION)


async def held(engine: Engine) -> Any:
    handle = await running(engine)
    await engine.backend.budgets.reserve(handle, BUDGET, {"a": 1}, "r")
    await without_marks(engine)
    return handle


async def overdue(engine: Engine) -> Any:
    await held(engine)
    await engine.freeze(EPOCH + 90_000)


async def due(engine: Engine) -> Any:
    await defined(engine)
    await engine.freeze(EPOCH + 60_000)


BUDGET_CASES: dict[str, Case] = {
    "budget_create": Case(
        "ff_budget_create", nothing, lambda backend, _: backend.budgets.create_budget(NEW)
    ),
    "budget_update": Case(
        "ff_budget_update",
        defined,
        lambda backend, _: backend.budgets.update_budget_limits(
            BUDGET, BudgetChange(hard_limits={"b": 1})
        ),
    ),
    "budget_reset": Case(
        "ff_budget_reset", defined, lambda backend, _: backend.budgets.reset_budget(BUDGET)
    ),
    "budget_delete": Case(
        "ff_budget_delete", spent, lambda backend, _: backend.budgets.delete_budget(BUDGET)
    ),
    "budget_report": Case(
        "ff_budget_spend",
        defined,
        lambda backend, _: backend.budgets.report_usage_admin(BUDGET, {"a": 3}),
    ),
    "budget_report_with_key": Case(
        "ff_budget_spend",
        defined,
        lambda backend, _: backend.budgets.report_usage_admin(BUDGET, {"a": 3}, dedup_key="k"),
    ),
    "budget_breach": Case(
        "ff_budget_spend",
        defined,
        lambda backend, _: backend.budgets.report_usage_admin(BUDGET, {"a": 30}, dedup_key="k"),
    ),
    "budget_record_spend": Case(
        "ff_budget_spend",
        spent,
        lambda backend, _: backend.budgets.record_spend(BUDGET, EXECUTION, {"a": 1}),
    ),
    "budget_release": Case(
        "ff_budget_release",
        spent,
        lambda backend, _: backend.budgets.release_budget(BUDGET, EXECUTION),
    ),
    "budget_hold": Case(
        "ff_hold_budget",
        running,
        lambda backend, handle: backend.budgets.reserve(handle, BUDGET, {"a": 1}, "r"),
    ),
    "budget_reserve": Case(
        "ff_budget_reserve",
        running,
        lambda backend, handle: backend.budgets.reserve(handle, BUDGET, {"a": 5}, "r"),
    ),
    "budget_settle": Case(
        "ff_budget_settle", held, lambda backend, _: backend.budgets.settle(BUDGET, "r", {"a": 3})
    ),
    "budget_unreserve": Case(
        "ff_budget_unreserve",
        held,
        lambda backend, _: backend.budgets.release_reservation(BUDGET, "r"),
    ),
    "budget_return_holds": Case(
        "ff_budget_return_holds",
        held,
        lambda backend, _: backend.budgets.return_holds(BUDGET, EXECUTION, 1),
        no_answer,
    ),
    "budget_extend_holds": Case(
        "ff_budget_extend_holds",
        held,
        lambda backend, _: backend.budgets.extend_holds(BUDGET, EXECUTION, 1, EPOCH + 90_000),
    ),
    "budget_reset_due": Case(
        "ff_budget_reset_due",
        due,
        lambda backend, _: backend.budgets.reset_due(TAG, [BUDGET]),
        no_answer,
    ),
    "budget_reconcile": Case(
        "ff_budget_reconcile",
        overdue,
        lambda backend, _: backend.budgets.reconcile_budget_counters(TAG, [BUDGET]),
        no_answer,
    ),
    "budget_forget": Case(
        "ff_budget_forget",
        spent,
        lambda backend, _: backend.budgets.forget_ledgers(BUDGET, [EXECUTION]),
        no_answer,
    ),
    "budget_blocked": Case(
        "ff_budget_blocked",
        spent,
        lambda backend, _: backend.budgets.note_blocked(BUDGET, [EXECUTION]),
        no_answer,
    ),
}
