"""Calls reach the primary that serves their tag, also while slots move."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.errors import TransportError
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import ClusterTransport, slot_of
from flowfabric.valkey.connect import check_server, connect
from tests.support.cluster import TestCluster, until
from tests.support.server import free_port

LIBRARY = """#!lua name=probe
server.register_function('probe', function(keys, args)
  server.call('SET', keys[1] .. ':undeclared', args[1])
  return server.call('GET', keys[1] .. ':undeclared')
end)"""


async def failure(awaitable: Any) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await awaitable
    return caught.value


@pytest.mark.parametrize(
    ("key", "same_as"),
    [
        ("{fp:42}", "fp:42"),
        ("ff:{fp:42}:core", "fp:42"),
        ("{a}{b}", "a"),
        ("{}x", "{}x"),
        ("{x", "{x"),
        ("a{{b}}", "{b"),
        (b"{\xff}", b"\xff"),
    ],
)
def test_hash_tags(key: str | bytes, same_as: str | bytes) -> None:
    assert slot_of(key) == slot_of(same_as)


async def test_the_slot_is_the_servers_slot(cluster: TestCluster) -> None:
    for key in ("{fp:0}", "{fp:255}", "plain", "{}", "{}{x}", "{b:31}:x", "ü"):
        assert await cluster.call(0, "CLUSTER", "KEYSLOT", key) == slot_of(key)


async def test_functions_run_where_their_tag_lives(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    loaded = await client.call_all_primaries("FUNCTION", "LOAD", "REPLACE", LIBRARY)
    assert set(loaded.values()) == {b"probe"}
    before = await cluster.moved_errors()
    tags = [f"{{fp:{n}}}" for n in range(64)]
    calls = (client.fcall("probe", tag, (tag,)) for tag in tags)
    assert await asyncio.gather(*calls) == [tag.encode() for tag in tags]
    assert {cluster.owner(slot_of(tag)) for tag in tags} == {0, 1, 2}
    for tag in tags:
        key = f"{tag}:undeclared"
        assert await cluster.call(cluster.owner(slot_of(tag)), "EXISTS", key) == 1
    assert await cluster.moved_errors() == before


async def test_plain_commands_are_routed_by_their_key(client: ClusterTransport) -> None:
    for n in range(20):
        assert await client.call("SET", f"k{n}", n) == b"OK"
        assert await client.call("GET", f"k{n}") == str(n).encode()
    assert await client.call("OBJECT", "ENCODING", "k3", key="k3") == b"int"
    assert await client.call("PING") == b"PONG"


async def test_the_whole_deployment(client: ClusterTransport, cluster: TestCluster) -> None:
    names = {f"127.0.0.1:{node.port}" for node in cluster.nodes}
    assert set(await client.call_all_primaries("PING")) == names
    assert set(await client.call_all_nodes("PING")) == names
    assert set(client._nodes) == {("127.0.0.1", node.port) for node in cluster.nodes}
    assert client.is_cluster
    assert await check_server(client) >= (8, 0)


async def test_dead_seeds_are_passed_over(cluster: TestCluster) -> None:
    live = cluster.nodes[2].port
    transport = await connect(
        parse_url(f"valkey+cluster://127.0.0.1:{free_port()},127.0.0.1:{live}")
    )
    assert await transport.call("SET", "k", "v") == b"OK"
    await transport.aclose()
    dead = ClusterTransport(parse_url(f"valkey+cluster://127.0.0.1:{free_port()}"))
    error = await failure(dead.call("PING", timeout=0.2))
    assert (error.kind, error.ambiguous) == ("cluster", False)
    assert "refused" in error.message.lower()
    await dead.aclose()
    assert "closed" in (await failure(dead.call("PING"))).message


async def test_a_moved_slot_is_learnt_once(client: ClusterTransport, cluster: TestCluster) -> None:
    slot = slot_of("{moved}")
    home = cluster.owner(slot)
    target = (home + 1) % 3
    try:
        await client.call("SET", "{moved}", "here")
        await cluster.move(slot, home, target)
        before = await cluster.moved_errors()
        assert await client.call("GET", "{moved}") == b"here"
        assert await cluster.moved_errors() == before + 1
        for _ in range(5):
            assert await client.call("GET", "{moved}") == b"here"
        assert await cluster.moved_errors() == before + 1
        assert await cluster.call(target, "EXISTS", "{moved}") == 1
    finally:
        await cluster.move(slot, target, home)


async def test_ask_is_followed_for_the_call_only(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    slot = slot_of("{asked}")
    home = cluster.owner(slot)
    target = (home + 1) % 3
    await client.call("SET", "{asked}:old", "at home")
    await cluster.begin_move(slot, home, target)
    try:
        calls = [client.call("SET", f"{{asked}}:{n}", n) for n in range(50)]
        assert await asyncio.gather(*calls) == [b"OK"] * 50
        assert await client.call("GET", "{asked}:7") == b"7"
        # A key that has not moved is still served by its old home, without ASK.
        assert await client.call("GET", "{asked}:old") == b"at home"
        assert await cluster.call(target, "CLUSTER", "COUNTKEYSINSLOT", slot) == 50
        assert await cluster.call(home, "CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        abandoned = [
            asyncio.ensure_future(client.call("INCR", f"{{asked}}:{n}")) for n in range(20)
        ]
        await asyncio.sleep(0)
        for call in abandoned:
            call.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        assert await client.call("GET", "{asked}:old") == b"at home"
    finally:
        await cluster.end_move(slot, target)
        assert await client.call("GET", "{asked}:old") == b"at home"
        await cluster.move(slot, target, home)


async def test_tryagain_waits_until_the_keys_are_together(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    slot = slot_of("{split}")
    home = cluster.owner(slot)
    target = (home + 1) % 3
    await client.call("MSET", "{split}:a", 1, "{split}:b", 2)
    await cluster.begin_move(slot, home, target)
    try:
        port = cluster.nodes[target].port
        await cluster.call(home, "MIGRATE", "127.0.0.1", port, "{split}:a", 0, 1000)
        error = await failure(client.call("MGET", "{split}:a", "{split}:b", timeout=0.2))
        assert (error.kind, error.ambiguous) == ("cluster", False)
        assert "TRYAGAIN" in error.message
        waiting = asyncio.ensure_future(client.call("MGET", "{split}:a", "{split}:b"))
        await asyncio.sleep(0)
        await cluster.end_move(slot, target)
        assert await waiting == [b"1", b"2"]
    finally:
        await cluster.move(slot, target, home)


async def test_keys_of_two_slots_are_refused(client: ClusterTransport) -> None:
    error = await failure(client.call("MGET", "{a}", "{b}"))
    assert error.kind == "protocol"


async def test_a_blocking_connection_goes_to_the_tags_primary(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    heard: asyncio.Queue[list[Any]] = asyncio.Queue()
    for tag in ("{fp:1}", "{fp:2}", "{fp:3}", "{fp:4}"):
        conn = await client.blocking(tag)
        read = conn.submit(("BLPOP", f"{tag}:queue", 5), 5.5)
        await client.call("RPUSH", f"{tag}:queue", "item")
        assert await read == [f"{tag}:queue".encode(), b"item"]
        await conn.aclose()
        bell = await client.blocking(tag, on_push=heard.put_nowait)
        await bell.call("SSUBSCRIBE", f"{tag}:bell")
        await client.call("SPUBLISH", f"{tag}:bell", "ding")
        assert (await heard.get())[2] == b"ding"
        await bell.aclose()
    anywhere = await client.blocking()
    assert await anywhere.call("PING") == b"PONG"
    await anywhere.aclose()


async def test_a_lost_connection_is_ambiguous_unless_replay_safe(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    node = cluster.owner(slot_of("{lost}"))

    async def cut_while_blocked() -> None:
        async def blocked() -> bool:
            return b"blocked_clients:1" in await cluster.call(node, "INFO", "clients")

        await until(blocked)
        await cluster.call(node, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    call = asyncio.ensure_future(client.call("BLPOP", "{lost}", 0))
    await cut_while_blocked()
    error = await failure(call)
    assert (error.kind, error.ambiguous) == ("transport", True)
    call = asyncio.ensure_future(client.call("BLPOP", "{lost}", 0, replay_safe=True))
    await cut_while_blocked()
    await cluster.call(node, "RPUSH", "{lost}", "found")
    assert await call == [b"{lost}", b"found"]


async def test_closing_leaves_nothing_running(cluster: TestCluster) -> None:
    client = ClusterTransport(parse_url(cluster.url))
    await client.wait_ready()
    pending = asyncio.ensure_future(client.call("BLPOP", "{never}", 0))
    await asyncio.sleep(0)
    await client.aclose()
    assert (await failure(pending)).kind == "transport"
    assert (await failure(client.blocking("{x}"))).kind == "transport"
    await client.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
