"""Every asynchronous test here runs on both event loops, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop

from flowfabric.valkey.address import parse_url
from flowfabric.valkey.transport import Client
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer


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


@pytest.fixture
async def client(shared_server: TestServer) -> AsyncIterator[Client]:
    """Straight to the server, on an empty keyspace."""
    client = Client(parse_url(shared_server.url))
    await client.call("FLUSHALL")
    yield client
    await client.aclose()


@pytest.fixture
async def far(proxy: FaultProxy, client: Client) -> AsyncIterator[Client]:
    """To the same server through the fault proxy, connected."""
    far = Client(parse_url(proxy.url))
    await far.wait_ready()
    yield far
    await far.aclose()
