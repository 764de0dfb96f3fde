"""Handlers that add children to their flow and wait for them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import flowfabric as ff
from tests.support.engine import Engine
from tests.support.server import TestServer


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def test_a_handler_waits_for_its_children(app: ff.Fabric) -> None:
    entered: list[int] = []

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    async def parent(ctx: ff.Context, start: int) -> dict[str, int]:
        entered.append(ctx.attempt)
        children = ctx.spawn()
        first = children.add(double, start)
        children.options(key="last").add(double, first)
        assert ctx.flow_id == submitted.id
        return await children.results()

    @app.task
    async def show(found: dict[str, int]) -> dict[str, int]:
        return found

    flow = app.flow("test")
    flow.add(show, flow.map(parent, [1, 10])[1])
    submitted = await flow.submit()
    async with app.worker():
        done = await submitted.result(timeout=10)
    assert done == {"parent-1": {"double_1": 2, "last": 4}, "show-1": {"double_1": 20, "last": 40}}
    assert entered == [1] * 4


def test_children_of_a_def_handler(engine: Engine, valkey: TestServer) -> None:
    app = ff.Fabric(valkey.url)

    @app.task
    def double(n: int) -> int:
        return 2 * n

    @app.task
    def parent(ctx: ff.SyncContext) -> int:
        children = ctx.spawn()
        children.map(double, [1, 2])
        return sum(children.results().values())

    with ff.SyncFabric(app) as sync, app.worker():
        flow = sync.flow("test")
        flow.add(parent)
        assert flow.submit().result(timeout=10) == 6


async def test_children_that_fail(app: ff.Fabric) -> None:
    @app.task
    async def work(name: str) -> str:
        if name == "bad":
            raise ValueError("broken")
        return name

    @app.task
    async def parent(ctx: ff.Context) -> list[str]:
        children = ctx.spawn()
        children.map(work, ["good", "bad"])
        try:
            await children.results()
        except ff.ChildrenFailed as error:
            return [error.results["work_1"], error.failures["work_2"].reason, str(error)]
        return []

    flow = app.flow("test")
    parent_node = flow.add(parent)
    async with app.worker():
        submitted = await flow.submit()
        found = await submitted.run(parent_node).result(timeout=10)
    assert found[:2] == ["good", "ValueError: broken"]
    assert found[2] == "work_2: work failed after 1 attempt: ValueError: broken"
    assert await submitted.result() == found


async def test_children_need_a_flow(app: ff.Fabric) -> None:
    @app.task
    async def work() -> None: ...

    @app.task
    async def parent(ctx: ff.Context) -> None:
        children = ctx.spawn()
        children.add(work)
        await children.results()

    async with app.worker():
        run = await parent.submit()
        with pytest.raises(ff.ExecutionFailed, match=r"Submit the task with app\.flow"):
            await run.result(timeout=10)


async def test_no_children_are_no_wait(app: ff.Fabric) -> None:
    @app.task
    async def work(n: int) -> int:
        return n

    @app.task
    async def parent(ctx: ff.Context) -> int:
        children = ctx.spawn()
        children.map(work, [])
        return len(await children.results())

    flow = app.flow("test")
    flow.add(parent)
    async with app.worker():
        assert await (await flow.submit()).result(timeout=10) == 0
