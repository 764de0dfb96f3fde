"""A client that follows leases: over outages, on a cluster, without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.core.errors import EngineError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.events import (
    CompletionEvent,
    Event,
    EventFilter,
    LeaseEvent,
    Subscription,
    WorkerEvent,
)
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.sdk.sync import SyncClient
from flowfabric.valkey.address import parse_url
from tests.support.cluster import TestCluster
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import until
from tests.support.server import TestServer


async def take(feed: Subscription[LeaseEvent], count: int) -> list[LeaseEvent]:
    found: list[LeaseEvent] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            event = await anext(feed)
            assert isinstance(event, LeaseEvent), event
            found.append(event)
    return found


async def blocked(backend: ValkeyBackend) -> bool:
    info: Any = await backend.transport.call("INFO", "clients")
    return b"blocked_clients:0" not in info


async def quiet(backend: ValkeyBackend) -> bool:
    return not await blocked(backend)


async def test_an_outage_is_passed_over_without_loss_or_repetition(
    engine: Engine, valkey: TestServer
) -> None:
    with FaultProxy(valkey.socket_path) as proxy:
        other = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=2.0)
        async with Client(other) as client, await client.subscribe_lease_history() as feed:
            first = await engine.running(lane="alpha")
            assert [event.execution_id for event in await take(feed, 1)] == [first.execution_id]
            waiting = asyncio.create_task(take(feed, 3))
            await until(lambda: blocked(engine.backend), "the blocking read")
            proxy.down()
            await engine.backend.executions.complete(first)
            second = await engine.running(lane="beta")
            proxy.up()
            await engine.backend.executions.complete(second)
            events = await waiting
            told = {(event.execution_id, event.type) for event in events}
            assert told == {
                (first.execution_id, "released"),
                (second.execution_id, "acquired"),
                (second.execution_id, "released"),
            }
            kept = feed.cursor
    third = await engine.running()
    async with (
        await Client.connect(valkey.url) as client,
        await client.subscribe_lease_history(kept) as feed,
    ):
        assert [event.execution_id for event in await take(feed, 1)] == [third.execution_id]


async def test_what_cannot_get_better_is_raised(engine: Engine) -> None:
    client = Client(engine.backend)
    with pytest.raises(EngineError) as caught:
        await client.subscribe_lease_history("no cursor")
    assert caught.value.code == "invalid_cursor"


async def test_closing_ends_a_wait(engine: Engine) -> None:
    feed = await Client(engine.backend).subscribe_lease_history()
    waiting = asyncio.create_task(take(feed, 1))
    await until(lambda: blocked(engine.backend), "the blocking read")
    await feed.aclose()
    with pytest.raises((StopAsyncIteration, RuntimeError, EngineError)):
        await waiting
    assert [event async for event in feed] == []


async def test_closing_the_client_ends_what_it_follows(engine: Engine, valkey: TestServer) -> None:
    client = await Client.connect(valkey.url)
    feed = await client.subscribe_lease_history()
    waiting = asyncio.create_task(take(feed, 1))
    await until(lambda: blocked(engine.backend), "the blocking read")
    await client.aclose()
    with pytest.raises(EngineError):
        async with asyncio.timeout(5):
            await waiting
    await until(lambda: quiet(engine.backend), "the end of the read")
    assert client.backend.events._open == set()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


async def test_ordinary_code_follows_too(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running(namespace="mine")
    await engine.backend.executions.complete(handle)

    def use() -> list[str]:
        with SyncClient.connect(valkey.url) as client:
            mine = EventFilter(namespace="mine")
            with client.subscribe_lease_history("start", where=mine) as events:
                found = [next(events)]
                kept = events.cursor
            assert list(events) == []
            with client.subscribe_lease_history(kept, where=mine) as again:
                for event in again:
                    found.append(event)
                    break
        # The client has closed it before us.
        again.close()
        return [event.type for event in found if isinstance(event, LeaseEvent)]

    assert await asyncio.to_thread(use) == ["acquired", "released"]


async def test_ordinary_code_shares_a_group(engine: Engine, valkey: TestServer) -> None:
    handles = [await engine.running(lane="alpha") for _ in range(2)]
    for handle in handles:
        await engine.backend.executions.complete(handle)

    def use() -> list[str]:
        found: list[str] = []
        with SyncClient.connect(valkey.url) as client:
            for _ in range(2):
                with client.subscribe_completion("start", group="g") as events:
                    event = next(events)
                    assert isinstance(event, CompletionEvent)
                    events.ack(event.event_id)
                    found.append(event.execution_id)
        return found

    assert await asyncio.to_thread(use) == [handle.execution_id for handle in handles]


async def test_a_member_of_a_group_keeps_its_feeds_over_an_outage(
    engine: Engine, valkey: TestServer
) -> None:
    with FaultProxy(valkey.socket_path) as proxy:
        other = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=2.0)
        async with Client(other) as client, await client.subscribe_completion(group="g") as feed:
            first = await engine.running()
            waiting = asyncio.create_task(anext(feed))
            await until(lambda: blocked(engine.backend), "the blocking read")
            proxy.down()
            await engine.backend.executions.complete(first)
            proxy.up()
            # Another member would have to wait until the leases have expired.
            async with asyncio.timeout(10):
                event = await waiting
            assert isinstance(event, CompletionEvent)
            assert event.execution_id == first.execution_id
            await feed.ack(event.event_id)


async def test_every_subscription_of_a_client(engine: Engine) -> None:
    client = Client(engine.backend)
    feeds = (
        await client.subscribe(["signal", "operator"]),
        await client.subscribe_signal_delivery(),
        await client.subscribe_operator_events(),
        await client.subscribe_worker_events("mine"),
    )
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["l"], namespace="mine"
    )
    await client.cancel(await engine.create())
    async with asyncio.timeout(10):
        for feed in (feeds[0], feeds[2]):
            event = await anext(feed)
            assert isinstance(event, Event)
            assert event.type == "completion"
        worker = await anext(feeds[3])
    assert isinstance(worker, WorkerEvent)
    assert (worker.namespace, worker.type) == ("mine", "worker_registered")
    for feed in feeds:
        await feed.aclose()


async def test_ordinary_code_ends_the_wait_of_another_thread(
    engine: Engine, valkey: TestServer
) -> None:
    client = await asyncio.to_thread(SyncClient.connect, valkey.url)
    events = await asyncio.to_thread(client.subscribe_lease_history)
    following = asyncio.create_task(asyncio.to_thread(list, events))
    await until(lambda: blocked(engine.backend), "the blocking read")
    await asyncio.to_thread(events.close)
    async with asyncio.timeout(10):
        assert await following == []
    await until(lambda: quiet(engine.backend), "the end of the read")
    await asyncio.to_thread(client.close)


async def test_ordinary_code_is_told_again_what_is_wrong(
    engine: Engine, valkey: TestServer
) -> None:
    """An error does not look like the end of the history the next time."""
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    where = [handle.execution_id.partition]

    def use() -> None:
        with SyncClient.connect(valkey.url) as client:
            with client.subscribe_lease_history("start", partitions=where) as events:
                next(events)
                kept = events.cursor
            trimmed = client.subscribe_lease_history(kept, partitions=where)
            asyncio.run_coroutine_threadsafe(trim(), loop).result(10)
            with trimmed:
                for _ in range(2):
                    with pytest.raises(EngineError, match="cursor_expired"):
                        next(trimmed)

    async def trim() -> None:
        await engine.backend.upkeep.trim_events(handle.execution_id.tag, 2**53)

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(use)


# --- a cluster ----------------------------------------------------------------------------------


@pytest.fixture
async def clustered(cluster: TestCluster) -> AsyncIterator[Engine]:
    backend = await ValkeyBackend.connect(parse_url(cluster.url), prepare_with=PartitionCounts())
    await backend.transport.call_all_primaries("FLUSHALL")
    await backend.meta.prepare()
    yield Engine(backend)
    await backend.aclose()


async def test_all_nodes_of_a_cluster_are_followed(clustered: Engine) -> None:
    lanes = [f"lane-{n}" for n in range(12)]
    async with await Client(clustered.backend).subscribe_lease_history() as feed:
        handles = [await clustered.running(lane=lane) for lane in lanes]
        events = await take(feed, 6)
        kept = events[-1].cursor
        seen = {event.execution_id for event in events}
    async with await Client(clustered.backend).subscribe_lease_history(kept) as feed:
        rest = {event.execution_id for event in await take(feed, 6)}
    assert seen | rest == {handle.execution_id for handle in handles}
    assert not seen & rest


async def test_a_group_on_a_cluster(clustered: Engine) -> None:
    """Partitions that come into use later are shared as well."""
    client = Client(clustered.backend)
    found: set[str] = set()
    async with await client.subscribe_completion(group="g") as feed, asyncio.timeout(20):
        handles = [await clustered.running(lane=f"lane-{n}") for n in range(6)]
        for handle in handles:
            await clustered.backend.executions.complete(handle)
        while len(found) < len(handles):
            event = await anext(feed)
            assert isinstance(event, CompletionEvent)
            await feed.ack(event.event_id)
            found.add(event.execution_id)
    assert found == {handle.execution_id for handle in handles}


async def test_expired_leases_of_a_cluster(clustered: Engine) -> None:
    handles = [await clustered.running(lane=f"lane-{n}") for n in range(6)]
    await clustered.advance(40_000)
    # The test clock is set on one node; the time is given instead.
    page = await clustered.backend.leases.list_expired_leases(2**50)
    assert {entry.execution_id for entry in page.entries} == {h.execution_id for h in handles}
