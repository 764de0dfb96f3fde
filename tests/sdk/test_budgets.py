"""Budgets of a claimed task and of the client: names, enforcement, holds that follow the lease."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.budgets import (
    BudgetCreated,
    BudgetDeleted,
    BudgetExists,
    BudgetReset,
    HardBreach,
    NewBudget,
    SoftBreach,
    UsageAlreadyApplied,
    UsageOk,
)
from flowfabric.core.errors import BudgetExceeded, NotFoundError, TaskFinishedError
from flowfabric.core.ids import budget_id
from flowfabric.sdk.client import Client
from flowfabric.sdk.spending import Usage
from flowfabric.sdk.sync import SyncClient
from flowfabric.sdk.task import Parked
from tests.sdk.conftest import MakeWorker
from tests.support.budgets import held, used
from tests.support.engine import Engine, refused
from tests.support.sdk import claimed, info, opener, state, until
from tests.support.server import TestServer
from tests.support.waiting import SECRET

TEAM = budget_id("team")


async def test_a_client_manages_budgets_by_name(engine: Engine) -> None:
    client = Client(engine.backend)
    hard, soft = {"tokens": 100}, {"tokens": 80, "cents": 5}
    made = await client.create_budget("team", hard, soft=soft, every="1h", on_hard_limit="reject")
    assert made == BudgetCreated(TEAM)
    again = await client.create_budget("team", hard)
    assert again == BudgetExists(TEAM, differs=True)
    status = await client.budget("team")
    assert (status.budget_id, status.scope_type, status.scope_id) == (TEAM, "name", "team")
    assert status.hard_limits == {"cents": 0, "tokens": 100}
    assert status.soft_limits == {"cents": 5, "tokens": 80}
    assert (status.reset_interval_ms, status.on_hard_limit) == (3_600_000, "reject")
    assert await client.report_usage("team", {"tokens": 60}, "k") == UsageOk()
    assert await client.report_usage("team", {"tokens": 60}, "k") == UsageAlreadyApplied()
    assert await client.report_usage(TEAM, {"tokens": 60}) == HardBreach(
        "tokens", 60, 100, "reject"
    )
    await client.update_budget("team", {"tokens": 200}, mode="warn", every=0)
    status = await client.budget(TEAM)
    assert (status.hard_limits["tokens"], status.enforcement_mode) == (200, "warn")
    assert status.next_reset_at is None
    assert isinstance(await client.reset_budget("team"), BudgetReset)
    assert (await client.budget("team")).usage == {"tokens": 0}
    assert [s.budget_id for s in (await client.list_budgets()).entries] == [TEAM]
    assert await client.delete_budget("team") == BudgetDeleted()
    await refused(client.budget("team"), "budget_not_found")


async def test_a_client_sets_how_long_keys_are_remembered(engine: Engine) -> None:
    client = Client(engine.backend)
    await client.create_budget("team")
    assert (await client.budget("team")).dedup_ttl_ms == 86_400_000
    await client.create_budget("week", dedup_ttl="7d")
    assert (await client.budget("week")).dedup_ttl_ms == 7 * 86_400_000
    await client.update_budget("week", dedup_ttl="2h")
    assert (await client.budget("week")).dedup_ttl_ms == 7_200_000
    await refused(client.update_budget("week", dedup_ttl="8d"), "invalid_input")
    await refused(client.create_budget("other", dedup_ttl="8d"), "invalid_input")


async def test_a_name_belongs_to_its_namespace(engine: Engine) -> None:
    await Client(engine.backend, "one").create_budget("team", {"a": 1})
    with pytest.raises(NotFoundError):
        await Client(engine.backend, "two").budget("team")
    assert budget_id("team", "one") != budget_id("team", "two")


async def test_typed_usage_counts(engine: Engine) -> None:
    client = Client(engine.backend)
    await client.create_budget("team")
    usage = Usage(input_tokens=5, wall_ms=3, custom={"input_tokens": 2, "cents": 1}, dedup_key="k")
    assert await client.report_usage("team", usage) == UsageOk()
    assert await client.report_usage("team", usage) == UsageAlreadyApplied()
    assert (await client.budget("team")).usage == {"cents": 1, "input_tokens": 7, "wall_ms": 3}
    await refused(client.report_usage("team", Usage(output_tokens=-1)), "invalid_input")
    await refused(client.report_usage("team", 5), "invalid_input")  # pyright: ignore[reportArgumentType]


def test_the_sync_client_has_them_too(valkey: TestServer, engine: Engine) -> None:
    with SyncClient(lambda: _client(valkey)) as client:
        client.create_budget("team", {"a": 10})
        assert client.report_usage("team", {"a": 3}) == UsageOk()
        assert client.budget("team").usage == {"a": 3}
        client.reset_budget("team")
        client.update_budget("team", soft={"a": 1})
        assert [status.budget_id for status in client.list_budgets().entries] == [TEAM]
        client.delete_budget("team", force=True)


async def _client(valkey: TestServer) -> Client:
    return Client(await opener(valkey.url)())


async def test_the_plain_form_only_returns(engine: Engine, make_worker: MakeWorker) -> None:
    await Client(engine.backend).create_budget("team", {"a": 10}, on_hard_limit="fail")
    task = await claimed(await make_worker(), engine)
    assert await task.report_usage("team", {"a": 4}) == UsageOk()
    assert await task.report_usage("team", {"a": 40}) == HardBreach("a", 4, 10, "fail")
    await task.complete()
    # What was consumed counts, with or without the lease.
    assert await task.report_usage("team", {"a": 1}) == UsageOk()


@pytest.mark.parametrize("action", ["fail", "something-else"])
async def test_enforcing_raises(engine: Engine, make_worker: MakeWorker, action: str) -> None:
    new = NewBudget(
        budget_id=budget_id("team"),
        dimensions=("a",),
        hard_limits=(10,),
        soft_limits=(0,),
        on_hard_limit=action,
    )
    await engine.backend.budgets.create_budget(new)
    task = await claimed(await make_worker(), engine)
    with pytest.raises(BudgetExceeded, match='budget "team": 0 of 10 a are used') as caught:
        await task.report_usage("team", {"a": 11}, enforce=True)
    assert caught.value.code == "budget_exceeded"
    await task.complete()


@pytest.mark.parametrize("setting", ["mode", "on_hard_limit", "on_soft_limit"])
async def test_a_misspelt_setting_is_refused(engine: Engine, setting: str) -> None:
    client = Client(engine.backend)
    options: dict[str, Any] = {setting: "suspnd"}
    await refused(client.create_budget("team", {"a": 10}, **options), "invalid_input")
    await client.create_budget("team", {"a": 10}, mode="hard")
    await refused(client.update_budget("team", **options), "invalid_input")


async def test_a_missing_budget_is_named(engine: Engine, make_worker: MakeWorker) -> None:
    task = await claimed(await make_worker(), engine)
    for call in (
        task.report_usage("tem", {"a": 1}),
        task.reserve("tem", {"a": 1}, "r"),
        Client(engine.backend).budget("tem"),
    ):
        assert "tem" in (await refused(call, "budget_not_found")).details
    await task.complete()


async def test_enforcing_rejects(engine: Engine, make_worker: MakeWorker) -> None:
    await Client(engine.backend).create_budget("team", {"a": 10}, on_hard_limit="reject")
    task = await claimed(await make_worker(), engine)
    outcome = await task.report_usage("team", {"a": 11}, enforce=True)
    assert outcome.kind == "hard_breach"
    # Without a hold nothing may be spent, whatever the budget says about reports.
    with pytest.raises(BudgetExceeded):
        await task.reserve("team", {"a": 11}, "r", enforce=True)
    await task.complete()


async def test_enforcing_suspends_and_the_stop_can_be_resumed(
    engine: Engine, make_worker: MakeWorker
) -> None:
    backend, client = engine.backend, Client(engine.backend)
    await backend.secrets.seed_at_boot(SECRET)
    await client.create_budget("team", {"a": 10}, on_hard_limit="suspend")
    worker = await make_worker()
    task = await claimed(worker, engine)
    with pytest.raises(Parked):
        await task.report_usage("team", {"a": 11}, enforce=True)
    found = await info(backend, task.execution_id)
    assert found.public_state == "suspended"
    assert found.state_vector.blocking_reason == "waiting_for_budget"
    wait = await client.wait_until_suspended(task.execution_id, timeout=5)
    assert wait.prompt is not None
    assert "Raise the limit" in wait.prompt
    why = await client.explain(task.execution_id)
    assert (
        'It is suspended: budget "team" stopped it at 0 of 10 a. Raise the limit with' in why.text
    )
    assert why.next_steps == (
        "flowfabric budget raise team a=LIMIT",
        f"flowfabric approve {task.execution_id.compact}",
    )
    await client.update_budget("team", {"a": 20})
    await client.resume(task.execution_id)
    again = await worker.claim()
    assert again is not None
    assert await again.report_usage("team", {"a": 11}, enforce=True) == UsageOk()
    await again.complete()
    assert await state(backend, task.execution_id) == "completed"


async def test_a_stop_for_a_budget_that_does_not_say_which(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    handle = await engine.running()
    await engine.backend.suspensions.suspend(
        handle, condition=Single("budget"), reason_code="paused_by_budget"
    )
    why = await Client(engine.backend).explain(handle.execution_id)
    assert "its budget stopped it. Raise the limit or reset the budget, then resume it" in why.text
    assert why.next_steps == (f"flowfabric approve {handle.execution_id.compact}",)


async def test_soft_limits_warn_unless_allowed(
    engine: Engine, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(engine.backend)
    await client.create_budget("team", soft={"a": 1})
    await client.create_budget("quiet", soft={"a": 1}, on_soft_limit="allow")
    task = await claimed(await make_worker(), engine)
    with caplog.at_level(logging.WARNING, "flowfabric"):
        outcome = await task.report_usage("quiet", {"a": 2}, enforce=True)
        assert outcome == SoftBreach("a", 2, 1, "allow")
        assert not caplog.records
        await task.report_usage("team", {"a": 2}, enforce=True)
    assert 'exceeded the soft limit of budget "team": 2 of 1 a' in caplog.text
    await task.complete()


async def test_holds_of_a_task(engine: Engine, make_worker: MakeWorker) -> None:
    budgets = engine.backend.budgets
    await Client(engine.backend).create_budget("team", {"a": 10})
    task = await claimed(await make_worker(), engine)
    assert (await task.reserve("team", {"a": 6}, "r")).kind == "reserved"
    assert (await task.reserve("team", {"a": 6}, "s")).kind == "hard_breach"
    assert await task.settle("team", "r", {"a": 2}) == UsageOk()
    await task.reserve("team", {"a": 6}, "t")
    assert await task.release_reservation("team", "t") == "released"
    assert (await used(budgets, TEAM), await held(budgets, TEAM)) == ({"a": 2}, {})
    await task.complete()
    with pytest.raises(TaskFinishedError):
        await task.reserve("team", {"a": 1}, "u")


async def test_renewals_extend_the_holds(engine: Engine, make_worker: MakeWorker) -> None:
    """The keeper extends what its tasks hold, and asks nothing about other tasks."""
    await Client(engine.backend).create_budget("team", {"a": 10})
    worker = await make_worker(lease_ttl_ms=1000)
    task = await claimed(worker, engine)
    await task.reserve("team", {"a": 6}, "r")
    key = f"*:{TEAM}:hold_expiry"
    call = engine.backend.transport.call
    (name,) = await call("KEYS", key)  # pyright: ignore[reportGeneralTypeIssues]
    before = await call("ZRANGE", name, 0, -1, "WITHSCORES")

    async def is_extended() -> bool:
        return await call("ZRANGE", name, 0, -1, "WITHSCORES") != before

    await until(is_extended)
    assert task.held.budgets == frozenset({TEAM})
    await task.complete()
