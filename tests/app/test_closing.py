"""Closing an application that never got its connection."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.valkey.embedded import EmbeddedServer
from tests.support.listening import listening
from tests.support.sdk import valkey_location


class Mute:
    """A server that takes connections and never says a word."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        self.called.set()
        while await reader.read(4096):
            pass
        self.left.set()


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "mute.sock"


@pytest.fixture
async def mute(socket: Path) -> AsyncIterator[Mute]:
    server = Mute()
    async with listening(server.serve, path=socket):
        yield server


async def test_closing_ends_a_connection_that_is_being_made(mute: Mute, socket: Path) -> None:
    app = ff.Fabric(f"unix://{socket}")
    client = asyncio.create_task(app.client())
    await mute.called.wait()
    async with asyncio.timeout(3):
        await app.aclose()
        with pytest.raises(ff.TransportError, match="the application was closed"):
            await client
        await mute.left.wait()
    gc.collect()


async def test_a_cancelled_caller_is_just_cancelled(mute: Mute, socket: Path) -> None:
    async with ff.Fabric(f"unix://{socket}") as app:
        client = asyncio.create_task(app.client())
        await mute.called.wait()
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client


async def test_a_worker_cancelled_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """No server, so it dials until somebody stops it: after a few steps, or after many."""
    app = ff.Fabric(f"unix://{tmp_path}/none.sock")

    @app.task()
    async def greet() -> None: ...

    before = asyncio.all_tasks()
    for turns in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 1000):
        entering = asyncio.create_task(app.worker().__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait([entering])
        assert entering.cancelled()
        assert asyncio.all_tasks() == before, turns


async def test_closing_the_blocking_face_ends_a_connection_that_is_being_made(
    mute: Mute, socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync = ff.SyncFabric(ff.Fabric(f"unix://{socket}"))
    raised: list[BaseException] = []

    def submit() -> None:
        try:
            sync.submit("greet", "Ada")
        except BaseException as error:  # noqa: BLE001 - whatever it is
            raised.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    await mute.called.wait()
    async with asyncio.timeout(3):
        await asyncio.to_thread(sync.close)
        await asyncio.to_thread(thread.join)
        await mute.left.wait()
    assert [type(error) for error in raised] == [ff.TransportError]
    gc.collect()
    assert caplog.records == []


def test_closing_the_sync_client_stops_dialling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "data"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("FF_DATA_DIR", str(blocked))
    for name in ("FF_URL", "FF_HOST"):
        monkeypatch.delenv(name, raising=False)
    app = ff.Fabric()
    sync = ff.SyncFabric(app)
    with pytest.raises(ff.ConfigError):
        sync.submit("greet", "Ada")
    blocked.unlink()
    sync.close()
    assert not blocked.exists()


async def test_an_embedded_server_that_came_too_late_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_DATA_DIR", str(tmp_path / "data"))
    for name in ("FF_URL", "FF_HOST"):
        monkeypatch.delenv(name, raising=False)
    begun, go_on = threading.Event(), threading.Event()
    got: list[Any] = []
    acquire = EmbeddedServer.acquire

    def late(*_: object, **__: object) -> EmbeddedServer:
        begun.set()
        go_on.wait(20)
        got.append(acquire())
        return got[0]

    monkeypatch.setattr(EmbeddedServer, "acquire", late)
    app = ff.Fabric()
    client = asyncio.create_task(app.client())
    await asyncio.to_thread(begun.wait, 20)
    await app.aclose()
    go_on.set()
    with pytest.raises(ff.TransportError):
        await client
    await asyncio.get_running_loop().shutdown_default_executor()
    with pytest.raises(ff.ConfigError, match="released"):
        got[0].ensure_running()
    assert valkey_location(app)._server is None
