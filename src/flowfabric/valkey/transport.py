"""The narrow interface to a Valkey deployment: its calls share one connection per server."""

# ruff: noqa: ARG002 - a single server ignores what routes a call in a cluster

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from flowfabric.core.errors import TransportError
from flowfabric.valkey import connection
from flowfabric.valkey.address import Address
from flowfabric.valkey.connection import Arg, Connection, DialOptions, Key, OnPush, Reply
from flowfabric.valkey.link import PATIENCE, Link, PatientCall, Revive, is_read

Ask = Callable[..., Coroutine[Any, Any, Reply]]
"""Sends one command, with an optional `timeout`, to one server."""


class Transport:
    """A Valkey deployment, used from one event loop; this class is for a single server."""

    is_cluster: ClassVar[bool] = False
    """Whether keys are spread over several primaries."""

    def __init__(
        self, address: Address, *, revive: Revive | None = None, **options: Unpack[DialOptions]
    ) -> None:
        self.address = address
        self._options = options
        self._request_timeout = options.get("request_timeout", connection.REQUEST_TIMEOUT)
        self._connect_timeout = options.get("connect_timeout", connection.CONNECT_TIMEOUT)
        self._closed = self._fails_fast = False
        self._link = Link(address, options, revive)

    async def refresh(self) -> None:
        """Look again which node serves what; a single server serves everything."""

    @property
    def patience_s(self) -> float:
        """How long a call is repeated during an outage."""
        return PATIENCE * self._request_timeout

    def call(
        self, *args: Arg, key: Key = None, timeout: float | None = None, replay_safe: bool = False
    ) -> Coroutine[Any, Any, Reply]:
        """Send one command, routed by `key` (default: its first argument).

        `replay_safe`: repeat it if its reply is lost.
        """
        if key is None and len(args) > 1:
            first = args[1]
            key = first if isinstance(first, str | bytes) else str(first)
        return self._send(args, key, timeout, replay_safe)

    def fcall(
        self,
        function: str,
        tag: str,
        args: Sequence[Arg] = (),
        *,
        replay_safe: bool = False,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Reply]:
        """Call a library function with the hash tag, such as `{fp:42}`, as its one key."""
        return self._send(("FCALL", function, 1, tag, *args), tag, timeout, replay_safe)

    async def blocking(
        self, tag: str | None = None, *, on_push: OnPush | None = None
    ) -> Connection:
        """A separate connection for blocking reads or subscriptions; the caller closes it.

        In a cluster it leads to the primary of `tag`, or to any.
        """
        return await self._link.dedicated(on_push)

    async def primaries(self) -> dict[str, Ask]:
        """For every primary, by node name, a way to ask it alone."""
        return {link.address.peer: partial(self._ask, link) for link in await self._find_links()}

    async def call_all_primaries(
        self, *args: Arg, timeout: float | None = None
    ) -> dict[str, Reply]:
        """Send one command to every primary; the replies by node name."""
        return await self._call_all(args, timeout, await self._find_links())

    async def call_all_nodes(self, *args: Arg, timeout: float | None = None) -> dict[str, Reply]:
        """Send one command to every node, replicas too; the replies by node name."""
        return await self._call_all(args, timeout, await self._find_links(replicas=True))

    async def wait_ready(self, timeout: float | None = None, *, patient: bool = True) -> None:
        """Wait for PONG; raises the error at the deadline or, unless `patient`, immediately."""
        limit = self._connect_timeout if timeout is None else timeout
        if not patient:
            await self._link.acquire(asyncio.get_running_loop().time() + limit, patient=False)
        await self.call("PING", timeout=limit)

    def peer_of(self, tag: str) -> str | None:
        """The name of the node that serves a hash tag, if it is known."""
        link = self._link_of(tag)
        return None if link is None else link.address.peer

    def fail_fast(self, *, enabled: bool = True) -> None:
        """Make calls fail at once while the server is unreachable."""
        self._fails_fast = enabled
        for link in self._links_so_far():
            link.fails_fast = enabled

    async def aclose(self) -> None:
        """Fail what is pending and close every connection. A closed transport stays closed."""
        self._closed = True
        await self._link.aclose()

    def _link_of(self, key: Key) -> Link | None:
        """The link to the server of a key, if it is known."""
        return self._link

    async def _send_again(
        self, call: PatientCall, key: Key, link: Link | None, failed: TransportError | None
    ) -> Reply:
        """Send a call that could not be sent, or that `failed` on this link."""
        return await self._link.send(call, failed)

    def _links_so_far(self) -> list[Link]:
        return [self._link]

    async def _find_links(self, *, replicas: bool = False) -> list[Link]:
        return [self._link]

    async def _send(
        self,
        args: tuple[Arg, ...],
        key: Key,
        timeout: float | None,
        replay_safe: bool,  # noqa: FBT001
    ) -> Reply:
        link = self._link_of(key)
        limit = self._request_timeout if timeout is None else timeout
        failed: TransportError | None = None
        if link is None or (conn := link.conn) is None:
            begun = asyncio.get_running_loop().time()
        else:
            begun = conn.loop.time()
            try:
                return await conn.send(args, begun + limit)
            except TransportError as error:
                failed = error
        call = self._patient(args, timeout, begun, replay_safe=replay_safe)
        return await self._send_again(call, key, link, failed)

    def _patient(
        self,
        args: tuple[Arg, ...],
        timeout: float | None,
        begun: float | None = None,
        *,
        replay_safe: bool = False,
        only: Link | None = None,
    ) -> PatientCall:
        start = asyncio.get_running_loop().time() if begun is None else begun
        limit = self.patience_s if timeout is None else timeout
        return PatientCall(
            args,
            give_up=start + limit,
            timeout=self._request_timeout if timeout is None else None,
            replay_safe=replay_safe,
            leaving=lambda: self._closed or self._fails_fast or (only is not None and only.closed),
        )

    async def _ask(self, link: Link, *args: Arg, timeout: float | None = None) -> Reply:
        """Send one command to this server and no other; a read is repeated until it is answered."""
        call = self._patient(args, timeout, only=link)
        return await (link.send(call) if is_read(args) else link.send_once(call))

    async def _call_all(
        self, args: tuple[Arg, ...], timeout: float | None, links: list[Link]
    ) -> dict[str, Reply]:
        asked = (self._ask(link, *args, timeout=timeout) for link in links)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return {link.address.peer: reply for link, reply in zip(links, replies, strict=True)}
