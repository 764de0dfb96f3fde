"""`drain()` runs everything that can run now, and time passes when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

import flowfabric as ff
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.testing import TestFabric
from flowfabric.testing.engine import TestEngine
from tests.support.server import TestServer

app = ff.Fabric()
tries: list[int] = []


@app.task(retry=ff.Retry(2, backoff="1h"))
async def flaky() -> int:
    tries.append(1)
    if len(tries) < 3:
        raise ConnectionError("no route")
    return len(tries)


@app.task
async def double(number: int) -> int:
    return 2 * number


@app.task
async def ask(ctx: ff.Context) -> str:
    answer = await ctx.wait_for("approval", timeout="24h", on_timeout="default", prompt="Ship it?")
    return "nobody answered" if answer is None else answer.name


@app.task(capabilities={"gpu"}, lane="video")
def render(name: str) -> str:
    return f"{name}.mp4"


@app.task
async def quadruple(number: int) -> int:
    run = await double.submit(2 * number)
    return await run.result(timeout=10)


async def test_drain_runs_everything_and_returns_what_ended(fabric: TestFabric) -> None:
    fabric.use(app)
    run = await double.submit(21)
    await render.submit("cat")
    ended = {each.task: each for each in await fabric.drain()}
    assert {name: each.result for name, each in ended.items()} == {
        "double": 42,
        "render": "cat.mp4",
    }
    assert (ended["double"].state, ended["double"].attempts) == ("completed", 1)
    assert await ended["double"].run.result() == await run.result() == 42
    assert await fabric.drain() == []


async def test_a_handler_may_wait_for_what_it_submits(fabric: TestFabric) -> None:
    fabric.use(app)
    await quadruple.submit(10)
    # Both may end in the same millisecond.
    ended = sorted((each.task, each.result) for each in await fabric.drain())
    assert ended == [("double", 40), ("quadruple", 40)]


async def test_retries_wait_until_the_clock_advances(fabric: TestFabric) -> None:
    fabric.use(app)
    tries.clear()
    await flaky.submit()
    assert await fabric.drain() == []
    assert await fabric.drain() == []
    assert len(tries) == 1
    fabric.clock.advance("1h")
    assert await fabric.drain() == []
    fabric.clock.advance(timedelta(hours=1))
    (ended,) = await fabric.drain()
    assert (ended.result, ended.attempts) == (3, 3)


async def test_the_reason_of_a_failure(fabric: TestFabric) -> None:
    @fabric.task
    async def broken() -> None:
        raise ff.PermanentError("no such order")

    await broken.submit()
    (ended,) = await fabric.drain()
    assert (ended.state, ended.result) == ("failed", None)
    assert "no such order" in (ended.reason or "")


async def test_a_delay_passes_with_the_clock(fabric: TestFabric) -> None:
    fabric.use(app)
    await double.options(delay="7d").submit(1)
    fabric.clock.advance("6d23h")
    assert await fabric.drain() == []
    fabric.clock.advance("1h")
    assert [each.result for each in await fabric.drain()] == [2]


async def test_a_wait_times_out_with_the_clock(fabric: TestFabric) -> None:
    fabric.use(app)
    run = await ask.submit()
    assert await fabric.drain() == []
    assert await run.state() == "suspended"
    fabric.clock.advance("24h")
    assert [each.result for each in await fabric.drain()] == ["nobody answered"]


async def test_a_deadline_passes_with_the_clock(fabric: TestFabric) -> None:
    @fabric.task(deadline="2h")
    async def waits(ctx: ff.Context) -> None:
        await ctx.wait_for("approval")

    run = await waits.submit()
    await fabric.drain()
    fabric.clock.advance("2h")
    assert await run.state() == "expired"
    assert [each.state for each in await fabric.drain()] == ["expired"]


async def test_an_attempt_times_out_at_once(fabric: TestFabric) -> None:
    started = asyncio.Event()

    @fabric.task(timeout="5m")
    async def slow() -> None:
        started.set()
        await asyncio.Event().wait()

    async with fabric.worker():
        run = await slow.submit()
        await started.wait()
        fabric.clock.advance("5m")
        with pytest.raises(ff.ExecutionExpired):
            await run.result(timeout=5)


async def test_a_worker_that_lives_keeps_its_lease(fabric: TestFabric) -> None:
    started, may_end = asyncio.Event(), asyncio.Event()

    @fabric.task
    async def slow(ctx: ff.Context) -> int:
        started.set()
        await may_end.wait()
        await ctx.progress(100)
        return ctx.attempt

    async with fabric.worker():
        run = await slow.submit()
        await started.wait()
        fabric.clock.advance("10h")
        may_end.set()
        assert await run.result(timeout=5) == 1
        assert (await run.info()).lease_reclaim_count == 0


async def test_the_clock_shows_the_engine_time(fabric: TestFabric) -> None:
    before = fabric.clock.now()
    fabric.clock.advance("30d")
    assert timedelta(days=30) <= fabric.clock.now() - before < timedelta(days=30, minutes=1)


async def test_two_applications_run_together(fabric: TestFabric) -> None:
    other = ff.Fabric(namespace="other")

    @other.task
    async def triple(number: int) -> int:
        return 3 * number

    fabric.use(app)
    fabric.use(other)
    await double.submit(1)
    await triple.submit(1)
    assert sorted(each.result for each in await fabric.drain()) == [2, 3]


async def test_a_handler_that_never_ends_is_named(fabric: TestFabric) -> None:
    @fabric.task
    async def stuck() -> None:
        await asyncio.Event().wait()

    await stuck.submit()
    with pytest.raises(TimeoutError, match=r"^stuck did not finish within 0\.2 s"):
        await fabric.drain(timeout="200ms")


async def test_an_application_must_be_in_use(fabric: TestFabric) -> None:
    with pytest.raises(ff.ConfigError, match=r"fabric\.use\(app\)"):
        await fabric.drain()


@pytest.mark.parametrize("background", [True, False])
async def test_waiting_until_a_handler_asks(fabric: TestFabric, background: bool) -> None:
    fabric.use(app)
    async with AsyncExitStack() as workers:
        if background:
            await workers.enter_async_context(app.worker())
        run = await ask.submit()
        asked = await fabric.wait_until_suspended(run)
        assert (asked.execution_id, asked.prompt) == (run.id, "Ship it?")
        await run.approve()
        if not background:
            assert [each.result for each in await fabric.drain()] == ["approved"]
        assert await run.result(timeout=5) == "approved"


async def test_an_application_that_is_connected_elsewhere(
    valkey: TestServer, backend: ValkeyBackend, flowfabric_engine: TestEngine
) -> None:
    """Nothing of the test reaches the server that the application used before."""
    async with ff.Fabric(valkey.url) as elsewhere:

        @elsewhere.task
        async def echo(text: str) -> str:
            return text

        await echo.submit("before")
        before = await elsewhere.client()
        with TestFabric(flowfabric_engine) as fabric:
            async with fabric:
                fabric.use(elsewhere)
                await echo.submit("here")
                assert [each.result for each in await fabric.drain()] == ["here"]
        assert await elsewhere.client() is before
        page = await backend.listings.list_executions()
        assert [each.public_state for each in page.executions] == ["waiting"]


async def test_flows_run_to_their_end(fabric: TestFabric) -> None:
    """However wide they are, one call drains them; skipped nodes are among what ended."""

    @fabric.task
    async def add_up(numbers: list[int]) -> int:
        return sum(numbers)

    @fabric.task
    async def fail() -> int:
        raise ff.PermanentError("no data")

    fabric.use(app)
    flow = fabric.flow("wide")
    one = flow.add(double, 1)
    flow.add(add_up, ff.gather(flow.map(double, [one] * 300)))
    submitted = await flow.submit()
    ended = await fabric.drain()
    assert await submitted.result() == 1200
    assert len(ended) == 302
    broken = fabric.flow("broken")
    broken.add(double, broken.add(fail))
    await broken.submit()
    assert {each.task: each.state for each in await fabric.drain()} == {
        "fail": "failed",
        "double": "skipped",
    }
