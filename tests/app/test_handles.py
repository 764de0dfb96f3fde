"""Handles on executions: from an id, in another event loop, and with a limit to their patience."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError
from tests.support.engine import Engine
from tests.support.server import TestServer


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def test_a_kept_id_is_as_good_as_the_run(app: ff.Fabric) -> None:
    @app.task
    async def dates(ctx: ff.Context, count: int) -> list[timedelta]:
        await ctx.stream("working")
        return [timedelta(days=count)]

    async with app.worker(scanners=False):
        kept = str((await app.submit(dates, 2)).id)
        typed = app.get_run(kept, dates)
        assert await typed.result(timeout="10s") == [timedelta(days=2)]
        assert not typed.duplicate
        # Without the task there is only the JSON.
        assert await app.get_run(kept).result() == ["P2D"]
        assert [frame.payload async for frame in app.get_run(kept).stream()] == [b"working"]
        with ff.SyncFabric(app) as sync:
            handle = sync.get_run(kept, dates)
            assert await asyncio.to_thread(handle.result, "10s") == [timedelta(days=2)]


async def test_an_id_that_is_none_and_one_that_does_not_exist(app: ff.Fabric) -> None:
    with pytest.raises(ValidationError, match="execution_id"):
        app.get_run("order-1001")
    wrong: Any = len
    missing = "{fp:86}:1a2b1268-b662-4711-b95c-649666dadb1d"
    with pytest.raises(ValidationError, match="task: must be a task or its name"):
        app.get_run(missing, wrong)
    with pytest.raises(ff.EngineError, match="execution_not_found"):
        await app.get_run(missing).state()


async def test_patience_is_a_duration(app: ff.Fabric) -> None:
    run: ff.Run[Any] = await app.submit("nobody_serves_it")
    for timeout, shown in ((0.01, "0.01 s"), ("10ms", "10ms"), (timedelta(0, 0, 1), "0:00:00")):
        with pytest.raises(TimeoutError, match=f"{run.id.uuid} did not finish within {shown}"):
            await run.result(timeout=timeout)
    for wrong in (math.nan, -1, "soon", True):
        with pytest.raises(ValidationError, match="invalid_input: timeout: "):
            await run.result(timeout=wrong)


async def test_no_key_is_none(app: ff.Fabric) -> None:
    first: ff.Run[Any] = await app.named("greet", idempotency_key=None).submit()
    second: ff.Run[Any] = await app.named("greet", idempotency_key=None).submit()
    assert first.id != second.id


def test_a_run_in_a_later_event_loop(valkey: TestServer) -> None:
    app = ff.Fabric(valkey.url)

    @app.task
    async def greet(ctx: ff.Context, name: str) -> str:
        await ctx.stream(name)
        return f"Hello, {name}!"

    async def submit() -> ff.Run[str]:
        await (await app.client()).backend.meta.prepare()
        run = await app.submit(greet, "Ada")
        await app.disconnect()
        return run

    async def serve(run: ff.Run[str]) -> str:
        async with app, app.worker(scanners=False):
            result = await run.result(timeout=20)
            assert [frame.payload async for frame in run.stream()] == [b"Ada"]
            return result

    run = asyncio.run(submit())
    assert asyncio.run(serve(run)) == "Hello, Ada!"


async def test_a_failure_is_short_when_it_is_shown(app: ff.Fabric) -> None:
    @app.task
    async def broken() -> None:
        raise ValueError("x" * 10_000)

    async with app.worker(scanners=False):
        run = await app.submit(broken)
        with pytest.raises(ff.ExecutionFailed) as caught:
            await run.result(timeout=20)
    shown = repr(caught.value)
    assert shown.startswith(f"ExecutionFailed({run.id}, failed: ValueError: xxx")
    assert len(shown) < 400
