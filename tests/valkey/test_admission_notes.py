"""What waits for a budget or a quota policy stays noted there, whatever happens in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.api.admission import FOR_BUDGET, Block
from tests.support.admission import budget, claimed, limited, quota, slots
from tests.support.engine import Engine, refused
from tests.support.flows import without_followups
from tests.support.scanning import idle


def after_the_next(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    meanwhile: Callable[[], Awaitable[None]],
) -> None:
    """Have something happen right after the next call of a function."""
    transport = engine.backend.transport
    fcall = transport.fcall

    async def interrupted(name: str, *args: Any, **options: Any) -> Any:
        reply = await fcall(name, *args, **options)
        if name == function:
            monkeypatch.undo()
            await meanwhile()
        return reply

    monkeypatch.setattr(transport, "fcall", interrupted)


async def state(engine: Engine, execution_id: ExecutionId) -> PublicState:
    return await engine.backend.reads.read_execution_state(execution_id)


async def cap(engine: Engine, policy: str) -> int:
    return (await engine.backend.quotas.get_quota_status(policy)).max_concurrent


async def test_who_is_blocked_again_during_an_opening_stays_noted_at_the_budget(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets, budget_id = engine.backend.budgets, await budget(engine, 1, spent=1)
    waiting = await limited(engine, budget_id)
    assert await claimed(engine) == []

    async def exhausted_again() -> None:
        await budgets.report_usage_admin(budget_id, {"tokens": 1})
        assert await claimed(engine) == []

    after_the_next(engine, monkeypatch, "ff_unblock", exhausted_again)
    await budgets.reset_budget(budget_id)
    assert await state(engine, waiting) is PublicState.RATE_LIMITED
    assert await budgets.blocked(budget_id) == [waiting]
    await refused(budgets.delete_budget(budget_id), "budget_attach_conflict")
    await budgets.reset_budget(budget_id)
    assert await state(engine, waiting) is PublicState.WAITING


@pytest.mark.parametrize("how", ["raised", "freed", "scanned"])
async def test_who_is_blocked_again_during_an_opening_stays_noted_at_the_policy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    backend, policy = engine.backend, await quota(engine, cap=1)
    first = await limited(engine, quota=policy)
    assert await claimed(engine) == [first]
    waiting = await limited(engine, quota=policy)
    assert await claimed(engine) == []

    async def taken_again() -> None:
        # Nothing but the slot matters here, so an execution that nobody runs takes it.
        while await slots(engine, policy) < await cap(engine, policy):
            await backend.quotas.check_admission(policy, engine.new_id())
        assert await claimed(engine) == []

    after_the_next(engine, monkeypatch, "ff_unblock", taken_again)
    if how == "raised":
        await backend.quotas.update_quota_policy(policy, max_concurrent=2)
    elif how == "freed":
        await backend.quotas.release_admission(policy, first)
    else:
        # As if the process that freed the slot had died before it let anyone go.
        backend.quotas.on_quota_opened = None
        await backend.quotas.release_admission(policy, first)
        await idle(engine).scan_once("unblock")
    assert await state(engine, waiting) is PublicState.RATE_LIMITED
    assert (await backend.quotas.blocked(policy)).entries == (waiting,)


async def test_who_the_scanner_lets_go_is_forgotten(engine: Engine) -> None:
    budgets, budget_id = engine.backend.budgets, await budget(engine, 1, spent=1)
    waiting = await limited(engine, await budget(engine), budget_id)
    assert await claimed(engine) == []
    assert await budgets.blocked(budget_id) == [waiting]
    # As if the process that reset the budget had died.
    budgets.on_budget_opened = None
    await budgets.reset_budget(budget_id)
    assert await state(engine, waiting) is PublicState.RATE_LIMITED
    await idle(engine).scan_once("unblock")
    assert await state(engine, waiting) is PublicState.WAITING
    assert await budgets.blocked(budget_id) == []


async def test_who_the_scanner_lets_start_is_no_longer_noted(engine: Engine) -> None:
    policy, quotas = await quota(engine, cap=1), engine.backend.quotas
    ids = [await limited(engine, quota=policy) for _ in range(2)]
    (running,) = await claimed(engine)
    quotas.on_quota_opened = None
    await quotas.release_admission(policy, running)
    assert len((await quotas.blocked(policy)).entries) == 1
    # Its own time has come, too.
    await engine.advance(6000)
    await idle(engine).scan_once("unblock")
    assert sorted([await state(engine, each) for each in ids]) == ["active", "waiting"]
    assert (await quotas.blocked(policy)).entries == ()


async def test_who_was_blocked_but_not_noted_is_noted_by_the_scanner(engine: Engine) -> None:
    """As if the process that blocked it had died before the note."""
    budgets, other = engine.backend.budgets, await budget(engine)
    budget_id = await budget(engine, 1, spent=1)
    waiting = await limited(engine, other, budget_id)
    block = Block(execution_id=waiting, reason=FOR_BUDGET, detail=f"budget {budget_id}: tokens 1/1")
    assert await engine.backend.admission.block_many(waiting.tag, [block]) == [None]
    assert await budgets.blocked(budget_id) == []
    await idle(engine).scan_once("unblock")
    assert await budgets.blocked(budget_id) == [waiting]
    assert await budgets.blocked(other) == []
    await refused(budgets.delete_budget(budget_id), "budget_attach_conflict")
    await budgets.reset_budget(budget_id)
    assert await state(engine, waiting) is PublicState.WAITING


@pytest.mark.parametrize("how", ["cancel", "expire"])
async def test_who_ends_while_it_waits_is_forgotten(engine: Engine, how: str) -> None:
    """Even if the process that ended it died before it told the budget and the policy."""
    await without_followups(engine)
    backend, spent, open_one = (
        engine.backend,
        await budget(engine, 1, spent=1),
        await budget(engine),
    )
    full = await quota(engine, rate=1)
    late = await engine.now() + 5000
    waiting = [await limited(engine, open_one, spent, execution_deadline_at=late)]
    waiting += [await limited(engine, quota=full, execution_deadline_at=late) for _ in range(2)]
    (running,) = await claimed(engine)
    waiting.remove(running)
    noted = [*await backend.budgets.blocked(spent), *(await backend.quotas.blocked(full)).entries]
    assert sorted(noted) == sorted(waiting)
    if how == "expire":
        await engine.advance(6000)
        await idle(engine).scan_once("execution_deadline")
    else:
        for each in waiting:
            await backend.executions.cancel_execution(each)
    assert {await state(engine, each) for each in waiting} <= {
        PublicState.CANCELLED,
        PublicState.EXPIRED,
    }
    assert (await idle(engine).scan_once("unblock")).errors == 0
    assert await backend.budgets.blocked(spent) == []
    assert (await backend.quotas.blocked(full)).entries == ()
