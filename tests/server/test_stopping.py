"""Shutdown (09 §5): what is refused, its bounds, and signals at any time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from tests.server.conftest import SECRET, running
from tests.server.test_events import follow
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer, free_port
from tests.support.streams import append
from tests.support.terminal import CTRL_C, in_terminal, nothing_left

PATH = "/v1/executions"
BODY = b'{"namespace":"default","execution_kind":"late"}'


@asynccontextmanager
async def half_a_request(
    http: Http,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose request the server has begun to read."""
    reader, writer = await asyncio.open_connection(*http.address)
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    # The server says so when it reads the body.
    head += f"expect: 100-continue\r\ncontent-length: {len(BODY)}\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(BODY[:10])
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_request_that_has_begun_still_finishes(cli: Cli, engine: Engine) -> None:
    waiting = await engine.create()
    async with running(cli) as (server, http), half_a_request(http) as (reader, writer):
        async with follow(http, f"{PATH}/{waiting}/events") as source:
            await source.next()
            server.send(signal.SIGTERM)
            assert await source.rest() == []
        writer.write(BODY[10:])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201 ")
        done = await server.end()
        assert done.code == 0, done.out
        assert "shutdown timed out" not in done.out


async def test_what_is_refused_while_a_server_stops(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Readiness, streams and claims go first; here, a stream that does not end holds it there."""
    handle = await engine.running()
    await append(engine, handle, "frame")
    execution = f"{PATH}/{handle.execution_id}"
    server = ServerProcess(engine.backend, ServerConfig(listen=("127.0.0.1", 0)))
    await server.listen()
    http = Http(server.address)
    assert (await http.get("/readyz")).status == 200
    with server.services.event_streams:
        stopping = asyncio.create_task(server.stop_serving())
        await server.services.stopping.wait()
        answer = await http.get("/readyz")
        assert (answer.status, answer.json["failing"]) == (503, ["shutdown"])
        assert answer.json["status"] == "not_ready"
        frames = f"{execution}/attempts/0/stream"
        claim = {"worker_instance_id": "w-1"}
        for refused in (
            await http.get(f"{frames}/tail?block_ms=1000"),
            await http.get(frames),
            await http.get(f"{execution}/events"),
            await http.get("/v1/events"),
            await http.post("/v1/remote/claim?wait_ms=1000", claim),
        ):
            assert refused.kind == (503, "unavailable"), refused.body
        assert (await http.get(f"{execution}/state")).json == "active"
        assert not stopping.done()
    await stopping
    assert "shutdown timed out" not in caplog.text
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
    with pytest.raises(OSError):
        await http.get("/readyz")


async def test_shutdown_keeps_to_its_bound(cli: Cli) -> None:
    """A request that never ends is cut off, and leaves no traceback behind."""
    async with (
        running(cli, FF_SHUTDOWN_TIMEOUT_S="1") as (server, http),
        half_a_request(http) as (reader, _),
    ):
        server.send(signal.SIGTERM)
        started = time.monotonic()
        done = await server.end()
        assert time.monotonic() - started < 10, "one step alone may take 15 s"
        assert done.code == 0, done.out
        with pytest.raises((EOFError, OSError)):
            await reader.readuntil(b"\r\n")
    lines = done.out.splitlines()
    (late,) = [line for line in lines if "shutdown timed out" in line]
    assert late.endswith("while waiting for requests")
    assert "server stopped" in lines[-1]
    assert "Traceback" not in done.out


async def test_shutdown_keeps_to_its_bound_while_valkey_is_away(
    cli: Cli, valkey: TestServer
) -> None:
    with FaultProxy(valkey.socket_path) as proxy:
        async with running(cli, FF_URL=proxy.url, FF_SHUTDOWN_TIMEOUT_S="1") as (server, _):
            await server.line("this process runs the scanners")
            proxy.down()
            server.send(signal.SIGTERM)
            started = time.monotonic()
            done = await server.end()
            assert time.monotonic() - started < 9, "a call alone has 10 s of patience"
            assert done.code == 0, done.out


async def test_a_second_signal_ends_it_at_once(cli: Cli, engine: Engine) -> None:
    waiting = await engine.create()
    async with (
        running(cli, FF_SHUTDOWN_TIMEOUT_S="3600") as (server, http),
        half_a_request(http),
    ):
        async with follow(http, f"{PATH}/{waiting}/events") as source:
            await source.next()
            server.send(signal.SIGTERM)
            assert await source.rest() == []
        server.send(signal.SIGTERM)
        assert (await server.end()).code == 128 + signal.SIGTERM


@pytest.mark.parametrize("command", [("server", "--listen", "127.0.0.1:0"), ("dev", "shop:app")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_during_boot_ends_it(
    cli: Cli, command: tuple[str, ...], number: signal.Signals
) -> None:
    nowhere = f"valkey://127.0.0.1:{free_port()}"
    async with cli.start(*command, FF_URL=nowhere) as server:
        await server.line("waiting for Valkey at")
        server.send(number)
        done = await server.end()
        assert done.code == 0, done.out
        assert "Traceback" not in done.out


async def test_in_a_terminal_ctrl_c_ends_it(cli: Cli) -> None:
    command = ("server", "--listen", "127.0.0.1:0")
    async with in_terminal(cli, *command, FF_WAITPOINT_HMAC_SECRET=SECRET) as terminal:
        address = await terminal.shows("address ")
        await terminal.shows("Ready. Ctrl-C or SIGTERM stops it after running requests finish.")
        http = Http(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        assert (await http.get("/readyz")).status == 200
        terminal.type(CTRL_C)
        assert await terminal.end() == 0
    assert "server stopped" in terminal.text
    assert "Traceback" not in terminal.text
    await nothing_left(cli.folder)
