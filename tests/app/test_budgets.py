"""Spending from a budget in a handler: usage, holds, and the options that attach budgets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import budget_id
from flowfabric.sdk.client import Client
from tests.support.budgets import held, used
from tests.support.engine import Engine, refused
from tests.support.sdk import until

TEAM = budget_id("team")


def add_restarted(app: ff.Fabric) -> None:
    """Tasks that start again after a wait, that fail, or that a timeout stops."""
    drafts: dict[str, str] = {}

    @app.task
    async def failing(ctx: ff.Context, how: str) -> None:
        async with ctx.reserve("team", tokens=10) if how == "hold" else ctx.usage("team", calls=1):
            await (await app.client()).delete_budget("team", force=True)
            raise ff.PermanentError("no answer")

    @app.task
    async def reviewed(ctx: ff.Context) -> None:
        # After the wait, the draft is known.
        if ctx.execution_id not in drafts:
            await ctx.usage("team", tokens=100)
            drafts[ctx.execution_id] = "draft"
        await ctx.wait_for("review")
        await ctx.usage("team", tokens=500)

    @app.task
    async def asked_again(ctx: ff.Context) -> None:
        async with ctx.usage("team", calls=1) as usage:
            usage.add(tokens=7)
        await ctx.wait_for("review")

    @app.task
    async def asked_inside(ctx: ff.Context) -> None:
        async with ctx.usage("team", calls=1) as usage:
            await ctx.wait_for("review")
            usage.add(tokens=7)

    @app.task
    async def impatient(ctx: ff.Context, how: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                if how == "hold":
                    async with ctx.reserve("team", tokens=10):
                        limit.reschedule(0)
                        await asyncio.Event().wait()
                async with ctx.usage("team", calls=1) as usage:
                    usage.add(tokens=10)
                    limit.reschedule(0)
                    await asyncio.Event().wait()

    @app.task
    async def stuck(ctx: ff.Context) -> None:
        async with ctx.reserve("team", tokens=10):
            await asyncio.Event().wait()

    @app.task
    def stuck_sync(ctx: ff.SyncContext) -> None:
        with ctx.reserve("team", tokens=10):
            while True:
                threading.Event().wait(0.01)


@pytest.fixture
async def app(waiting_app: ff.Fabric) -> AsyncIterator[ff.Fabric]:
    @waiting_app.task(retry=3)
    async def spend(ctx: ff.Context, amounts: list[int]) -> list[str]:
        return [(await ctx.usage("team", tokens=each)).kind for each in amounts]

    @waiting_app.task
    def spend_sync(ctx: ff.SyncContext, amount: int) -> str:
        with ctx.reserve("team", tokens=amount) as hold:
            assert hold.held == {"tokens": amount}
            kind = hold.settle(tokens=amount - 1).kind
        ctx.usage("team", calls=1)
        return kind

    @waiting_app.task
    async def timed(ctx: ff.Context) -> None:
        async with ctx.usage("team", calls=1) as usage:
            usage.add(tokens=7)

    @waiting_app.task
    async def held_while(ctx: ff.Context, how: str) -> str:
        async with ctx.reserve("team", tokens=10) as hold:
            if how == "settle":
                await hold.settle(tokens=4)
            elif how == "overspend":
                await hold.settle(tokens=40)
            elif how == "release":
                await hold.release()
            elif how == "raise":
                raise ff.PermanentError("no answer")
            elif how == "wait":
                await ctx.wait_for("go")
        return how

    add_restarted(waiting_app)
    async with waiting_app:
        yield waiting_app


@pytest.fixture
async def serving(app: ff.Fabric) -> AsyncIterator[Client]:
    # It renews often, and so hears soon that an attempt was cancelled.
    worker = app.worker(scanners=False, lease_ttl=3)
    running = asyncio.create_task(worker.run())
    yield await app.client()
    worker.stop()
    await running


async def run(app: ff.Fabric, name: str, *args: Any) -> Any:
    return await app.get_run((await app.submit(name, *args)).id).result(timeout=10)


async def test_usage_counts_and_a_breach_fails_the_execution(
    app: ff.Fabric, serving: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await serving.create_budget("team", {"tokens": 100}, soft={"tokens": 80})
    assert await run(app, "spend", [60, 25]) == ["ok", "soft_breach"]
    with pytest.raises(ff.ExecutionFailed) as caught:
        await run(app, "spend", [50])
    assert caught.value.category == "budget_exceeded"
    assert caught.value.attempts == 1
    assert 'budget "team": 85 of 100 tokens are used' in caught.value.reason
    (failed,) = [r for r in caplog.records if getattr(r, "action", "") == "task_failed"]
    assert not failed.exc_info
    assert (await serving.budget("team")).usage == {"tokens": 85}


async def test_a_stop_is_resumed_after_the_limit_was_raised(
    app: ff.Fabric, serving: Client
) -> None:
    await serving.create_budget("team", {"tokens": 100}, on_hard_limit="suspend")
    stopped = await app.submit("spend", [60, 50])
    wait = await stopped.wait_until_suspended(timeout=10)
    assert wait.prompt is not None
    assert "60 of 100 tokens are used" in wait.prompt
    await serving.update_budget("team", {"tokens": 200})
    await serving.resume(stopped.id)
    # The handler starts again: what it had reported before is not counted twice.
    assert await stopped.result(timeout=10) == ["already_applied", "ok"]
    assert (await serving.budget("team")).usage == {"tokens": 110}


async def test_a_block_counts_its_time(app: ff.Fabric, serving: Client) -> None:
    await serving.create_budget("team")
    await run(app, "timed")
    usage = (await serving.budget("team")).usage
    assert (usage["calls"], usage["tokens"]) == (1, 7)
    assert 0 <= usage["wall_ms"] < 10_000


@pytest.mark.parametrize(
    ("task", "spent"),
    [
        ("reviewed", {"tokens": 600}),
        ("asked_again", {"calls": 1, "tokens": 7}),
        ("asked_inside", {"calls": 1, "tokens": 7}),
    ],
)
async def test_a_handler_that_starts_again_reports_what_is_new(
    app: ff.Fabric, serving: Client, task: str, spent: dict[str, int]
) -> None:
    """Not all that it reported before is reported again, and a block takes another time."""
    await serving.create_budget("team")
    run = await app.submit(task)
    await run.wait_until_suspended(timeout=10)
    await serving.resume(run.id)
    await run.result(timeout=10)
    usage = dict((await serving.budget("team")).usage)
    usage.pop("wall_ms", None)
    assert usage == spent


async def test_def_handlers(app: ff.Fabric, serving: Client) -> None:
    await serving.create_budget("team", {"tokens": 10})
    assert await run(app, "spend_sync", 5) == "ok"
    status = await serving.budget("team")
    assert (status.usage, status.reserved) == ({"tokens": 4, "calls": 1}, {})


@pytest.mark.parametrize(
    ("how", "spent"), [("settle", 4), ("release", None), ("nothing", 10), ("raise", 10)]
)
async def test_what_a_hold_becomes(
    app: ff.Fabric, serving: Client, how: str, spent: int | None
) -> None:
    await serving.create_budget("team", {"tokens": 10})
    outcome = await serving.wait((await app.submit("held_while", how)).id, timeout=10)
    assert outcome.state.value == ("failed" if how == "raise" else "completed")
    status = await serving.budget("team")
    assert status.usage == ({} if spent is None else {"tokens": spent})
    assert status.reserved == {}


async def test_what_exceeds_a_hold_and_the_limit_fails_the_execution(
    app: ff.Fabric, serving: Client
) -> None:
    await serving.create_budget("team", {"tokens": 20})
    with pytest.raises(ff.ExecutionFailed) as caught:
        await run(app, "held_while", "overspend")
    assert caught.value.category == "budget_exceeded"
    status = await serving.budget("team")
    assert (status.usage, status.reserved) == ({"tokens": 10}, {})


async def test_a_wait_inside_a_hold_gives_it_back(app: ff.Fabric, serving: Client) -> None:
    await serving.create_budget("team", {"tokens": 10})
    waiting = await app.submit("held_while", "wait")
    await waiting.wait_until_suspended(timeout=10)

    async def is_free() -> bool:
        return (await serving.budget("team")).reserved == {}

    await until(is_free)
    assert (await serving.budget("team")).usage == {}
    await serving.resume(waiting.id)
    await waiting.result(timeout=10)
    status = await serving.budget("team")
    assert (status.usage, status.reserved) == ({"tokens": 10}, {})


@pytest.mark.parametrize("how", ["hold", "report"])
async def test_a_timeout_around_a_block_leaves_no_cost_uncounted(
    app: ff.Fabric, serving: Client, how: str
) -> None:
    await serving.create_budget("team", {"tokens": 100})
    await run(app, "impatient", how)
    status = await serving.budget("team")
    assert (status.usage["tokens"], status.reserved) == (10, {})


@pytest.mark.parametrize("task", ["stuck", "stuck_sync"])
async def test_what_a_stopped_attempt_held_is_counted(
    app: ff.Fabric, serving: Client, task: str
) -> None:
    await serving.create_budget("team", {"tokens": 100})
    run = await app.submit(task)

    async def is_held() -> bool:
        return (await serving.budget("team")).reserved == {"tokens": 10}

    async def is_counted() -> bool:
        status = await serving.budget("team")
        return (status.usage, status.reserved) == ({"tokens": 10}, {})

    await until(is_held)
    await serving.cancel(run.id)
    await until(is_counted)


async def test_a_hold_that_does_not_fit_raises(app: ff.Fabric, serving: Client) -> None:
    await serving.create_budget("team", {"tokens": 9}, on_hard_limit="reject")
    with pytest.raises(ff.ExecutionFailed) as caught:
        await run(app, "held_while", "settle")
    assert caught.value.category == "budget_exceeded"


async def test_settling_after_the_hold_was_lost_still_counts(
    app: ff.Fabric, serving: Client
) -> None:
    budgets = serving.backend.budgets
    await serving.create_budget("team", {"tokens": 100})

    @app.task
    async def slow(ctx: ff.Context) -> str:
        async with ctx.reserve("team", tokens=10) as hold:
            await budgets.return_holds(TEAM, ctx.execution_id, ctx.lease_epoch)
            return (await hold.settle(tokens=30)).kind

    worker = app.worker(scanners=False)
    running = asyncio.create_task(worker.run())
    assert await run(app, "slow") == "ok"
    worker.stop()
    await running
    assert await used(budgets, TEAM) == {"tokens": 30}
    assert await held(budgets, TEAM) == {}


async def test_budgets_are_attached_by_name(app: ff.Fabric, engine: Engine) -> None:
    @app.task(budgets=["team", TEAM, "other"], timeout="5s")
    async def limited() -> None: ...

    assert limited.shared.policy is not None
    assert limited.shared.policy.budget_ids == (TEAM, budget_id("other"))
    assert limited.shared.policy.timeout_policy.attempt_timeout_ms == 5000
    fewer = limited.options(budgets=["third"]).shared.policy
    assert fewer is not None
    assert fewer.budget_ids == (budget_id("third"),)
    assert fewer.timeout_policy.attempt_timeout_ms == 5000
    none = limited.options(budgets=[]).shared.policy
    assert none is not None
    assert none.budget_ids == ()
    assert limited.options(priority=3).shared.policy == limited.shared.policy
    for wrong in ("team", 5, [5], [""], [f"b{n}" for n in range(17)]):
        with pytest.raises(ValidationError):
            limited.options(budgets=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValidationError):
            app.task(budgets=wrong)  # pyright: ignore[reportArgumentType, reportCallIssue]


async def test_a_name_belongs_to_the_namespace_of_the_application(engine: Engine) -> None:
    fabric = ff.Fabric("valkey://127.0.0.1:1", namespace="acme")

    @fabric.task(budgets=["team"])
    async def limited() -> None: ...

    assert limited.shared.policy is not None
    assert limited.shared.policy.budget_ids == (budget_id("team", "acme"),)


@pytest.mark.parametrize("how", ["hold", "usage"])
async def test_a_cost_that_cannot_be_counted_hides_no_failure(
    app: ff.Fabric, serving: Client, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    await serving.create_budget("team", {"tokens": 10})
    with pytest.raises(ff.ExecutionFailed, match="no answer"):
        await run(app, "failing", how)
    assert [r for r in caplog.records if getattr(r, "action", "") == "usage_lost"]


async def test_a_missing_budget_is_reported(app: ff.Fabric, serving: Client) -> None:
    await refused(serving.budget("team"), "budget_not_found")
    with pytest.raises(ff.ExecutionFailed, match="budget_not_found"):
        await run(app, "timed")
