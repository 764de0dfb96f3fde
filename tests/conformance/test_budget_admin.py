"""Deleting budgets, executions that wait for them, and operator events (07 §11, 12 §11)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.contracts.budgets import BudgetChange, BudgetDeleted
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import budget_id as id_of_budget
from flowfabric.core.ids import new_uuid
from flowfabric.core.partition import budget_partition
from flowfabric.engine.api.events import Event
from flowfabric.engine.layers.audit import acting_as
from tests.support.budgets import budget, hold, new_budget, spend, used
from tests.support.engine import Engine, refused

Records = pytest.LogCaptureFixture


async def test_a_deleted_budget_leaves_nothing(engine: Engine) -> None:
    budgets, handle = engine.backend.budgets, await engine.running()
    budget_id = await new_budget(engine.backend, {"a": 10}, reset_interval_ms=1000)
    await budgets.record_spend(budget_id, handle.execution_id, {"a": 1}, "k")
    await hold(budgets, handle, budget_id, a=1)
    await budgets.note_blocked(budget_id, [handle.execution_id])
    assert await budgets.delete_budget(budget_id, force=True) == BudgetDeleted()
    await refused(budgets.get_budget_status(budget_id), "budget_not_found")
    assert (await budgets.list_budgets()).entries == ()
    assert budget_id.encode() not in b"".join(
        key for key in await engine.dump() if key.startswith(b"ff:budget:")
    )
    assert await budgets.exhausted([budget_id]) == {budget_id: None}
    # A new one of the same id remembers nothing of the old one.
    await budgets.create_budget(budget({"a": 10}, budget_id=budget_id))
    outcome = await budgets.report_usage_admin(budget_id, {"a": 2}, dedup_key="k")
    assert outcome.kind == "ok"
    assert await budgets.release_budget(budget_id, handle.execution_id) == "noop"
    assert await used(budgets, budget_id) == {"a": 2}


async def test_work_that_waits_keeps_a_budget(engine: Engine) -> None:
    budgets, claims = engine.backend.budgets, engine.backend.claims
    budget_id = await new_budget(engine.backend, {"a": 10})
    waiting, other = await engine.create(), await engine.create()
    # More than one page of those that are gone comes first.
    gone = [engine.new_id() for _ in range(100)]
    assert await budgets.note_blocked(budget_id, gone) == 100
    await engine.advance(1000)
    assert await budgets.note_blocked(budget_id, [other, waiting]) == 2
    assert await budgets.note_blocked(budget_id, [waiting]) == 0
    await claims.block_execution_for_admission(
        waiting, "waiting_for_budget", reason_detail=f"budget {budget_id}: a 10/10"
    )
    await claims.block_execution_for_admission(
        other, "waiting_for_budget", reason_detail=f"budget {new_uuid()}: a 10/10"
    )
    error = await refused(budgets.delete_budget(budget_id), "budget_attach_conflict")
    assert waiting.compact in str(error)
    await claims.unblock_execution(waiting)
    assert await budgets.delete_budget(budget_id) == BudgetDeleted()


async def test_pages_of_those_who_wait(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await new_budget(engine.backend)
    ids = [await engine.create() for _ in range(5)]
    for execution_id in ids:
        await engine.advance(1)
        await budgets.note_blocked(budget_id, [execution_id])
    assert await budgets.blocked(budget_id) == ids
    assert await budgets.blocked(budget_id, offset=1, limit=2) == ids[1:3]
    assert await budgets.forget_blocked(budget_id, [ids[0], engine.new_id()]) == 1
    assert await budgets.blocked(budget_id, limit=1) == [ids[1]]


async def test_who_is_told_that_a_budget_opened(engine: Engine, caplog: Records) -> None:
    budgets, told = engine.backend.budgets, list[str]()

    async def note(budget_id: str) -> None:
        told.append(budget_id)
        if len(told) > 3:
            raise TransportError("timeout", "no answer")

    budgets.on_budget_opened = note
    budget_id = await new_budget(engine.backend, {"a": 10}, reset_interval_ms=1000)
    await spend(budgets, budget_id, a=1)
    assert told == []
    await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits={"a": 20}))
    await budgets.reset_budget(budget_id)
    await engine.advance(1000)
    tag = f"{{b:{budget_partition(budget_id, engine.backend.counts)}}}"
    assert await budgets.reset_due(tag, [budget_id]) == ["reset"]
    # Whoever is told may fail: the change is stored, and a scanner looks again.
    assert await budgets.delete_budget(budget_id) == BudgetDeleted()
    assert told == [budget_id] * 4
    assert "cannot check the executions that wait for budget" in caplog.text


async def test_events_of_operators(engine: Engine) -> None:
    budgets = engine.backend.budgets
    feed = await engine.backend.events.subscribe_operator_events("start")
    budget_id = await new_budget(engine.backend, {"a": 10}, scope_type="team", scope_id="ml")
    await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits={"a": 5}))
    for _ in range(3):
        await spend(budgets, budget_id, a=6)
    await engine.advance(60_000)
    await spend(budgets, budget_id, a=7)
    await budgets.reset_budget(budget_id)
    await budgets.delete_budget(budget_id)
    found: list[Event] = []
    async with feed:
        async for event in feed:
            assert isinstance(event, Event)
            found.append(event)
            if event.type == "budget_deleted":
                break
    assert [event.type for event in found] == [
        *("budget_created", "budget_updated"),
        # At most one breach per minute.
        *("budget_breached", "budget_breached", "budget_reset", "budget_deleted"),
    ]
    assert {event.get("budget_id") for event in found} == {budget_id}
    created, updated, breached, *_, reset, _ = found
    assert (created.get("scope_type"), created.get("hard:a")) == ("team", "10")
    assert updated.get("hard:a") == "5"
    assert breached.get("dimension") == "a"
    assert (breached.get("current_usage"), breached.get("hard_limit")) == (0, 5)
    assert (reset.get("reset_count"), reset.get("next_reset_at")) == (1, 0)


async def test_calls_of_operators_are_logged(engine: Engine, caplog: Records) -> None:
    budgets = engine.backend.budgets
    caplog.set_level(logging.INFO, "flowfabric")
    with acting_as("ada"):
        budget_id = await new_budget(engine.backend, {"a": 10})
        await budgets.report_usage_admin(budget_id, {"a": 7})
        await budgets.update_budget_limits(budget_id, BudgetChange(hard_limits={"a": 5}))
        await budgets.reset_budget(budget_id)
        await budgets.delete_budget(budget_id)
        await refused(budgets.reset_budget(budget_id), "budget_not_found")
    calls: list[dict[str, Any]] = [
        vars(record) for record in caplog.records if vars(record).get("action") == "operator_call"
    ]
    assert [(call["op"], call["code"]) for call in calls] == [
        ("create_budget", "ok"),
        ("report_usage_admin", "ok"),
        ("update_budget_limits", "ok"),
        ("reset_budget", "ok"),
        ("delete_budget", "ok"),
        ("reset_budget", "budget_not_found"),
    ]
    assert {call["caller"] for call in calls} == {"ada"}
    assert {call["budget_id"] for call in calls[1:]} == {budget_id}
    assert calls[1]["dimensions"] == {"a": 7}


async def test_the_advice_about_a_missing_budget_names_it(engine: Engine, caplog: Records) -> None:
    known = id_of_budget("team pot", "acme")
    await engine.backend.budgets.exhausted([known])
    advice = "flowfabric budget create 'team pot' --namespace acme DIMENSION=LIMIT"
    assert advice in caplog.text


async def test_a_missing_budget_is_reported_once(engine: Engine, caplog: Records) -> None:
    ghost = new_uuid()
    for _ in range(2):
        assert await engine.backend.budgets.exhausted([ghost]) == {ghost: None}
    warned = [r for r in caplog.records if vars(r).get("action") == "budget_missing"]
    assert len(warned) == 1
