"""A cancelled close still completes: it leaks no thread, connection or waiter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.sdk.loop_thread import LoopThread
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import config, opener, state, submit, until, valkey_of, watch_of
from tests.support.server import TestServer


async def cancelled(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Begin to close, and be cancelled at the first wait."""
    closing = asyncio.create_task(close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()


def in_flight(worker: Worker) -> bool:
    transport: Any = valkey_of(worker).transport
    conn = transport._link.conn
    return conn is not None and conn.in_flight > 0


async def a_task(make_worker: MakeWorker, engine: Engine, *urls: str) -> ClaimedTask:
    await submit(engine.backend)
    worker = await make_worker(*urls)
    task = await worker.claim()
    assert task is not None
    return task


@pytest.mark.parametrize("when", ["at once", "while a lease is given back"])
async def test_a_worker_gives_back_and_ends_its_thread(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy, when: str
) -> None:
    task = await a_task(make_worker, engine, proxy.url, valkey.url)
    worker: Worker = task._owner  # type: ignore[assignment]
    if when == "at once":
        await cancelled(worker.aclose)
    else:
        proxy.pause()
        closing = asyncio.create_task(worker.aclose())
        await until(lambda: in_flight(worker), "the call that gives the lease back")
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        proxy.resume()
    await worker.aclose()
    assert not worker.keeper.is_alive()
    assert await state(engine.backend, task.execution_id) == "waiting"
    assert await engine.backend.workers.list_workers() == []
    await until(lambda: proxy.connections == 0, "the end of the connection")


async def test_a_worker_that_could_not_deregister_yet(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url)
    proxy.pause()
    closing = asyncio.create_task(worker.aclose())
    await until(lambda: in_flight(worker), "the call that deregisters")
    closing.cancel()
    await asyncio.wait([closing])
    proxy.resume()
    await worker.aclose()
    assert await engine.backend.workers.list_workers() == []
    await until(lambda: proxy.connections == 0, "the end of the connection")


async def test_the_end_of_the_loop_ends_the_worker_with_it(
    engine: Engine, valkey: TestServer, proxy: FaultProxy
) -> None:
    """What `asyncio.run` does after Ctrl-C: it cancels all tasks, the closing one too."""
    await submit(engine.backend)
    keepers: list[LoopThread] = []

    async def main() -> None:
        place = opener(proxy.url, valkey.url, request_timeout=1.0)
        worker = await Worker.connect(config(), place)
        keepers.append(worker.keeper)
        task = await worker.claim()
        proxy.pause()
        closing = asyncio.create_task(worker.aclose())
        await until(lambda: in_flight(worker), "the call that gives the lease back")
        assert task is not None
        assert not closing.done()

    await asyncio.to_thread(asyncio.run, main())
    assert [keeper.is_alive() for keeper in keepers] == [False]
    proxy.resume()
    await until(lambda: proxy.connections == 0, "the end of the connection")


async def test_a_client_wakes_its_waiters(engine: Engine, valkey: TestServer) -> None:
    client = await Client.connect(valkey.url)
    (execution_id,) = await submit(engine.backend)
    waiter = asyncio.create_task(client.wait(execution_id))
    await until(lambda: watch_of(client).waiting == 1, "the waiter")
    await cancelled(client.aclose)
    with pytest.raises(TransportError, match="closed"):
        async with asyncio.timeout(10):
            await waiter
    await client.aclose()
    with pytest.raises(TransportError, match="closed"):
        await client.submit("job")


async def test_a_backend_closes_all_its_connections(engine: Engine, valkey: TestServer) -> None:
    backend = await ValkeyBackend.connect(parse_url(valkey.url), name="closing")
    pool = backend.stream_pool
    async with pool.connection("{fp:0}") as first, pool.connection("{fp:0}") as second:
        await asyncio.gather(first.call("PING"), second.call("PING"))
    assert await named(engine, "closing") == 3
    await cancelled(backend.aclose)
    await backend.aclose()

    async def none_left() -> bool:
        return await named(engine, "closing") == 0

    await until(none_left, "the end of the connections")


async def named(engine: Engine, name: str) -> int:
    listed: Any = await engine.backend.transport.call("CLIENT", "LIST")
    return listed.count(f"name={name} ".encode())
