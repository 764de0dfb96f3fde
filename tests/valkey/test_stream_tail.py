"""Tails: waiting, waking, time, isolation from everything else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from flowfabric.core.contracts.streams import BestEffort
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.storage import until_blocked, waiting_tail
from tests.support.streams import append, frames

VISIBLE: dict[str, Any] = {"visibility": "exclude_best_effort"}


async def test_an_append_wakes(engine: Engine) -> None:
    handle = await engine.running()
    tails = [await waiting_tail(engine, handle.execution_id) for _ in range(3)]
    outcome = await append(engine, handle, b"news")
    async with asyncio.timeout(2):
        pages = await asyncio.gather(*tails)
    assert [[frame.id for frame in page.frames] for page in pages] == [[outcome.stream_id]] * 3


async def test_hidden_frames_do_not_end_the_wait(engine: Engine) -> None:
    handle = await engine.running()
    tail = await waiting_tail(engine, handle.execution_id, **VISIBLE)
    for number in range(5):
        await append(engine, handle, str(number), mode="best_effort", best_effort=BestEffort())
    await until_blocked(engine.backend)
    assert not tail.done()
    await append(engine, handle, b"seen")
    async with asyncio.timeout(5):
        page = await tail
    assert [frame.payload for frame in page.frames] == [b"seen"]


async def test_a_timeout_among_hidden_frames_moves_on(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    tail = await waiting_tail(engine, handle.execution_id, block_ms=400, **VISIBLE)
    hidden = await append(engine, handle, b"x", mode="best_effort")
    page = await tail
    assert (page.frames, page.next_cursor) == ((), hidden.stream_id)
    page = await backend.streams.tail_stream(handle.execution_id, 0, after=page.next_cursor)
    assert page.frames == ()


async def test_a_waiting_tail_does_not_delay_other_calls(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    tail = await waiting_tail(engine, handle.execution_id, after="99999999999999-0", block_ms=2000)
    slowest = 0.0
    for number in range(20):
        started = time.monotonic()
        await append(engine, handle, str(number))
        await backend.streams.read_stream(handle.execution_id, 0)
        slowest = max(slowest, time.monotonic() - started)
    assert not tail.done()
    assert slowest < 0.5
    await tail


async def test_large_replies_use_no_shared_connection(engine: Engine, valkey: TestServer) -> None:
    """A reader that is slow to take its reply holds up no other call of the client."""
    handle = await engine.running()
    await engine.backend.streams.append_frames(handle, frames(*(bytes(60_000),) * 16))
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        try:
            connected = proxy.connections
            await client.streams.read_stream(handle.execution_id, 0)
            assert proxy.connections == connected + 1
            await client.streams.tail_stream(handle.execution_id, 0, block_ms=100)
            assert proxy.connections == connected + 1
        finally:
            await client.aclose()


async def test_sixty_four_tails_have_their_full_time(valkey: TestServer, engine: Engine) -> None:
    handle = await engine.running()
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        try:

            async def timed() -> float:
                started = time.monotonic()
                page = await client.streams.tail_stream(handle.execution_id, 0, block_ms=1500)
                assert page.frames == ()
                return time.monotonic() - started

            first = await asyncio.gather(*(timed() for _ in range(64)))
            dialled = proxy.accepted
            second = await asyncio.gather(*(timed() for _ in range(64)))
            # Connections of the first round served the second one.
            assert proxy.accepted == dialled
            assert dialled <= 64 + 3
        finally:
            await client.aclose()
    assert min(*first, *second) >= 1.5
    # One after the other, they would take 96 s.
    assert max(*first, *second) < 20


async def test_a_cancelled_tail_spoils_nothing(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    for _ in range(5):
        tail = await waiting_tail(engine, handle.execution_id)
        tail.cancel()
        await asyncio.wait([tail])
        assert tail.cancelled()
        assert backend.stream_pool.held == 0
    await until_blocked(backend, 0)
    outcome = await append(engine, handle, b"x")
    for _ in range(5):
        page = await backend.streams.tail_stream(handle.execution_id, 0, block_ms=1000)
        assert [frame.id for frame in page.frames] == [outcome.stream_id]


async def test_a_tail_continues_after_a_lost_connection(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        try:
            tail = asyncio.ensure_future(
                client.streams.tail_stream(handle.execution_id, 0, block_ms=20_000)
            )
            await until_blocked(engine.backend)
            accepted = proxy.accepted
            proxy.cut()
            while proxy.accepted < accepted + 2:  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.001)
            await append(engine, handle, b"x")
            async with asyncio.timeout(10):
                page = await tail
            assert [frame.payload for frame in page.frames] == [b"x"]
            # A connection that died while nobody used it is not noticed by the next reader.
            proxy.cut()
            assert len((await client.streams.read_stream(handle.execution_id, 0)).frames) == 1
        finally:
            await client.aclose()


async def test_a_lost_library_is_loaded_again(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await append(engine, handle, b"x")
    await backend.streams.read_stream(handle.execution_id, 0)
    await backend.transport.call("FUNCTION", "FLUSH", "SYNC")
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.payload for frame in page.frames] == [b"x"]
