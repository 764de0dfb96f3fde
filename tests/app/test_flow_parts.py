"""Flows as nodes of other flows."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError
from tests.support.engine import Engine
from tests.support.server import TestServer


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def test_a_flow_runs_as_a_part_of_another(app: ff.Fabric) -> None:
    ran: list[str] = []

    @app.task
    async def work(name: str) -> str:
        ran.append(name)
        return name

    @app.task
    async def join(parts: dict[str, str], last: str) -> str:
        return "+".join([*sorted(parts.values()), last])

    inner = app.flow("inner")
    deepest = app.flow("deepest")
    deepest.add(work, "d")
    inner.options(key="b").add(work, "b")
    inner.subflow(deepest, key="c")
    outer = app.flow("outer")
    first = outer.add(work, "a")
    part = outer.subflow(inner, after=[first])
    outer.add(join, part.value, outer.options(after=[part]).add(work, "z"))
    submitted = await outer.submit()
    again = await outer.submit()
    assert (again.id, again.duplicate) == (submitted.id, True)
    async with app.worker():
        assert await submitted.result(timeout=10) == "b+d+z"
    assert ran[0] == "a"
    assert ran[-1] == "z"
    assert (await submitted.graph()).nodes[part.key].subflow_id == inner.id
    assert (await app.get_flow(inner.id).graph()).state == "completed"
    assert await app.get_flow(deepest.id).result() == "d"
    for wrong, words in (
        (lambda: outer.subflow(outer), "must be another flow"),
        (lambda: app.flow("x").subflow(inner), "is already a subflow"),
    ):
        with pytest.raises(ValidationError, match=words):
            wrong()
    with pytest.raises(ValidationError, match="Submit the flow that contains it"):
        await inner.submit()


async def test_a_subflow_that_fails_fails_its_flow(app: ff.Fabric) -> None:
    broken = True

    @app.task
    async def work() -> str:
        if broken:
            raise ValueError("no data")
        return "done"

    inner, outer = app.flow("inner"), app.flow("outer")
    inner.add(work)
    outer.subflow(inner, key="part")
    async with app.worker():
        submitted = await outer.submit()
        with pytest.raises(ff.FlowFailed, match=r"part: .* 1 failed") as caught:
            await submitted.result(timeout=10)
        assert list(caught.value.failures) == ["part"]
        broken = False
        replayed = await submitted.replay()
        assert replayed.replayed == 1
        assert await submitted.result(timeout=10) == "done"
