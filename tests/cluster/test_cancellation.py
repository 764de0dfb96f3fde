"""Cancelling a caller at any await leaves the client usable and leaks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import ClusterTransport, slot_of
from flowfabric.valkey.connection import Connection
from flowfabric.valkey.transport import Transport
from tests.support.cluster import TestCluster, until

NAME = "cancelled"


async def at_every_await(
    begin: Callable[[], Awaitable[Callable[[], Coroutine[Any, Any, Any]]]],
    check: Callable[[], Awaitable[None]],
) -> None:
    """Cancel after 1, 2, 3, … turns of the loop, until a run is over before it is cancelled."""
    turns = 1
    while True:
        work = await begin()
        task = asyncio.ensure_future(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            result = await task
            if isinstance(result, Connection):
                await result.aclose()
        await check()
        if finished:
            assert turns > 1
            return
        turns += 1


async def alone() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
async def client(cluster: TestCluster) -> AsyncIterator[ClusterTransport]:
    client = ClusterTransport(parse_url(cluster.url), name=NAME)
    await client.wait_ready()
    await client.call_all_primaries("FLUSHALL")
    yield client
    await client.aclose()
    await until(alone)
    await until(lambda: nobody(cluster))


async def nobody(cluster: TestCluster) -> bool:
    """No connection of the client is open."""
    lists = [await cluster.call(n, "CLIENT", "LIST") for n in range(len(cluster.nodes))]
    return not any(f"name={NAME} ".encode() in each for each in lists)


async def test_while_a_slot_has_moved(client: ClusterTransport, cluster: TestCluster) -> None:
    tag = "{moved}"
    right = client._routes[slot_of(tag)]
    wrong = next(link for link in client._links.values() if link is not right)
    count = 0

    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        client._routes[slot_of(tag)] = wrong
        return lambda: client.call("INCR", tag)

    async def check() -> None:
        nonlocal count
        echoes = await asyncio.gather(*(client.call("GET", f"{tag}:{n}") for n in range(3)))
        assert echoes == [b"0", b"1", b"2"]
        # Each cancelled call ran once or not at all.
        now = int(await client.call("GET", tag) or 0)
        assert now - count in {0, 1}
        count = now

    await client.call("MSET", *(part for n in range(3) for part in (f"{tag}:{n}", n)))
    await at_every_await(begin, check)
    assert count
    assert client._routes[slot_of(tag)] is right


async def test_while_a_slot_is_moving(client: ClusterTransport, cluster: TestCluster) -> None:
    """An ASKING of a cancelled call must not open the door to a call that has none."""
    slot = slot_of("{asked}")
    home = cluster.owner(slot)
    target = (home + 1) % 3
    await client.call("SET", "{asked}:old", "at home")
    await cluster.begin_move(slot, home, target)
    count = 0

    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        return lambda: client.call("INCR", "{asked}:new")

    async def check() -> None:
        nonlocal count
        assert await client.call("GET", "{asked}:old") == b"at home"
        now = int(await client.call("GET", "{asked}:new") or 0)
        assert now - count in {0, 1}
        count = now

    try:
        await at_every_await(begin, check)
        assert count
        assert await cluster.call(target, "CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        assert await cluster.call(home, "CLUSTER", "COUNTKEYSINSLOT", slot) == 1
    finally:
        await cluster.end_move(slot, target)
        await cluster.move(slot, target, home)


async def test_while_the_map_is_read(cluster: TestCluster) -> None:
    """The first call of a client learns the map, and others may wait for the same."""
    client = ClusterTransport(parse_url(cluster.url), name=NAME)
    await client.call("SET", "{a}", "value")
    await client.aclose()

    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        nonlocal client
        client = ClusterTransport(parse_url(cluster.url), name=NAME)
        return lambda: client.call("GET", "{a}")

    async def check() -> None:
        first, second = await asyncio.gather(client.call("GET", "{a}"), client.call("GET", "{b}"))
        assert (first, second) == (b"value", None)
        await client.aclose()
        await until(alone)

    await at_every_await(begin, check)
    await until(lambda: nobody(cluster))


async def test_while_the_map_is_read_again(client: ClusterTransport) -> None:
    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        return client.primaries

    async def check() -> None:
        assert all(client._routes)
        assert len(await client.primaries()) == 3

    await at_every_await(begin, check)


async def test_while_a_connection_of_its_own_is_opened(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        return lambda: client.blocking("{a}")

    async def check() -> None:
        assert await client.call("PING") == b"PONG"

    await at_every_await(begin, check)
    assert not any(link._dedicated for link in client._links.values())

    async def only_the_shared_ones() -> bool:
        lists = [await cluster.call(n, "CLIENT", "LIST") for n in range(3)]
        return sum(each.count(f"name={NAME} ".encode()) for each in lists) == 3

    await until(only_the_shared_ones)


@pytest.mark.parametrize("busy", [False, True])
async def test_while_it_is_closed(cluster: TestCluster, busy: bool) -> None:
    """Cancelled or not, a closed client is closed: nobody calls again."""
    client = ClusterTransport(parse_url(cluster.url), name=NAME)
    pending: asyncio.Future[Any] | None = None

    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        nonlocal client, pending
        client = ClusterTransport(parse_url(cluster.url), name=NAME)
        if busy:
            await client.wait_ready()
            pending = asyncio.ensure_future(client.call("BLPOP", "{never}", 0))
        else:
            # In the middle of learning the map.
            pending = asyncio.ensure_future(client.call("GET", "{a}"))
        await asyncio.sleep(0)
        return client.aclose

    async def check() -> None:
        assert pending is not None
        with suppress(TransportError, asyncio.CancelledError):
            await pending
        with pytest.raises(TransportError, match="closed"):
            await client.call("PING")
        await until(alone)

    await at_every_await(begin, check)
    await until(lambda: nobody(cluster))


@pytest.mark.parametrize("busy", [False, True])
async def test_while_the_client_of_one_server_is_closed(cluster: TestCluster, busy: bool) -> None:
    address = parse_url(cluster.nodes[0].url)
    client = Transport(address, name=NAME)
    pending: asyncio.Future[Any] | None = None

    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        nonlocal client, pending
        client = Transport(address, name=NAME)
        if busy:
            await client.wait_ready()
        pending = asyncio.ensure_future(client.call("PING"))
        await asyncio.sleep(0)
        return client.aclose

    async def check() -> None:
        assert pending is not None
        with suppress(TransportError, asyncio.CancelledError):
            await pending
        with pytest.raises(TransportError, match="closed"):
            await client.call("PING")
        await until(alone)

    await at_every_await(begin, check)
    await until(lambda: nobody(cluster))


async def test_while_one_server_opens_a_connection_of_its_own(cluster: TestCluster) -> None:
    client = Transport(parse_url(cluster.nodes[0].url), name=NAME)

    async def begin() -> Callable[[], Coroutine[Any, Any, Any]]:
        return client.blocking

    async def check() -> None:
        assert await client.call("PING") == b"PONG"

    await at_every_await(begin, check)
    assert not client._link._dedicated
    await client.aclose()
    await until(lambda: nobody(cluster))
