"""One application in several event loops: threads that each run their own, and a worker beside."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import flowfabric as ff
from tests.docs.scratch import wait_for_server_end
from tests.support.sdk import valkey_location


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ff.Fabric]:
    monkeypatch.setenv("FF_DATA_DIR", str(tmp_path / "data"))
    for name in ("FF_URL", "FF_HOST"):
        monkeypatch.delenv(name, raising=False)
    yield ff.Fabric()
    wait_for_server_end(tmp_path / "data")


def server_of(app: ff.Fabric) -> int | None:
    server = valkey_location(app)._server
    return None if server is None else server.pid


def test_closing_in_one_loop_leaves_the_server_to_the_others(app: ff.Fabric) -> None:
    @app.task
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    async def greeted(name: str) -> str:
        async with app:
            return await (await greet.submit(name)).result(timeout=20)

    with app.worker():
        started = server_of(app)
        assert started is not None
        assert asyncio.run(greeted("Ada")) == "Hello, Ada!"
        assert server_of(app) == started
        assert asyncio.run(greeted("Grace")) == "Hello, Grace!"
        assert server_of(app) == started
    assert server_of(app) is None


def test_an_application_that_opens_again_keeps_the_server(app: ff.Fabric) -> None:
    @app.task
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    with app.worker(), ff.SyncFabric(app) as sync:
        asyncio.run(app.aclose())
        assert sync.submit(greet, "Ada").result(timeout=20) == "Hello, Ada!"
        started = server_of(app)
        assert started is not None
    assert server_of(app) == started
    asyncio.run(app.aclose())
    assert server_of(app) is None


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_a_loop_that_ended_without_closing_holds_nothing(app: ff.Fabric) -> None:
    async def connect() -> None:
        await app.client()

    asyncio.run(connect())
    assert server_of(app) is not None
    asyncio.run(app.aclose())
    assert server_of(app) is None
    gc.collect()


def test_each_loop_keeps_its_own_client(app: ff.Fabric) -> None:
    both = Barrier(2, timeout=20)

    async def clients() -> int:
        async with app:
            first = await app.client()
            await asyncio.to_thread(both.wait)
            second = await app.client()
            await asyncio.to_thread(both.wait)
            return len({id(first), id(second)})

    with ThreadPoolExecutor() as threads:
        counted = [threads.submit(asyncio.run, clients()) for _ in range(2)]
        assert [each.result(timeout=30) for each in counted] == [1, 1]
    assert server_of(app) is None
