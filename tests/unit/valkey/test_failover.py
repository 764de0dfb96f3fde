"""A primary behind a fixed address is demoted: clients follow it to the new one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connection import dial
from flowfabric.valkey.transport import Transport
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer, free_port
from tests.unit.valkey.conftest import Keeper
from tests.unit.valkey.resp import HELLO, scripted_peer
from tests.unit.valkey.test_connection import failure, until


class Pair:
    """Two servers behind one address; the first one is primary until `fail_over`."""

    def __init__(self) -> None:
        self.servers = [TestServer(port=free_port()), TestServer(port=free_port())]
        self.proxy = FaultProxy(self.servers[0].socket_path)

    async def command(self, server: int, *args: str | int) -> object:
        conn = await dial(parse_url(self.servers[server].url))
        try:
            return await conn.call(*args)
        finally:
            await conn.aclose()

    async def demote(self) -> None:
        await self.command(0, "REPLICAOF", "127.0.0.1", self.servers[1].port)

    def move_address(self) -> None:
        """New connections lead to the second server; the present ones stay where they are."""
        self.proxy._upstream = str(self.servers[1].socket_path)

    def stop(self) -> None:
        self.proxy.stop()
        for server in self.servers:
            server.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.stop()


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[Transport]:
    client = Transport(parse_url(pair.proxy.url))
    await client.wait_ready()
    yield client
    await client.aclose()


async def refused(client: Transport, *args: str | int) -> TransportError:
    """What the server itself answers, without the client's patience."""
    conn = client._link.conn
    assert conn is not None
    return await failure(conn.call(*args))


async def test_a_demoted_server_is_left(pair: Pair, client: Transport) -> None:
    await client.call("SET", "before", 1)
    await pair.demote()
    pair.move_address()
    assert await client.call("SET", "after", 1) == b"OK"
    assert await pair.command(1, "EXISTS", "after") == 1
    assert pair.proxy.accepted == 2


async def test_the_address_may_move_later(pair: Pair, client: Transport) -> None:
    await pair.demote()
    write = asyncio.ensure_future(client.call("SET", "k", 1))
    await until(lambda: pair.proxy.accepted > 1)
    assert not write.done()
    pair.move_address()
    assert await write == b"OK"


async def test_patience_with_a_replica_ends(pair: Pair, client: Transport) -> None:
    await pair.demote()
    error = await failure(client.call("SET", "k", 1, timeout=1))
    assert (error.kind, error.safe_to_repeat) == ("read_only", True)


async def test_blocking_reads_follow(pair: Pair, client: Transport) -> None:
    """A reader on the old primary hears nothing of its demotion, and must not stay there."""
    await pair.demote()
    reader = await client.blocking()
    read = reader.submit(("XREAD", "BLOCK", 0, "STREAMS", "feed", "0"), 30)
    await until(lambda: reader.in_flight)
    pair.move_address()
    assert await client.call("SET", "k", 1) == b"OK"
    assert (await failure(asyncio.wait_for(read, 5))).kind == "transport"
    assert not reader.is_open
    again = await client.blocking()
    await pair.command(1, "XADD", "feed", "*", "a", "b")
    assert await again.call("XREAD", "BLOCK", 5000, "STREAMS", "feed", "0")
    await again.aclose()


async def test_a_refused_pop_ends_its_connection_and_moves_the_client(
    pair: Pair, client: Transport
) -> None:
    """An idle worker only pops: that refusal is all that tells of the failover."""
    bell = await client.blocking()
    pop = bell.submit(("BZPOPMIN", "bell", 0), 30)
    await until(lambda: bell.in_flight)
    await pair.demote()
    # The server ends the waits itself when it is demoted.
    assert (await failure(pop)).kind in {"read_only", "transport"}
    late = await client.blocking()
    pair.move_address()
    assert (await failure(late.call("BZPOPMIN", "bell", 1))).kind == "read_only"
    assert not late.is_open
    await until(lambda: pair.proxy.accepted > 3)
    await until(lambda: client._link._attempt is None)
    assert await client.call("SET", "k", 1) == b"OK"


async def test_a_server_that_stays_a_replica_is_not_hammered(pair: Pair, client: Transport) -> None:
    """And it goes on answering reads while it is dialled again."""
    await client.call("SET", "k", 1)
    await pair.command(0, "REPLICAOF", "127.0.0.1", 1)
    loop = asyncio.get_running_loop()
    end = loop.time() + 1.5
    rounds = 0
    while loop.time() < end:
        assert (await refused(client, "SET", "k", 2)).kind == "read_only"
        assert await client.call("GET", "k") == b"1"
        rounds += 1
    assert 3 <= pair.proxy.accepted <= 12
    # No call waits for a dial.
    assert rounds > 3 * pair.proxy.accepted
    # One that is dialled, one that it replaces.
    assert pair.proxy.connections <= 2


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("READONLY You can't write", "read_only"),
        ("MASTERDOWN Link with MASTER is down", "cluster"),
    ],
)
async def test_calls_under_way_keep_their_answers(keep: Keeper, word: str, kind: str) -> None:
    """What the old connection still owes is not lost when the new one is up."""
    held: list[int] = []
    greetings = 0

    def answer(command: list[bytes]) -> bytes:
        nonlocal greetings
        if command[0] == b"HELLO":
            greetings += 1
            return HELLO
        if command[0] == b"SLOW":
            held.append(greetings)
            return b""
        if command[0] == b"SET":
            return f"-{word}\r\n".encode() if greetings == 1 else b"+OK\r\n"
        # The late answer of the slow call, then this one's.
        return b"+late\r\n" + b"+PONG\r\n"

    async with scripted_peer(answer) as port:
        client = keep(Transport(parse_url(f"valkey://127.0.0.1:{port}")))
        await client._link.acquire(asyncio.get_running_loop().time() + 5)
        old = client._link.conn
        assert old is not None
        assert (await refused(client, "SET", "k", 1)).kind == kind
        slow = asyncio.ensure_future(old.call("SLOW"))
        await until(lambda: held)
        await until(lambda: client._link.conn is not old)
        assert await client.call("SET", "k", 1) == b"OK"
        assert old.is_open
        await asyncio.gather(old.call("PING"), slow)
        assert slow.result() == b"late"
        await until(lambda: not old.is_open)
        assert not client._link._replaced


async def test_closing_while_the_old_connection_still_owes(keep: Keeper) -> None:
    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"HELLO":
            return HELLO
        return b"" if command[0] == b"SLOW" else b"-READONLY You can't write\r\n"

    async with scripted_peer(answer) as port:
        client = Transport(parse_url(f"valkey://127.0.0.1:{port}"))
        await client._link.acquire(asyncio.get_running_loop().time() + 5)
        old = client._link.conn
        assert old is not None
        await refused(client, "SET", "k", 1)
        slow = asyncio.ensure_future(old.call("SLOW"))
        await until(lambda: client._link.conn is not old)
        await client.aclose()
        assert (await failure(slow)).ambiguous
        assert asyncio.all_tasks() == {asyncio.current_task()}
