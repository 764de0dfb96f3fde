"""A Valkey Cluster on loopback for tests: three primaries, slots moved at will."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flowfabric.valkey.address import Address
from flowfabric.valkey.cluster import SLOTS
from flowfabric.valkey.connection import Reply, dial
from tests.support.server import TestServer, free_port


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Ask until it holds; the test's time limit ends a hopeless wait."""
    while not await condition():  # noqa: ASYNC110 - another process has no event for it
        await asyncio.sleep(0.01)


class TestCluster:
    """Primaries with equal shares of the slots; `form()` joins them."""

    __test__ = False

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.nodes: list[TestServer] = []
        self._bus_ports: list[int] = []
        try:
            for _ in range(size):
                self.add()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """All nodes as seeds."""
        return "valkey+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def add(self) -> int:
        """Start one more node, not yet part of the cluster; returns its index."""
        self._bus_ports.append(free_port())
        self.nodes.append(
            TestServer(
                *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
                *("--cluster-port", str(self._bus_ports[-1])),
                port=free_port(),
            )
        )
        return len(self.nodes) - 1

    async def call(self, node: int, *args: str | int | bytes) -> Reply:
        """One command straight to one node, past the client under test."""
        conn = await dial(Address(socket_path=str(self.nodes[node].socket_path)))
        try:
            return await conn.call(*args)
        finally:
            await conn.aclose()

    async def form(self) -> None:
        """Give out the slots, introduce the nodes, and wait until all agree."""
        size = self.size
        for node in range(size):
            first, last = node * SLOTS // size, (node + 1) * SLOTS // size - 1
            await self.call(node, "CLUSTER", "SET-CONFIG-EPOCH", node + 1)
            await self.call(node, "CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in range(1, size):
            await self.introduce(node)
        await self.agree(size)

    async def introduce(self, node: int) -> None:
        """Have the first node meet this one."""
        port, bus_port = self.nodes[node].port, self._bus_ports[node]
        await self.call(0, "CLUSTER", "MEET", "127.0.0.1", port, bus_port)

    async def add_replica(self, primary: int) -> int:
        """Start a replica of a primary; returns its index when it is in step."""
        replica = self.add()
        await self.introduce(replica)
        await self.agree(len(self.nodes))
        await self.call(replica, "CLUSTER", "REPLICATE", await self.node_id(primary))

        async def in_step() -> bool:
            return b"master_link_status:up" in await self.call(replica, "INFO", "replication")

        await until(in_step)
        return replica

    async def agree(self, size: int) -> None:
        """Wait until every node knows `size` nodes and finds the cluster whole."""

        async def whole() -> bool:
            infos = [await self.call(node, "CLUSTER", "INFO") for node in range(len(self.nodes))]
            known = f"cluster_known_nodes:{size}\r\n".encode()
            return all(b"cluster_state:ok" in info and known in info for info in infos)

        await until(whole)

    async def node_id(self, node: int) -> str:
        """The node's cluster name."""
        return (await self.call(node, "CLUSTER", "MYID")).decode()

    def owner(self, slot: int) -> int:
        """Who got this slot in `form()`."""
        shares = ((node + 1) * SLOTS // self.size for node in range(self.size))
        return next(node for node, end in enumerate(shares) if slot < end)

    async def begin_move(self, slot: int, source: int, target: int) -> None:
        """Put the slot in migration: missing keys are answered with ASK."""
        await self.call(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", await self.node_id(source))
        await self.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", await self.node_id(target))

    async def end_move(self, slot: int, target: int) -> None:
        """Give the slot to `target`, with all keys that are still elsewhere; all nodes know."""
        for node in range(len(self.nodes)):
            keys = await self.call(node, "CLUSTER", "GETKEYSINSLOT", slot, 100)
            if node != target and keys:
                where = ("127.0.0.1", self.nodes[target].port, "", 0, 1000, "KEYS", *keys)
                await self.call(node, "MIGRATE", *where)
        name = await self.node_id(target)
        order = [target, *(node for node in range(len(self.nodes)) if node != target)]
        for node in order:
            await self.call(node, "CLUSTER", "SETSLOT", slot, "NODE", name)

    async def move(self, slot: int, source: int, target: int) -> None:
        """Both halves of a migration."""
        await self.begin_move(slot, source, target)
        await self.end_move(slot, target)

    async def moved_errors(self) -> int:
        """How many MOVED answers all nodes have given."""
        total = 0
        for node in range(len(self.nodes)):
            text: str = (await self.call(node, "INFO", "errorstats")).decode()
            if "errorstat_MOVED:count=" in text:
                total += int(text.split("errorstat_MOVED:count=")[1].split(maxsplit=1)[0])
        return total

    def stop(self) -> None:
        """End every node."""
        for node in self.nodes:
            node.stop()
