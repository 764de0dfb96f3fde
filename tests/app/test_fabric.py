"""The application object on its own embedded Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError
from flowfabric.core.state import PublicState
from tests.support.sdk import valkey_location, valkey_of


@pytest.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ff.Fabric]:
    for name in ("FF_URL", "FF_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FF_DATA_DIR", str(tmp_path / "data"))
    async with ff.Fabric() as fabric:
        yield fabric


@dataclass
class Point:
    x: int
    y: int


async def test_arguments_and_results_keep_their_types(app: ff.Fabric) -> None:
    @app.task()
    async def mirror(point: Point, names: set[str]) -> Point:
        assert isinstance(point, Point)
        assert names == {"a", "b"}
        return Point(point.y, point.x)

    @app.task()
    def add(a: int, b: int = 2) -> int:
        return a + b

    async with app.worker():
        run = await app.submit(mirror, Point(1, 2), {"a", "b"})
        assert await run.result(timeout=20) == Point(2, 1)
        assert await (await app.submit(add, a=40)).result(timeout=20) == 42
        runs = await app.submit_many(add, [[1, 1], {"a": 2}, [3]])
        assert [await run.result(timeout=20) for run in runs] == [2, 4, 5]


@pytest.mark.parametrize(
    "variable",
    [
        "FF_LEASE_EXPIRY_INTERVAL_MS",
        "FF_MAX_PAYLOAD_BYTES",
        "FF_MAX_CONCURRENT_STREAM_OPS",
        "FF_FLOW_PARTITIONS",
        "FF_WAITPOINT_HMAC_SECRET",
    ],
)
async def test_no_server_is_started_for_settings_that_are_wrong(
    app: ff.Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    @app.task()
    async def greet() -> None: ...

    monkeypatch.setenv(variable, "wrong")
    with pytest.raises(ff.ConfigError, match=variable):
        await app.worker().run()
    if variable != "FF_LEASE_EXPIRY_INTERVAL_MS":
        with pytest.raises(ff.ConfigError, match=variable):
            await app.submit(greet)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_calls_that_cannot_work_are_refused_before_anything_is_sent(app: ff.Fabric) -> None:
    @app.task()
    async def greet(name: str) -> str:
        return name

    for call in ([], ["a", "b"], {"nam": "a"}, {"name": "a", "other": 1}):
        with pytest.raises(ValidationError) as caught:
            await app.submit_many(greet, [call])
        assert caught.value.code == "invalid_input"
    wrong: Any = greet
    with pytest.raises(ValidationError):
        await app.submit(wrong, "a", name="b")
    with pytest.raises(ValidationError):
        await app.submit(wrong, object())
    with pytest.raises(ff.ConfigError, match='A task named "greet" is already registered'):
        app.task("greet")(lambda: None)


async def test_an_idempotency_key_identifies_one_execution(app: ff.Fabric) -> None:
    @app.task()
    async def once() -> None: ...

    first = await once.options(idempotency_key="k").submit()
    second = await once.options(idempotency_key="k").submit()
    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.id == second.id


async def test_failures_tell_why(app: ff.Fabric) -> None:
    @app.task()
    async def broken() -> None:
        raise ff.PermanentError("no such invoice")

    async with app.worker():
        run = await app.submit(broken)
        with pytest.raises(ff.ExecutionFailed, match="no such invoice") as caught:
            await run.result(timeout=20)
    assert caught.value.info.failure_category == "permanent"


async def test_retries_end_in_a_result(app: ff.Fabric) -> None:
    @app.task(retry=ff.Retry(3, backoff=0.01, jitter=False))
    async def flaky(ctx: ff.Context) -> int:
        if ctx.attempt < 3:
            raise ff.RetryableError("not yet")
        return ctx.attempt

    async with app.worker():
        assert await (await app.submit(flaky)).result(timeout=20) == 3


async def test_a_delayed_run_waits_for_its_time(app: ff.Fabric) -> None:
    @app.task()
    async def later() -> None: ...

    run = await app.submit(later.options(delay="1h"))
    assert await run.state() is PublicState.DELAYED
    await run.cancel("no longer needed")
    with pytest.raises(ff.ExecutionCancelled, match="no longer needed"):
        await run.result(timeout=20)


async def test_a_crashed_embedded_server_comes_back_with_its_data(app: ff.Fabric) -> None:
    @app.task()
    async def echo(text: str) -> str:
        return text

    run = await app.submit(echo, "kept")
    client = await app.client()
    await valkey_of(client).transport.call("WAITAOF", 1, 0, 0)
    server = valkey_location(app)._server
    assert server is not None
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with app.worker(), asyncio.timeout(30):
        assert await run.result() == "kept"


def test_one_application_in_several_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_DATA_DIR", str(tmp_path / "data"))
    app = ff.Fabric()

    @app.task()
    async def echo(text: str) -> str:
        return text

    async def once(text: str) -> str:
        async with app, app.worker():
            return await (await app.submit(echo, text)).result(timeout=20)

    assert asyncio.run(once("a")) == "a"
    assert asyncio.run(once("b")) == "b"


async def test_a_failed_first_connection_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "data"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("FF_DATA_DIR", str(blocked))
    async with ff.Fabric() as app:
        with pytest.raises(ff.ConfigError):
            await app.client()
        blocked.unlink()
        assert (await app.client()).namespace == "default"
