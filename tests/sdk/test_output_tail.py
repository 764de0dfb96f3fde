"""Following the output of an execution from attempt to attempt, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.client import Client
from flowfabric.sdk.following import Tail
from flowfabric.sdk.sync import SyncClient
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import until, valkey_of
from tests.support.server import TestServer
from tests.support.suspension import Waits

RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 0}}}


@pytest.fixture
async def client(engine: Engine, valkey: TestServer) -> AsyncIterator[Client]:
    async with await Client.connect(valkey.url) as connected:
        yield connected


class Reader:
    """A tail that is read in the background."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.seen: list[str] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for frame in self.tail:
            self.seen.append(f"{self.tail.attempt}:{frame.payload.decode()}")

    async def saw(self, *expected: str) -> None:
        await until(lambda: self._task.done() or len(self.seen) >= len(expected), str(expected))
        assert self.seen == list(expected)
        assert not self._task.done()

    async def ended(self) -> list[str]:
        async with asyncio.timeout(10):
            await self._task
        return self.seen


async def write(engine: Engine, handle: Handle, text: str, mode: str = "durable") -> None:
    frame = Frame(payload=text.encode())
    await engine.backend.streams.append_frame(handle, frame, mode=mode)  # pyright: ignore[reportArgumentType]


async def retried(engine: Engine, handle: Handle) -> Handle:
    """Fail an attempt and claim the next one."""
    await engine.backend.executions.fail(handle, "again", "transient")
    await engine.backend.upkeep.promote_delayed(
        handle.execution_id.tag, "default", [handle.execution_id]
    )
    return (await engine.claim()).handle


async def test_follows_retries_reclaims_and_resumes_to_the_end(
    client: Client, engine: Engine
) -> None:
    waits = await Waits.open(engine)
    execution_id = await engine.create(policy=RETRY)
    reader = Reader(client.tail(execution_id))
    handle = (await engine.claim()).handle
    await write(engine, handle, "first")
    await reader.saw("1:first")
    handle = await retried(engine, handle)
    await write(engine, handle, "retried")
    await reader.saw("1:first", "2:retried")
    parked = await waits.park(handle=handle)
    await waits.send(parked)
    handle = (await engine.claim()).handle
    await write(engine, handle, "resumed")
    await reader.saw("1:first", "2:retried", "2:resumed")
    await engine.backend.leases.revoke_lease(execution_id)
    handle = (await engine.claim()).handle
    assert handle.attempt_index == 2
    # This one writes nothing, and the next one does.
    handle = await retried(engine, handle)
    await write(engine, handle, "last")
    await engine.backend.executions.complete(handle)
    seen = await reader.ended()
    assert seen == ["1:first", "2:retried", "2:resumed", "4:last"]
    assert (reader.tail.attempt, reader.tail.closed_reason) == (4, "attempt_success")


async def test_where_to_begin(client: Client, engine: Engine) -> None:
    await engine.create(policy=RETRY)
    handle = (await engine.claim()).handle
    execution_id = handle.execution_id
    for text in ("a", "b", "c"):
        await write(engine, handle, text)
    handle = await retried(engine, handle)
    await write(engine, handle, "d")
    await write(engine, handle, "e", "best_effort")
    await engine.backend.executions.complete(handle)

    async def all_of(tail: Tail) -> list[str]:
        return await Reader(tail).ended()

    assert await all_of(client.tail(execution_id)) == ["2:d", "2:e"]
    assert await all_of(client.tail(execution_id, 1)) == ["1:a", "1:b", "1:c", "2:d", "2:e"]
    assert await all_of(client.tail(execution_id, 1, follow_attempts=False)) == [
        "1:a",
        "1:b",
        "1:c",
    ]
    tail = client.tail(execution_id, 1, visibility="exclude_best_effort")
    assert (await anext(tail)).payload == b"a"
    middle = tail.position
    # The position belongs to the first attempt only.
    assert await all_of(client.tail(execution_id, 1, after=middle)) == ["1:b", "1:c", "2:d", "2:e"]
    assert await all_of(tail) == ["1:b", "1:c", "2:d"]
    with pytest.raises(StopAsyncIteration):
        await anext(tail)
    for bad in ("newest", 0, True):
        with pytest.raises(ValidationError, match="must be 'latest' or a number from 1"):
            client.tail(execution_id, bad)  # pyright: ignore[reportArgumentType]


async def test_an_attempt_that_never_comes(client: Client, engine: Engine) -> None:
    """Cancelled before the first claim, between attempts, and before anybody followed."""
    waiting = await engine.create(policy=RETRY)
    reader = Reader(client.tail(waiting))
    await until(lambda: valkey_of(client).stream_pool.held == 1, "the tail")
    await client.cancel(waiting)
    assert await reader.ended() == []
    assert await Reader(client.tail(waiting)).ended() == []

    handle = await engine.running(policy=RETRY)
    await write(engine, handle, "only")
    between = Reader(client.tail(handle.execution_id))
    await between.saw("1:only")
    await engine.backend.executions.fail(handle, "again", "transient")
    await until(lambda: between.tail.attempt == 2, "the wait for the retry")
    await client.cancel(handle.execution_id)
    assert await between.ended() == ["1:only"]


async def test_an_unknown_execution(client: Client, engine: Engine) -> None:
    with pytest.raises(NotFoundError, match="execution_not_found"):
        await anext(client.tail(engine.new_id()))


async def test_continues_after_a_lost_connection(
    engine: Engine, valkey: TestServer, proxy: FaultProxy
) -> None:
    async with await Client.connect(proxy.url) as client:
        execution_id = await engine.create()
        reader = Reader(client.tail(execution_id))
        await until(lambda: valkey_of(client).stream_pool.held == 1, "the tail")
        proxy.cut()
        handle = (await engine.claim()).handle
        await write(engine, handle, "one")
        await reader.saw("1:one")
        proxy.cut()
        await write(engine, handle, "two")
        await engine.backend.executions.complete(handle)
        assert await reader.ended() == ["1:one", "1:two"]


async def test_a_reader_that_goes_away_frees_everything(client: Client, engine: Engine) -> None:
    for execution_id in (await engine.create(), (await engine.running()).execution_id):
        waiting = asyncio.ensure_future(anext(client.tail(execution_id)))
        await until(lambda: valkey_of(client).stream_pool.held == 1, "the tail")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert valkey_of(client).stream_pool.held == 0


async def test_plain_code_iterates(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    await write(engine, handle, "one")

    def read(execution_id: ExecutionId) -> list[bytes]:
        with SyncClient.connect(valkey.url) as client:
            frames = client.tail(execution_id)
            first = next(frames)
            page = client.read_stream(execution_id, 0, from_=first.id, to=first.id)
            return [first.payload, *(one.payload for one in (*frames, *page.frames))]

    reading = asyncio.create_task(asyncio.to_thread(read, handle.execution_id))
    await write(engine, handle, "two")
    await engine.backend.executions.complete(handle)
    assert await reading == [b"one", b"two", b"one"]
