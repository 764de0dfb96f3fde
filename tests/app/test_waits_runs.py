"""Waits over retries, reclaims and replays, and how a handler unwinds at one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.testing import TestFabric
from tests.support.engine import Engine
from tests.support.sdk import info
from tests.support.waiting import parked


@pytest.fixture
def app(waiting_app: ff.Fabric) -> ff.Fabric:
    return waiting_app


# --- other attempts and other runs ------------------------------------------------------------


async def test_a_retry_keeps_the_answers(fabric: TestFabric) -> None:
    starts: list[int] = []

    @fabric.task(retry=ff.Retry(3, backoff="1h", jitter=False))
    async def ask(ctx: ff.Context) -> list[Any]:
        starts.append(ctx.attempt)
        first = await ctx.wait_for("a")
        if ctx.attempt == 1:
            raise ff.RetryableError("once more")
        second = await ctx.wait_for("b", timeout=5, on_timeout="default")
        if ctx.attempt == 2:
            raise ff.RetryableError("and again")
        return [first.payload, second]

    run = await ask.submit()
    await fabric.drain()
    await run.signal("a", "go", "kept")
    for passed in ("0s", "1h", "5s"):
        fabric.clock.advance(passed)
        assert await fabric.drain() == []
    fabric.clock.advance("1h")
    assert [ended.result for ended in await fabric.drain()] == [["kept", None]]
    assert starts == [1, 1, 2, 2, 3]


async def test_a_handed_out_waitpoint_outlives_its_attempt_once_answered(
    fabric: TestFabric,
) -> None:
    points: list[str] = []
    signals = (await fabric.client()).backend.signals

    @fabric.task(retry=ff.Retry(3, backoff=0, jitter=False))
    async def ask(ctx: ff.Context) -> list[Any]:
        answered, open_ = await ctx.waitpoint("a"), await ctx.waitpoint("b")
        points.append(open_.waitpoint_id)
        if ctx.attempt == 1:
            await signals.deliver_signal(
                ctx.execution_id, answered.waitpoint_id, answered.waitpoint_token, "go"
            )
            raise ff.RetryableError("before it could wait")
        return [(await ctx.wait_for("a")).name, (await ctx.wait_for("b")).name]

    run = await ask.submit()
    await fabric.drain()
    # The old one is closed, so that nobody answers it in vain.
    with pytest.raises(ff.EngineError, match=r"waitpoint_closed|target_not_signalable"):
        await signals.deliver_approval_signal(run.id, points[0], "lost")
    await run.signal("b", "found")
    assert [ended.result for ended in await fabric.drain()] == [["go", "found"]]
    assert points[0] != points[1] == points[2]


async def test_a_reclaim_keeps_the_answers(app: ff.Fabric, engine: Engine) -> None:
    reached = asyncio.Event()

    @app.task()
    async def ask(ctx: ff.Context) -> str:
        answer = await ctx.wait_for("a")
        if ctx.attempt == 1:
            reached.set()
            await asyncio.Event().wait()
        return answer.name

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run)
        await run.signal("a", "go")
        await reached.wait()
        await engine.backend.leases.revoke_lease(run.id)
        assert await run.result(20) == "go"
    assert (await info(engine.backend, run.id)).total_attempt_count == 2


async def test_a_worker_that_stops_hands_its_waitpoints_over(
    app: ff.Fabric, engine: Engine
) -> None:
    """The same attempt goes on elsewhere: what was handed out still counts, and is not parked on
    when its answer came meanwhile."""
    seen: list[tuple[int, str]] = []
    reached = asyncio.Event()

    @app.task()
    async def ask(ctx: ff.Context) -> str:
        point = await ctx.waitpoint("a")
        seen.append((ctx.lease_epoch, point.waitpoint_id))
        if ctx.lease_epoch == 1:
            reached.set()
            await asyncio.Event().wait()
        return (await ctx.wait_for("a")).name

    worker = app.worker(scanners=False)
    first = asyncio.create_task(worker.run(grace_s=0, signals=False))
    run = await app.submit(ask)
    await reached.wait()
    worker.stop()
    await first
    await run.signal("a", "meanwhile")
    async with app.worker(scanners=False):
        assert await run.result(10) == "meanwhile"
    assert seen == [(1, seen[0][1]), (2, seen[0][1])]


async def test_a_replay_asks_again_unless_steps_are_kept(app: ff.Fabric, engine: Engine) -> None:
    @app.task()
    async def ask(ctx: ff.Context) -> str:
        first = await ctx.wait_for("a")
        return f"{first.name} {ctx.attempt}"

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        await parked(engine, run)
        await run.signal("a", "first")
        assert await run.result(10) == "first 1"
        await engine.backend.executions.replay_execution(run.id, keep_steps=True)
        assert await run.result(10) == "first 2"
        await (await app.client()).replay(run.id)
        await parked(engine, run)
        await run.signal("a", "second")
        assert await run.result(10) == "second 3"
        await engine.backend.executions.replay_execution(run.id, keep_steps=True)
        assert await run.result(10) == "second 4"


# --- unwinding --------------------------------------------------------------------------------


async def test_def_handlers_wait_too(app: ff.Fabric, engine: Engine) -> None:
    seen: list[str] = []

    @app.task()
    def ask(ctx: ff.SyncContext) -> list[Any]:
        try:
            ctx.stream("asking")
            point = ctx.waitpoint("a")
            answer = ctx.wait_for("a")
        except Exception:
            seen.append("swallowed")
            raise
        finally:
            seen.append("unwound")
        ctx.stream("answered")
        second = ctx.wait_condition(ff.Single("b"))
        return [answer.name, point.waitpoint_key, second[0].payload]

    async with app.worker(concurrency=1, scanners=False):
        run = await app.submit(ask)
        await parked(engine, run, "a")
        await run.signal("a", "go")
        await parked(engine, run, "b")
        await run.signal("b", "go", 7)
        assert await run.result(10) == ["go", "a", 7]
        output = [frame.payload async for frame in run.stream()]
    assert seen == ["unwound"] * 3
    assert output == [b"asking", b"asking", b"answered", b"asking", b"answered"]


async def test_a_handler_cannot_swallow_the_unwinding_by_mistake(
    app: ff.Fabric, engine: Engine
) -> None:
    swallowed: list[str] = []

    @app.task()
    async def careless(ctx: ff.Context) -> str:
        try:
            return (await ctx.wait_for("a")).name
        except Exception:  # noqa: BLE001 - the point of the test
            swallowed.append("Exception")
            return "wrong"

    @app.task()
    async def stubborn(ctx: ff.Context) -> str:
        try:
            return (await ctx.wait_for("a")).name
        except BaseException:  # noqa: BLE001 - the point of the test
            return "ignored: the task has ended for this start"

    async with app.worker(scanners=False):
        for task in (careless, stubborn):
            run = await app.submit(task)
            await parked(engine, run)
            await run.signal("a", "right")
            assert await run.result(10) == "right"
    assert swallowed == []


async def test_waits_side_by_side_are_answered_one_after_the_other(
    app: ff.Fabric, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task()
    async def gathered(ctx: ff.Context) -> list[str]:
        waits: list[Awaitable[ff.Signal]] = [ctx.wait_for("a"), ctx.wait_for("b")]
        return [signal.name for signal in await asyncio.gather(*waits)]

    @app.task()
    async def grouped(ctx: ff.Context) -> list[str]:
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(ctx.wait_for(name)) for name in ("a", "b")]
        return [wait.result().name for wait in waits]

    async with app.worker(scanners=False):
        for task in (gathered, grouped):
            run = await app.submit(task)
            for key in ("a", "b"):
                await parked(engine, run, key)
                await run.signal(key, f"to {key}")
            assert await run.result(10) == ["to a", "to b"]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_wait_beside_one_that_parked_unwinds_too(app: ff.Fabric, engine: Engine) -> None:
    """It must not look like a failure that the handler could deal with."""
    dealt_with: list[str] = []

    @app.task()
    async def ask(ctx: ff.Context) -> list[str]:
        async def careful(name: str) -> str:
            try:
                signal: ff.Signal = await ctx.wait_for(name)
            except Exception as error:
                dealt_with.append(repr(error))
                raise
            return signal.name

        return await asyncio.gather(*(careful(name) for name in ("a", "b", "c")))

    async with app.worker(scanners=False):
        run = await app.submit(ask)
        for key in ("a", "b", "c"):
            await parked(engine, run, key)
            await run.signal(key, f"to {key}")
        assert await run.result(10) == ["to a", "to b", "to c"]
    assert dealt_with == []
