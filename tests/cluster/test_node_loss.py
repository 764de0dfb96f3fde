"""A primary that dies and comes back, and one whose replica takes over."""

from __future__ import annotations

import asyncio

from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import ClusterTransport, slot_of
from tests.cluster.test_routing import failure
from tests.support.cluster import TestCluster, until


def tag_on(cluster: TestCluster, node: int) -> str:
    return next(tag for n in range(100) if cluster.owner(slot_of(tag := f"{{fp:{n}}}")) == node)


async def test_a_killed_primary_takes_the_cluster_down_and_back(
    client: ClusterTransport, cluster: TestCluster
) -> None:
    dead, alive = tag_on(cluster, 2), tag_on(cluster, 0)
    await client.call("SET", dead, 1)
    await client.call("SET", alive, 1)
    cluster.nodes[2].kill()
    try:
        gone = await failure(client.call("GET", dead, timeout=0.3))
        assert not gone.ambiguous or gone.kind == "transport"

        async def down() -> bool:
            return b"cluster_state:fail" in await cluster.call(0, "CLUSTER", "INFO")

        await until(down)
        # The other nodes refuse all slots; the call waits for the cluster to its deadline.
        error = await failure(client.call("GET", alive, timeout=0.3))
        assert (error.kind, error.ambiguous) == ("cluster", False)
        assert "CLUSTERDOWN" in error.message
        error = await failure(client.call("GET", dead, timeout=0.3))
        assert (error.safe_to_repeat, error.ambiguous) == (True, False)
        waiting = [
            asyncio.ensure_future(client.call("SET", tag, 2, timeout=30)) for tag in (dead, alive)
        ]
    finally:
        await asyncio.to_thread(cluster.nodes[2].start)
    assert await asyncio.gather(*waiting) == [b"OK", b"OK"]
    await cluster.agree(3)


async def test_a_reshard_target_that_left_is_dialled_no_more() -> None:
    """Its slot never arrived, so no map ever had it; the calls under ASK have dialled it."""
    cluster = TestCluster()
    client = ClusterTransport(parse_url(cluster.url))
    try:
        await cluster.form()
        await client.wait_ready()
        target = cluster.add()
        await cluster.introduce(target)
        await cluster.agree(4)
        slot = slot_of("{asked}")
        home = cluster.owner(slot)
        await cluster.begin_move(slot, home, target)
        assert await client.call("SET", "{asked}:new", 1) == b"OK"
        assert len(client._ask_links) == 1
        # A map that comes while the slot still moves does not stop it either.
        await client.primaries()
        assert await client.call("GET", "{asked}:new") == b"1"
        cluster.nodes[target].kill()
        await client.primaries()
        assert client._ask_links == {}
        await asyncio.gather(*client._retiring)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    finally:
        await client.aclose()
        cluster.stop()


async def test_a_replica_takes_over_without_a_failed_call() -> None:
    cluster = TestCluster()
    try:
        await cluster.form()
        await take_over(cluster, await cluster.add_replica(0))
    finally:
        cluster.stop()


async def take_over(cluster: TestCluster, replica: int) -> None:
    client = ClusterTransport(parse_url(cluster.url), request_timeout=20)
    tag = tag_on(cluster, 0)
    done = asyncio.Event()

    async def all_known() -> bool:
        await client.primaries()  # reads the map again
        return sorted(client._nodes.values()) == [False, True, True, True]

    async def promoted() -> bool:
        return b"role:master" in await cluster.call(replica, "INFO", "replication")

    async def keep_counting() -> int:
        count = 0
        while not done.is_set() or count == 0:
            count = await client.call("INCR", tag, replay_safe=True)
        return count

    try:
        await until(all_known)
        assert len(await client.call_all_nodes("PING")) == 4
        assert len(await client.call_all_primaries("PING")) == 3
        counting = asyncio.ensure_future(keep_counting())
        await cluster.call(replica, "CLUSTER", "FAILOVER")
        await until(promoted)
        done.set()
        count = await counting
        assert await client.call("GET", tag) == str(count).encode()
        cluster.nodes[0].kill()
        assert await client.call("INCR", tag, replay_safe=True) == count + 1
    finally:
        await client.aclose()
