"""Handles on executions: from an id, in another event loop, and with a limit to their patience."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from tests.support.engine import Engine, prepared_backend
from tests.support.server import TestServer

COUNTS = PartitionCounts()


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


async def test_a_malformed_id_and_one_that_does_not_exist(app: ff.Fabric) -> None:
    with pytest.raises(ValidationError, match="execution_id"):
        app.get_run("order-1001")
    wrong: Any = len
    missing = "{fp:86}:1a2b1268-b662-4711-b95c-649666dadb1d"
    with pytest.raises(ValidationError, match="task: must be a task or its name"):
        app.get_run(missing, wrong)
    with pytest.raises(ff.EngineError, match="execution_not_found"):
        await app.get_run(missing).state()


async def test_a_url_carries_the_compact_id(app: ff.Fabric) -> None:
    run: ff.Run[Any] = await app.submit("greet")
    assert re.fullmatch("[0-9a-f-]+", run.id.compact)
    again = app.get_run(run.id.compact)
    assert again.id == run.id
    assert repr(again) == f"Run({run.id.compact})"
    assert (await again.info()).execution_id == run.id
    compact: Any = run.id.compact
    assert (await (await app.client()).cancel(compact)).execution_id == run.id


async def test_the_start_of_an_id_is_looked_up_on_first_use(app: ff.Fabric) -> None:
    @app.task
    async def greet(ctx: ff.Context, name: str) -> str:
        await ctx.stream("working")
        return f"Hello, {name}!"

    async with app.worker(scanners=False):
        run = await greet.submit("Ada")
        assert await run.result(timeout=20) == "Hello, Ada!"
    index, uuid = run.id.partition, run.id.uuid
    for name in (uuid, uuid[:8], uuid.upper(), f"{index}-{uuid[:4]}", f"{index}-{uuid[:8]}…"):
        found = app.get_run(name, greet)
        with pytest.raises(ValidationError, match="is not looked up yet"):
            assert found.id
        assert await found.result() == "Hello, Ada!"
        assert found.id == run.id
        assert repr(found) == f"Run({run.id.compact}, task='greet')"
    assert [frame.payload async for frame in app.get_run(uuid).stream()] == [b"working"]
    with ff.SyncFabric(app) as sync:
        handle = sync.get_run(uuid[:8], greet)
        assert await asyncio.to_thread(handle.result) == "Hello, Ada!"
        assert handle.id == run.id


async def test_the_start_of_several_ids_and_of_none(app: ff.Fabric, engine: Engine) -> None:
    ids = [
        ExecutionId.deterministic_solo("default", f"aaaa{n:04}-0000-4000-8000-000000000000", COUNTS)
        for n in range(12)
    ]
    for each in ids[:2]:
        await engine.create(execution_id=each)
    run = app.get_run("aaaa")
    with pytest.raises(ValidationError, match="more than one id starts with 'aaaa': ") as caught:
        await run.state()
    assert all(each.compact in str(caught.value) for each in ids[:2])
    assert "Give more of the id." in str(caught.value)
    for each in ids[2:]:
        await engine.create(execution_id=each)
    with pytest.raises(ValidationError, match=rf"{ids[9].compact}, …\. Give more of the id"):
        await run.state()
    with pytest.raises(ff.EngineError, match=r"execution_not_found: .* starts with 'bbbb'"):
        await app.get_run("bbbb").state()
    with pytest.raises(ValidationError, match="'abc' is too short: give at least 4 characters"):
        app.get_run("abc")


async def test_a_search_stays_in_the_namespace(app: ff.Fabric, engine: Engine) -> None:
    elsewhere = await engine.create(namespace="other")
    with pytest.raises(ff.EngineError, match="no execution in namespace default has the id"):
        await app.get_run(elsewhere.uuid).state()
    assert await app.get_run(elsewhere.compact).state() == "waiting"


async def test_patience_is_a_duration(app: ff.Fabric) -> None:
    run: ff.Run[Any] = await app.submit("nobody_serves_it")
    for timeout, shown in ((0.01, "0.01 s"), ("10ms", "10ms"), (timedelta(0, 0, 1), "0:00:00")):
        with pytest.raises(TimeoutError, match=f"{run.id.uuid} did not finish within {shown}"):
            await run.result(timeout=timeout)
    for wrong in (math.nan, -1, "soon", True):
        with pytest.raises(ValidationError, match="invalid_input: timeout: "):
            await run.result(timeout=wrong)


async def test_an_empty_key_means_no_key(app: ff.Fabric) -> None:
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
        async with prepared_backend(valkey.url):
            pass
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
    assert shown.startswith(f"ExecutionFailed({run.id.compact}, failed: ValueError: xxx")
    assert len(shown) < 400
