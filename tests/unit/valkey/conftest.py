"""Every asynchronous test here runs on both event loops, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import pytest
import uvloop

from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connection import Connection
from flowfabric.valkey.transport import Transport
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer

Kept = TypeVar("Kept", Transport, Connection)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[TestServer]:
    server = TestServer("--enable-debug-command", "yes")
    yield server
    server.stop()


@pytest.fixture
def proxy(shared_server: TestServer) -> Iterator[FaultProxy]:
    with FaultProxy(shared_server.socket_path) as proxy:
        yield proxy


class Keeper:
    """Closes what a test opened, even if the test fails: uvloop hangs on a socket left open."""

    def __init__(self) -> None:
        self._kept: list[Transport | Connection] = []

    def __call__(self, opened: Kept) -> Kept:
        self._kept.append(opened)
        return opened

    async def close(self) -> None:
        for opened in self._kept:
            await opened.aclose()


@pytest.fixture
async def keep() -> AsyncIterator[Keeper]:
    keeper = Keeper()
    yield keeper
    await keeper.close()


@pytest.fixture
async def client(shared_server: TestServer) -> AsyncIterator[Transport]:
    """Straight to the server, on an empty keyspace."""
    client = Transport(parse_url(shared_server.url))
    await client.call("FLUSHALL")
    yield client
    await client.aclose()


@pytest.fixture
async def far(proxy: FaultProxy, client: Transport) -> AsyncIterator[Transport]:
    """To the same server through the fault proxy, connected."""
    far = Transport(parse_url(proxy.url))
    await far.wait_ready()
    yield far
    await far.aclose()
