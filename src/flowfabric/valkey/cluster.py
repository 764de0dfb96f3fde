"""The transport to a cluster: a slot map, one connection per primary, redirects followed.

A call goes to the primary that serves its hash tag. When the map is wrong or a node is gone, the
map is read again before the call is repeated.

While a slot moves key by key, the old primary answers ASK for a key that it no longer has. A plain
command follows it. A function does not: it would run on the new primary and miss what has not
arrived yet, or write what the move then overwrites. It waits until the move is complete.
"""

import asyncio
import random
from functools import lru_cache
from typing import Final, TypeAlias, Unpack

from flowfabric.core.errors import TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.core.partition import crc16
from flowfabric.valkey.address import Address
from flowfabric.valkey.connection import Connection, DialOptions, Key, OnPush, Reply
from flowfabric.valkey.faults import RedirectError
from flowfabric.valkey.link import Link, PatientCall
from flowfabric.valkey.transport import Transport

SLOTS: Final = 16384

# How long to wait for one node's slot map before asking the next node.
_MAP_TIMEOUT: Final = 1.0
# Redirects followed without a pause; more means that two nodes disagree.
_FREE_REDIRECTS: Final = 5
# What a node that does not know its own name reports instead: use the host that was asked.
_SAME_HOST: Final = frozenset({"", "?"})

Endpoint: TypeAlias = tuple[str, int]


@lru_cache(maxsize=8192)
def slot_of(key: str | bytes) -> int:
    """The slot of a key: the checksum of its first non-empty `{…}`, or of all of it."""
    data = key.encode() if isinstance(key, str) else key
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return crc16(data) % SLOTS


