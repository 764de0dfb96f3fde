"""A worker that crashes at a chosen await: its lease expires, and another worker takes over."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import pytest

import flowfabric as ff
from flowfabric.testing import SyncTestFabric, TestFabric

shop = sys.modules[__name__]
app = ff.Fabric()
seen: list[str] = []


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


async def charge(order: str) -> None:
    seen.append(f"charged {order}")


def pack(order: str) -> None:
    seen.append(f"packed {order}")


@app.task
async def ship(ctx: ff.Context, order: str) -> int:
    try:
        await ctx.progress(10)
        await charge(order)
        await ctx.progress(90)
    finally:
        seen.append("left")
    return ctx.attempt


@app.task
def deliver(ctx: ff.SyncContext, order: str) -> int:
    ctx.progress(10)
    pack(order)
    return ctx.attempt


@pytest.mark.parametrize(("when", "at_crash"), [("before", []), ("after", ["charged o-1"])])
async def test_another_worker_takes_over(
    fabric: TestFabric, when: Literal["before", "after"], at_crash: list[str]
) -> None:
    fabric.use(app)
    run = await ship.submit("o-1")
    with fabric.crash_at(shop, "charge", when=when):
        assert await fabric.drain() == []
    assert seen == at_crash
    assert await run.state() == "active"
    assert await fabric.drain() == []
    fabric.clock.advance("29s")
    assert await fabric.drain() == []
    fabric.clock.advance("2s")
    (ended,) = await fabric.drain()
    assert (ended.result, ended.attempts) == (2, 2)
    assert seen == [*at_crash, "charged o-1", "left"]
    assert (await run.info()).lease_reclaim_count == 1


async def test_at_a_later_call_of_the_context(fabric: TestFabric) -> None:
    fabric.use(app)
    run = await ship.submit("o-1")
    with fabric.crash_at(ff.Context, "progress", call=2):
        await fabric.drain()
    assert seen == ["charged o-1"]
    assert (await run.info()).progress_pct == 10
    fabric.clock.advance("1m")
    await fabric.drain()
    assert await run.result() == 2


async def test_a_worker_in_the_background(fabric: TestFabric) -> None:
    """A killed process stops all its handlers and gives nothing back."""
    started, may_end = asyncio.Event(), asyncio.Event()

    @app.task("background")
    async def other() -> None:
        started.set()
        await may_end.wait()
        seen.append("ended")

    fabric.use(app)
    try:
        async with app.worker() as doomed:
            beside = await other.submit()
            await started.wait()
            with fabric.crash_at(shop, "charge"):
                run = await ship.submit("o-1")
                client = await app.client()
                assert doomed._background is not None
                await doomed._background
            (left,) = await client.backend.workers.list_workers()
            assert left.worker_instance_id == doomed.config.worker_instance_id
        assert await run.state() == "active"
        may_end.set()
        fabric.clock.advance("1m")
        async with app.worker():
            assert await run.result(timeout=10) == 2
            await beside.result(timeout=10)
        assert sorted(seen) == ["charged o-1", "ended", "left"]
    finally:
        del app.tasks["background"]


@pytest.mark.parametrize("name", ["pack", "progress"])
def test_a_handler_without_await(sync_fabric: SyncTestFabric, name: str) -> None:
    sync = sync_fabric.use(app)
    run = sync.submit(deliver, "o-1")
    with sync_fabric.crash_at(shop if name == "pack" else ff.SyncContext, name):
        sync_fabric.drain()
    assert run.state() == "active"
    assert seen == []
    sync_fabric.clock.advance("1m")
    (ended,) = sync_fabric.drain()
    assert (ended.result, seen) == (2, ["packed o-1"])


async def test_a_crash_that_does_not_happen(fabric: TestFabric) -> None:
    fabric.use(app)
    original = charge
    await ship.submit("o-1")
    too_few = pytest.raises(AssertionError, match=r"made 1 call of charge, .* is at call 2")
    with too_few, fabric.crash_at(shop, "charge", call=2):
        await fabric.drain()
        await charge("not a handler")
    assert charge is original


async def test_async_handlers_crash_only_at_an_await(fabric: TestFabric) -> None:
    @fabric.task
    async def packs() -> None:
        pack("o-1")

    await packs.submit()
    refused = pytest.raises(AssertionError, match=r"pack is not async\. .* only at an await")
    with refused, fabric.crash_at(shop, "pack"):
        await fabric.drain()
    assert seen == ["packed o-1"]
