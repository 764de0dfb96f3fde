"""What a timeout error says about an execution that does not finish."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import pytest

import flowfabric as ff
from flowfabric.sdk import client
from tests.support.engine import Engine
from tests.support.sdk import until
from tests.support.server import TestServer
from tests.support.waiting import parked


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:

        @fabric.task
        async def greet() -> None: ...

        yield fabric


async def impatient(run: ff.Run[object]) -> str:
    """What a caller reads whose patience has ended."""
    with pytest.raises(TimeoutError) as caught:
        await run.result(timeout=0.01)
    return str(caught.value)


async def test_no_worker_serves_the_lane(app: ff.Fabric) -> None:
    run: ff.Run[object] = await app.named("greet", lane="mail").submit()
    assert await impatient(run) == (
        f"Execution {run.id.compact} did not finish within 0.01 s. It is waiting: "
        'no live worker serves lane "mail". '
        "Start one with `flowfabric worker module:app --lanes mail`."
    )


async def test_no_worker_knows_the_task(app: ff.Fabric) -> None:
    run: ff.Run[object] = await app.submit("resize")
    async with app.worker():
        assert 'It is waiting: no live worker knows task "resize"' in await impatient(run)


async def test_its_time_has_not_come(app: ff.Fabric) -> None:
    run: ff.Run[object] = await app.named("greet", delay="1h").submit()
    assert "It is delayed: it was submitted with a delay; it starts at 2" in await impatient(run)


async def test_it_runs(app: ff.Fabric) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    @app.task(retry=ff.Retry(1, backoff="1ms"))
    async def slow(ctx: ff.Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError("no answer")
        entered.set()
        await leave.wait()

    async with app.worker():
        run = await slow.submit()
        await entered.wait()
        running = r"It has been running for \d.* on worker \S+ \(attempt 2\)\.$"
        assert re.search(running, await impatient(run))
        leave.set()
        await run.result(timeout=20)


async def test_it_waits_for_an_answer(waiting_app: ff.Fabric, engine: Engine) -> None:
    @waiting_app.task
    async def ask(ctx: ff.Context) -> None:
        await ctx.wait_for("approval", signals=("approved", "rejected"))

    async with waiting_app.worker():
        run = await ask.submit()
        await parked(engine, run)
        expected = "It is suspended: it waits for approval (approved, rejected)"
        assert expected in await impatient(run)


async def test_the_missing_worker_is_logged_once(
    app: ff.Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "_CHECK_WORKER_AFTER_S", 0.0)
    caplog.set_level(logging.WARNING)

    def logged() -> list[str]:
        return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "no_worker"]

    async def was_logged() -> bool:
        return bool(logged())

    runs = [await app.submit("greet") for _ in range(3)]
    results = [asyncio.create_task(run.result()) for run in runs]
    await until(was_logged, "a warning")
    with pytest.raises(TimeoutError):
        await runs[0].result(timeout=0.05)
    how = "Start one with `flowfabric worker module:app --lanes default`"
    [text] = logged()
    assert text.startswith("greet ")
    assert text.endswith(f'waits: no live worker serves lane "default". {how}')
    async with app.worker():
        await asyncio.gather(*results)
