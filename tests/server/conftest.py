"""A server on a free port, over the test process's own Valkey."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from tests.support.command import Cli, Running
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.server import TestServer, free_port
from tests.support.subjects import Subjects

SECRET = "ab" * 32
Serving = Callable[..., AbstractAsyncContextManager[Http]]


@asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncGenerator[Http]:
    """A server over the engine of a test, without scanners: tests move the clock themselves."""
    given: dict[str, Any] = {"listen": ("127.0.0.1", 0), "shutdown_timeout_s": 5, **settings}
    config = ServerConfig(**given)
    server = ServerProcess(engine.backend, config)
    await server.listen()
    try:
        yield Http(server.address)
    finally:
        await server.stop_serving()


@pytest.fixture
async def http(engine: Engine) -> AsyncIterator[Http]:
    async with serving(engine) as client:
        yield client


@pytest.fixture
def serve(engine: Engine) -> Serving:
    """Starts a server with other settings."""
    return partial(serving, engine)


@asynccontextmanager
async def running(
    cli: Cli, *options: str, **variables: str
) -> AsyncGenerator[tuple[Running, Http]]:
    """`flowfabric server` on a free port, ready."""
    listen = f"127.0.0.1:{free_port()}"
    async with cli.start("server", "--listen", listen, *options, **variables) as server:
        line = await server.line("HTTP API listening on ")
        host, port = line.split(" on ")[1].split()[0].split(":")
        yield server, Http((host, int(port)))


@pytest.fixture
def cli(valkey: TestServer, tmp_path: Path, engine: Engine) -> Cli:
    return Cli(tmp_path, FF_URL=valkey.url, FF_WAITPOINT_HMAC_SECRET=SECRET)


async def waiters(engine: Engine, count: int) -> None:
    """Return when so many requests wait for the end of something."""

    async def wait() -> bool:
        return engine.backend._events._watch.waiting == count

    await until(wait, f"{count} waiting requests")


@pytest.fixture
async def subjects(engine: Engine) -> AsyncIterator[Subjects]:
    """Makers of what a request is about, behind a server."""
    async with serving(engine) as http:
        yield Subjects(engine, http)
