"""Followers and writers: a stream from its first to its last frame, over lost connections."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.streams import FrameWriter
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.stream_pool import StreamPool
from flowfabric.valkey.address import parse_url
from tests.conformance.test_stream_follow import collect
from tests.support.engine import TTL, Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.storage import lossy, until_blocked, use_pool, waiting_tail
from tests.support.streams import append, frames, payloads

# --- following ----------------------------------------------------------------------------------


async def test_from_the_first_frame_to_the_close(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await append(engine, handle, b"0")
    follower = backend.streams.follow_stream(handle.execution_id, 0)
    reading = asyncio.ensure_future(collect(follower))
    await until_blocked(backend)
    for number in range(1, 30):
        await append(engine, handle, str(number))
    await backend.executions.complete(handle)
    async with asyncio.timeout(5):
        assert await reading == [b"%d" % n for n in range(30)]
    assert follower.closed_reason == "attempt_success"
    assert follower.closed_at is not None
    assert not follower.truncated
    newest = await backend.streams.read_stream(handle.execution_id, 0, from_="end")
    assert follower.position == newest.frames[0].id


async def test_a_silent_attempt_ends_too(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    reading = asyncio.ensure_future(collect(backend.streams.follow_stream(handle.execution_id, 0)))
    await until_blocked(backend)
    await engine.advance(TTL)
    await backend.upkeep.mark_lease_expired_if_due(handle.execution_id.tag, [handle.execution_id])
    async with asyncio.timeout(5):
        assert await reading == []


async def test_cuts_lose_and_repeat_nothing(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        try:
            follower = client.streams.follow_stream(handle.execution_id, 0)
            reading = asyncio.ensure_future(collect(follower))
            for number in range(40):
                await append(engine, handle, str(number))
                if number % 8 == 3:
                    await until_blocked(engine.backend)
                    proxy.cut()
                if number == 20:
                    proxy.down()
                    await append(engine, handle, b"in the dark")
                    proxy.up()
            await engine.backend.executions.complete(handle)
            async with asyncio.timeout(30):
                found = await reading
        finally:
            await client.aclose()
    expected = [b"%d" % n for n in range(40)]
    expected.insert(21, b"in the dark")
    assert found == expected
    assert follower.closed_reason == "attempt_success"


async def test_a_full_pool_is_waited_for(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await use_pool(backend, StreamPool(backend.transport, 1))
    other = await engine.running()
    tail = await waiting_tail(engine, other.execution_id)
    reading = asyncio.ensure_future(collect(backend.streams.follow_stream(handle.execution_id, 0)))
    await append(engine, handle, b"x")
    await backend.executions.complete(handle)
    await backend.executions.complete(other)
    await tail
    async with asyncio.timeout(5):
        assert await reading == [b"x"]


async def test_a_closed_client_ends_its_followers(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, _):
        reading = asyncio.ensure_future(
            collect(client.streams.follow_stream(handle.execution_id, 0))
        )
        await until_blocked(engine.backend)
    with pytest.raises(EngineError) as caught:
        async with asyncio.timeout(10):
            await reading
    assert caught.value.code in {"unavailable", "transport"}


async def test_lost_replies_write_nothing_twice(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        writer = FrameWriter(client.streams, handle)
        for number in range(20):
            if number % 10 == 0:
                proxy.drop_next_reply(b"ff_append")
            if number % 10 == 5:
                proxy.drop_next_request(b"ff_append")
            await writer.write(Frame(payload=b"%d" % number))
            if number % 5 == 4:
                await writer.flush()
        await writer.flush()
        assert proxy.dropped == 4
    assert await payloads(engine, handle) == [b"%d" % n for n in range(20)]


async def test_a_transient_fault_is_logged_once(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(
            parse_url(proxy.url),
            prepare_with=PartitionCounts(),
            request_timeout=0.3,
        )
        try:
            writer = FrameWriter(client.streams, handle)
            proxy.down()
            await writer.write(frames("lost")[0])
            with pytest.raises(TransportError):
                await writer.flush()
            proxy.up()
            await client.transport.wait_ready(10)
            await writer.write(frames("kept")[0])
            await writer.flush()
        finally:
            await client.aclose()
    assert await payloads(engine, handle) == [b"kept"]
