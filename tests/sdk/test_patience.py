"""A short outage is ridden out: calls wait for the server, and so does a worker that starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from flowfabric.core.contracts.executions import Cancelled
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import TransportError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connection import dial
from tests.support.engine import Engine
from tests.support.sdk import config, opener, state, submit, until, valkey_of
from tests.support.server import TestServer
from tests.support.suspension import Waits

SETTINGS = (
    *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
    *("--loading-process-events-interval-bytes", "1024", "--enable-debug-command", "yes"),
)
Heal = Callable[[], Awaitable[Any]]


@pytest.fixture
def server() -> Iterator[TestServer]:
    own = TestServer(*SETTINGS)
    yield own
    own.stop()


@pytest.fixture
async def client(server: TestServer) -> AsyncIterator[Client]:
    backend = await ValkeyBackend.connect(parse_url(server.url), prepare_with=PartitionCounts())
    client = Client(backend)
    yield client
    await client.aclose()


async def command(server: TestServer, *args: str | int) -> Any:
    conn = await dial(parse_url(server.url))
    try:
        return await conn.call(*args)
    finally:
        await conn.aclose()


async def persisted(server: TestServer) -> bool:
    raw: bytes = await command(server, "INFO", "persistence")
    return b"aof_rewrite_in_progress:0" in raw and b"aof_rewrite_scheduled:0" in raw


async def down(server: TestServer) -> Heal:
    server.kill()
    return lambda: asyncio.to_thread(server.start)


async def loading(server: TestServer) -> Heal:
    """Back after a restart, but it answers LOADING for about half a second."""
    # Keys are loaded slowly, on request, only from a snapshot.
    await command(server, "DEBUG", "POPULATE", 500)
    await command(server, "BGREWRITEAOF")
    await until(lambda: persisted(server), "the rewrite")
    server.kill()
    server._extra = (*SETTINGS, "--key-load-delay", "1000")
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    await until(lambda: answers(server, "LOADING"), "a server that loads")
    return lambda: starting


async def answers(server: TestServer, word: str) -> bool:
    try:
        await command(server, "SET", "probe", 1)
    except TransportError as error:
        return word in error.message
    return False


async def read_only(server: TestServer) -> Heal:
    await command(server, "REPLICAOF", "127.0.0.1", 1)
    return lambda: command(server, "REPLICAOF", "NO", "ONE")


async def alone(server: TestServer) -> Heal:
    await command(server, "CONFIG", "SET", "min-replicas-to-write", 1)
    return lambda: command(server, "CONFIG", "SET", "min-replicas-to-write", 0)


OUTAGES = [down, loading, read_only, alone]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.__name__)
async def test_calls_wait_for_the_end_of_an_outage(
    server: TestServer, client: Client, outage: Callable[[TestServer], Awaitable[Heal]]
) -> None:
    waits = await Waits.open(Engine(valkey_of(client)))
    parked = await waits.park()
    (ended,) = await submit(client.backend)
    handle = (await waits.engine.claim()).handle
    assert handle.execution_id == ended
    await client.backend.executions.complete(handle, b"done")
    (doomed,) = await submit(client.backend)
    heal = await outage(server)
    calls: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(call)
        for call in (
            client.submit("job"),
            client.backend.executions.cancel_execution(doomed),
            waits.send(parked, idempotency_key="once"),
            client.result(ended),
            client.inspect(ended),
        )
    ]
    await asyncio.wait(calls, timeout=0.2)
    await heal()
    created, cancelled, signalled, result, seen = await asyncio.gather(*calls)
    assert await state(client.backend, created.execution_id) == "waiting"
    assert isinstance(cancelled, Cancelled)
    assert isinstance(signalled, Accepted)
    assert (result, seen is not None) == (b"done", True)
    assert len((await client.backend.listings.list_executions()).executions) == 4


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.__name__)
async def test_a_worker_starts_when_the_outage_is_over(
    server: TestServer, client: Client, outage: Callable[[TestServer], Awaitable[Heal]]
) -> None:
    heal = await outage(server)
    starting = asyncio.create_task(Worker.connect(config(), opener(server.url)))
    done, _ = await asyncio.wait([starting], timeout=0.3)
    assert not done or outage is loading
    await heal()
    worker = await starting
    (listed,) = await client.backend.workers.list_workers()
    assert listed.worker_instance_id == worker.config.worker_instance_id
    await worker.aclose()


async def test_a_worker_does_not_wait_for_ever(server: TestServer, client: Client) -> None:
    await read_only(server)
    with pytest.raises(TransportError) as caught:
        await Worker.connect(config(), opener(server.url, request_timeout=0.2))
    assert (caught.value.kind, caught.value.retryable) == ("read_only", True)