class ClusterTransport(Transport):
    """A Valkey Cluster behind one multiplexed connection per primary."""

    is_cluster = True

    def __init__(self, address: Address, **options: Unpack[DialOptions]) -> None:
        super().__init__(address, **options)
        self._seeds = address.seeds
        # The nodes of the current map; True for a primary.
        self._nodes: dict[Endpoint, bool] = {}
        self._routes: list[Link | None] = [None] * SLOTS
        self._links: dict[Endpoint, Link] = {self._seeds[0]: self._link}
        # Separate connections for calls under ASK, where every command follows an ASKING: an
        # abandoned call can never pass its ASKING on to a call that should not have one.
        self._ask_links: dict[Endpoint, Link] = {}
        self._map_error: TransportError | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        forget_on_fork(self)

    async def blocking(
        self, tag: str | None = None, *, on_push: OnPush | None = None
    ) -> Connection:
        slot = None if tag is None else slot_of(tag)

        async def attempt(failed: TransportError | None) -> Connection:
            if failed is not None or not self._nodes:
                await self._learn(call.give_up)
            link = self._route(slot)
            if link is None:
                raise self._no_route(slot)
            return await link.dedicated(on_push)

        # Dialling is as safe to repeat as a read.
        call = self._patient(("PING",), self._connect_timeout)
        return await call.run(attempt)

    async def wait_ready(self, timeout: float | None = None, *, patient: bool = True) -> None:
        if not patient:
            await asyncio.wait([self._start_refresh()])
            if self._map_error is not None:
                raise TransportError(self._map_error.kind, self._map_error.message)
        call = self._patient(("PING",), self._connect_timeout if timeout is None else timeout)

        async def ping(_: TransportError | None) -> None:
            left = call.give_up - asyncio.get_running_loop().time()
            await self.call_all_primaries("PING", timeout=left)
            if not all(self._routes):
                raise TransportError("cluster", "not every slot has a primary")

        await call.run(ping)

    async def refresh(self) -> None:
        """Read the slot map again; if no node answers, the old one stays."""
        await asyncio.wait([self._start_refresh()])

    async def aclose(self) -> None:
        self._closed = True
        links = self._links_so_far()
        # Before the first await, at which the caller may be cancelled.
        for link in links:
            link.close()
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await asyncio.gather(*(link.aclose() for link in links), *self._retiring)

    def forget(self) -> None:
        """In a forked child: the links forget by themselves; tasks belong to the parent's loop."""
        leave_behind(self._refreshing, self._retiring)
        self._refreshing, self._retiring = None, set()

    def _link_of(self, key: Key) -> Link | None:
        return None if key is None else self._routes[slot_of(key)]

    def _links_so_far(self) -> list[Link]:
        return [*self._links.values(), *self._ask_links.values()]

    async def _send_again(
        self, call: PatientCall, key: Key, link: Link | None, failed: TransportError | None
    ) -> Reply:
        slot = None if key is None else slot_of(key)
        redirect = failed if isinstance(failed, RedirectError) else None

        async def attempt(failed: TransportError | None) -> Reply:
            nonlocal link, redirect
            if redirect is None:
                if failed is not None or not self._nodes:
                    await self._learn(call.give_up)
                link = self._route(slot)
            known, redirect = redirect, None
            return await self._hop(call, slot, link, known)

        try:
            return await call.run(attempt, None if redirect else failed)
        except TransportError as error:
            # A lost node may have been replaced, so refresh the map for the next call.
            if error.kind in {"transport", "timeout"} and not self._closed:
                self._start_refresh()
            raise

    async def _hop(
        self, call: PatientCall, slot: int | None, link: Link | None, redirect: RedirectError | None
    ) -> Reply:
        """Send to this node, or to the one that a redirect names, and follow redirects."""
        for _ in range(_FREE_REDIRECTS):
            if redirect is not None:
                if redirect.asking and call.args[0] == "FCALL":
                    where = f"slot {redirect.slot} is moving to {redirect.endpoint}"
                    raise TransportError("cluster", where)
                link = self._follow(redirect, link)
            if link is None:
                raise self._no_route(slot)
            conn = await link.acquire(call.give_up, patient=False)
            if redirect is not None and redirect.asking:
                # If this fails, the call fails as well.
                conn.send(("ASKING",), call.deadline).add_done_callback(_ignore_outcome)
            try:
                return await conn.send(call.args, call.deadline)
            except RedirectError as error:
                redirect = error
        assert redirect is not None
        raise redirect

    async def _find_links(self, *, replicas: bool = False) -> list[Link]:
        # Refresh first, so that a node that has just joined is not missed.
        await self._learn(asyncio.get_running_loop().time() + self._request_timeout)
        if not self._nodes:
            raise self._no_route(None)
        chosen = [node for node, primary in self._nodes.items() if replicas or primary]
        return [self._link_to(self._links, node) for node in chosen]

    def _route(self, slot: int | None) -> Link | None:
        if slot is not None:
            return self._routes[slot]
        primaries = [self._links[node] for node, primary in self._nodes.items() if primary]
        return next((link for link in primaries if link.conn), None) or next(iter(primaries), None)

    def _follow(self, redirect: RedirectError, link: Link | None) -> Link:
        host = redirect.host
        if host in _SAME_HOST:
            host = link.address.host if link is not None else self.address.host
        endpoint = (host, redirect.port)
        if redirect.asking:
            return self._link_to(self._ask_links, endpoint)
        target = self._routes[redirect.slot] = self._link_to(self._links, endpoint)
        self._start_refresh()
        return target

    def _link_to(self, table: dict[Endpoint, Link], endpoint: Endpoint) -> Link:
        link = table.get(endpoint)
        if link is None:
            link = table[endpoint] = Link(self.address.node(*endpoint), self._options)
        return link

    def _no_route(self, slot: int | None) -> TransportError:
        where = "no node is known" if slot is None else f"no node serves slot {slot}"
        why = f" ({self._map_error.message})" if self._map_error is not None else ""
        return TransportError("cluster", where + why)

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._read_map())
        return self._refreshing

    async def _learn(self, deadline: float) -> None:
        """Read the map, waiting until the deadline at most; raises a refused login."""
        if self._closed:
            raise TransportError("transport", "the client is closed; the call was not sent")
        loop = asyncio.get_running_loop()
        await asyncio.wait([self._start_refresh()], timeout=max(0.0, deadline - loop.time()))
        error = self._map_error
        if error is not None and not error.retryable:
            raise TransportError(error.kind, error.message)

    async def _read_map(self) -> None:
        loop = asyncio.get_running_loop()
        for endpoint in self._map_sources():
            link = self._link_to(self._links, endpoint)
            deadline = loop.time() + _MAP_TIMEOUT
            try:
                conn = await link.acquire(deadline, patient=False)
                ranges = await conn.send(("CLUSTER", "SLOTS"), deadline)
            except TransportError as error:
                self._map_error = error
                continue
            self._apply(ranges, link.address.host)
            self._map_error = None
            return

    def _map_sources(self) -> list[Endpoint]:
        """Nodes to ask: those with an open connection, the others, then the seeds."""
        known = list(self._nodes)
        random.shuffle(known)
        up = {endpoint for endpoint, link in self._links.items() if link.conn is not None}
        known.sort(key=lambda endpoint: endpoint not in up)
        return list(dict.fromkeys([*known, *self._seeds]))

    def _apply(self, ranges: list[list[Reply]], asked_host: str) -> None:
        routes: list[Link | None] = [None] * SLOTS
        nodes: dict[Endpoint, bool] = {}
        for first, last, *members in ranges:
            for index, (raw_host, port, *_) in enumerate(members):
                host = (raw_host or b"").decode()
                host = asked_host if host in _SAME_HOST else host
                nodes[host, port] = index == 0
                if index == 0:
                    link = self._link_to(self._links, (host, port))
                    routes[first : last + 1] = [link] * (last - first + 1)
        self._routes, self._nodes = routes, nodes
        for table in (self._links, self._ask_links):
            for endpoint in table.keys() - nodes.keys():
                self._retire(table, endpoint)

    def _retire(self, table: dict[Endpoint, Link], endpoint: Endpoint) -> None:
        """Close the link to a node that left, or leave it to a later map if replies are due."""
        # This also closes a node that is not in the map yet; the next ASK dials it again.
        link = table[endpoint]
        if link.conn is None or not link.conn.in_flight:
            del table[endpoint]
            link.close()
            task = asyncio.get_running_loop().create_task(link.aclose())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


def _ignore_outcome(future: asyncio.Future[Reply]) -> None:
    if not future.cancelled():
        future.exception()
