"""Approvals: a handler asks a question, people see it and answer it, and their names are kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import NotFoundError, StateError, ValidationError


@dataclass
class Release:
    version: int
    due: date


@pytest.fixture
def app(waiting_app: ff.Fabric) -> ff.Fabric:
    @waiting_app.task
    async def deploy(ctx: ff.Context, version: int) -> list[Any]:
        verdict = await ctx.wait_for(
            "approval",
            prompt=f"Deploy v{version}?",
            details=Release(version, date(2026, 11, 16)),
        )
        return [verdict.name, verdict.source_identity, verdict.source_type, verdict.payload]

    @waiting_app.task
    def deploy_sync(ctx: ff.SyncContext) -> str:
        return ctx.wait_for("approval", prompt="Deploy?", details=[1]).source_identity

    @waiting_app.task
    async def quick(fail: bool) -> str:
        if fail:
            raise ff.PermanentError("no disk")
        return "done"

    @waiting_app.task
    async def handed_out(ctx: ff.Context) -> str:
        await ctx.waitpoint("card", prompt="Charge the card?", details={"amount": 12})
        await ctx.wait_for("cash", prompt="Paid in cash?")
        return (await ctx.wait_for("card")).name

    @waiting_app.task
    async def two(ctx: ff.Context) -> int:
        both = ff.AllOf((ff.Single("legal"), ff.Single("boss")))
        return len(await ctx.wait_condition(both, prompt="Agreed?"))

    return waiting_app


async def test_the_question_is_there_as_soon_as_the_handler_waits(app: ff.Fabric) -> None:
    run = await app.tasks["deploy"].submit(2)
    waiting = asyncio.create_task(run.wait_until_suspended(timeout=10))
    async with app.worker(scanners=False):
        wait = await waiting
        assert wait.prompt == "Deploy v2?"
        assert wait.details == {"version": 2, "due": "2026-11-16"}
        assert [one.waitpoint_key for one in wait.waitpoints] == ["approval"]
        # It is suspended already, so this returns at once.
        assert (await run.wait_until_suspended()).since == wait.since
        assert isinstance(await run.approve(by="ada"), Accepted)
        assert await run.result(10) == ["approved", "ada", "operator", None]


async def test_reject_and_signal_say_who_answers(app: ff.Fabric) -> None:
    async with app.worker(scanners=False):
        run = await app.tasks["deploy"].submit(3)
        await run.wait_until_suspended(timeout=10)
        await run.reject("approval", {"why": "too late"}, by="bob")
        assert await run.result(10) == ["rejected", "bob", "operator", {"why": "too late"}]
        run = await app.tasks["deploy"].submit(4)
        await run.wait_until_suspended(timeout=10)
        await run.signal("approval", "maybe", by="eve")
        assert await run.result(10) == ["maybe", "eve", "external", None]


async def test_a_program_without_an_event_loop_asks_and_answers_too(app: ff.Fabric) -> None:
    def use() -> None:
        with ff.SyncFabric(app) as sync:
            run = sync.submit("deploy_sync")
            wait = run.wait_until_suspended(timeout=10)
            assert (wait.prompt, wait.details) == ("Deploy?", [1])
            run.approve(by="ada")
            assert run.result(10) == "ada"
            run = sync.submit("deploy", 5)
            run.wait_until_suspended(timeout=10)
            run.reject(by="bob")
            assert run.result(10)[:2] == ["rejected", "bob"]
            run = sync.submit("deploy", 6)
            run.wait_until_suspended(timeout=10)
            run.signal("approval", "go", by="eve")
            assert run.result(10)[:2] == ["go", "eve"]

    async with app.worker(scanners=False):
        await asyncio.to_thread(use)


async def test_an_execution_that_ends_instead_of_waiting(app: ff.Fabric) -> None:
    run, failing = await app.submit("quick", False), await app.submit("quick", True)
    waiting = [asyncio.create_task(each.wait_until_suspended(10)) for each in (run, failing)]
    async with app.worker(scanners=False):
        with pytest.raises(StateError, match="quick completed and waits for no answer") as caught:
            await waiting[0]
        assert caught.value.code == "execution_not_suspended"
        with pytest.raises(ff.ExecutionFailed, match="no disk"):
            await waiting[1]


async def test_patience_has_an_end(app: ff.Fabric) -> None:
    run = await app.tasks["deploy"].submit(2)
    with pytest.raises(TimeoutError, match=f"{run.id.uuid} was not suspended within 10ms"):
        await run.wait_until_suspended(timeout="10ms")


async def test_an_answer_needs_a_name_only_if_several_are_open(app: ff.Fabric) -> None:
    run = await app.submit("two")
    with pytest.raises(NotFoundError, match="is waiting and waits for no answer"):
        await run.approve(by="ada")
    async with app.worker(scanners=False):
        await run.wait_until_suspended(timeout=10)
        with pytest.raises(
            ValidationError, match="waitpoint: several are open; pass one of the ids"
        ):
            await run.approve(by="ada")
        for name in ("legal", "boss"):
            await run.approve(name, by="ada")
        assert await run.result(10) == 2


async def test_the_question_of_a_waitpoint_that_is_handed_out(app: ff.Fabric) -> None:
    async with app.worker(scanners=False):
        run = await app.submit("handed_out")
        wait = await run.wait_until_suspended(timeout=10)
        assert wait.prompt == "Paid in cash?"
        asked = {one.waitpoint_key: (one.prompt, one.details) for one in wait.waitpoints}
        card = ("Charge the card?", {"amount": 12})
        assert asked == {"cash": ("Paid in cash?", None), "card": card}
        await run.approve("cash", by="ada")
        # The next wait is the one that was handed out, and asks what was asked then.
        wait = await run.wait_until_suspended(timeout=10)
        assert (wait.prompt, wait.details) == card
        await run.approve(by="ada")
        assert await run.result(10) == "approved"


async def test_details_that_json_cannot_represent_fail_the_attempt(app: ff.Fabric) -> None:
    @app.task
    async def ask(ctx: ff.Context) -> None:
        await ctx.wait_for("approval", details={"ratio": float("nan")})

    async with app.worker(scanners=False):
        with pytest.raises(ff.ExecutionFailed, match=r"details\.ratio: is nan"):
            await (await ask.submit()).result(10)
