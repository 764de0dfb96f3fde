"""The narrow interface to a Valkey deployment, and its face for one server.

Every non-blocking call of a process shares one connection; a lost one is dialled again. A call
that meets an outage is repeated by the rules of `patience`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from flowfabric.core.errors import TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.valkey import faults
from flowfabric.valkey.address import Address
from flowfabric.valkey.connection import (
    CONNECT_TIMEOUT,
    MAX_IN_FLIGHT,
    REQUEST_TIMEOUT,
    Arg,
    Connection,
    OnPush,
    Reply,
    dial,
)
from flowfabric.valkey.patience import FIRST_BACKOFF, LAST_BACKOFF, PATIENCE, PatientCall, jittered

log = logging.getLogger(__name__)


Revive = Callable[[], object]
"""Called, in a thread, when a server cannot be reached: whoever owns it may start it again."""


Ask = Callable[..., Coroutine[Any, Any, Reply]]
"""Sends one command, with an optional `timeout`, to one server."""


class Transport(Protocol):
    """What the engine needs from a Valkey deployment, one server or a cluster."""

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over several primaries."""
        ...

    @property
    def patience_s(self) -> float:
        """How long an outage is ridden out."""
        ...

    def call(
        self,
        *args: Arg,
        key: str | bytes | None = None,
        timeout: float | None = None,
        replay_safe: bool = False,
    ) -> Coroutine[Any, Any, Reply]:
        """Send one command; `key` routes it in a cluster (default: the first argument)."""
        ...

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
        ...

    def blocking(
        self, tag: str | None = None, *, on_push: OnPush | None = None
    ) -> Coroutine[Any, Any, Connection]:
        """A connection of its own for blocking reads or subscriptions; the caller closes it."""
        ...

    def primaries(self) -> Coroutine[Any, Any, dict[str, Ask]]:
        """For every primary, by node name, a way to ask it alone."""
        ...

    def call_all_primaries(
        self, *args: Arg, timeout: float | None = None
    ) -> Coroutine[Any, Any, dict[str, Reply]]:
        """Send one command to every primary; the replies by node name."""
        ...

    def call_all_nodes(
        self, *args: Arg, timeout: float | None = None
    ) -> Coroutine[Any, Any, dict[str, Reply]]:
        """Send one command to every node, replicas too; the replies by node name."""
        ...

    def wait_ready(
        self, timeout: float | None = None, *, patient: bool = True
    ) -> Coroutine[Any, Any, None]:
        """Return at PONG; raise what was wrong at the deadline or, impatient, at the first try."""
        ...

    def hurry(self, *, leaving: bool = True) -> None:
        """From now on no call waits for a server that cannot be reached: its user is leaving."""
        ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Fail what is pending and close every connection it opened."""
        ...


class Link:
    """One server's connection, dialled again in the background whenever it is lost.

    A server that refuses a write because it is a replica may have been demoted behind its
    address. It is dialled again, too: the old connection serves until the new one is up, so
    that nothing waits or becomes ambiguous, and then all others to that server end.
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        request_timeout: float,
        connect_timeout: float,
        max_in_flight: int = MAX_IN_FLIGHT,
        revive: Revive | None = None,
    ) -> None:
        self.address = address
        self._revive = revive
        self.conn: Connection | None = None
        self.hurried = False
        """Whether nobody is patient any more."""
        self._name = name
        self._request_timeout = request_timeout
        self._connect_timeout = connect_timeout
        self._max_in_flight = max_in_flight
        self._dialler: asyncio.Task[None] | None = None
        # Ends with the present attempt: None, or what went wrong.
        self._attempt: asyncio.Future[TransportError | None] | None = None
        self._error: TransportError | None = None
        self._closed = False
        self._pause = 0.0
        self._up_at: float | None = None
        self._wrong_server = False
        # Whether this outage was logged.
        self._told = False
        # Owned by callers, ended here only when the address leads to another server.
        self._dedicated: set[Connection] = set()
        # Replaced while they still owed replies; they close by themselves.
        self._replaced: set[Connection] = set()
        self._closing: list[Connection] = []
        forget_on_fork(self)

    async def acquire(self, deadline: float, *, patient: bool = True) -> Connection:
        """The open connection. Impatient: raise after the first failed attempt, not at the end."""
        loop = asyncio.get_running_loop()
        while self.conn is None:
            if self._closed:
                raise faults.lost(self.address.peer, "the client is closed", sent=False)
            if self._error is not None and (self.hurried or not patient):
                raise self._failure(self._error)
            attempt = self._attempt or self._start()
            done, _ = await asyncio.wait([attempt], timeout=max(0.0, deadline - loop.time()))
            error = attempt.result() if done else self._error
            if not done or (error is not None and not (patient and error.safe_to_repeat)):
                raise self._failure(error)
        return self.conn

    async def send(self, call: PatientCall, failed: TransportError | None = None) -> Reply:
        """Send a call to this server, again after `failed`, for as long as it has patience."""

        async def attempt(_: TransportError | None) -> Reply:
            return await self.send_once(call)

        return await call.run(attempt, failed)

    async def send_once(self, call: PatientCall) -> Reply:
        """Send a call as soon as the server can be reached."""
        conn = await self.acquire(call.give_up)
        return await conn.send(call.args, call.deadline)

    async def ask(self, args: tuple[Arg, ...], timeout: float | None) -> Reply:
        """Send one command to this server and no other: a read until it is answered, else once."""
        begun = asyncio.get_running_loop().time()
        call = PatientCall(
            args, begun, timeout, self._request_timeout, leaving=lambda: self.is_leaving
        )
        return await (self.send(call) if call.reads else self.send_once(call))

    @property
    def is_leaving(self) -> bool:
        """Whether no call waits any more."""
        return self.hurried or self._closed

    async def dedicated(self, on_push: OnPush | None) -> Connection:
        """Another connection to the same server, owned by the caller."""
        if self._closed:
            raise faults.lost(self.address.peer, "the client is closed", sent=False)
        conn = await self._dial(on_push, self._dedicated.discard)
        if conn.is_open:
            self._dedicated.add(conn)
        return conn

    def close(self) -> None:
        """Stop dialling, fail every waiting call, and begin to close the connections."""
        self._closed = True
        if self._dialler is not None:
            self._dialler.cancel()
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_result(
                faults.lost(self.address.peer, "the client is closed", sent=False)
            )
        self._closing += self._replaced
        if self.conn is not None:
            self._closing.append(self.conn)
        self.conn = None
        for conn in self._closing:
            conn.close()

    async def aclose(self) -> None:
        """`close`, and wait for its end. A cancelled caller only stops waiting."""
        self.close()
        if self._dialler is not None:
            await asyncio.wait([self._dialler])
        await asyncio.gather(*(conn.aclose() for conn in self._closing))

    def forget(self) -> None:
        """In a forked child: leave the parent's sockets and loop alone, and start afresh."""
        leave_behind(self._dialler, self._attempt)
        # Whoever holds one finds it closed, and dials.
        shared = [self.conn] if self.conn is not None else []
        for conn in (*shared, *self._dedicated, *self._replaced, *self._closing):
            leave_behind(conn.disown())
        self.conn = self._dialler = self._attempt = self._error = None
        self._dedicated, self._replaced, self._closing = set(), set(), []

    def _failure(self, error: TransportError | None) -> TransportError:
        if error is None:
            return faults.from_connect(TimeoutError(), self.address.peer, tls=self.address.tls)
        return TransportError(error.kind, error.message)

    def _start(self) -> asyncio.Future[TransportError | None]:
        loop = asyncio.get_running_loop()
        self._attempt = loop.create_future()
        self._dialler = loop.create_task(self._dial_until_up())
        return self._attempt

    def _lost(self, conn: Connection) -> None:
        self._replaced.discard(conn)
        if self.conn is conn:
            self.conn = None
            self._redial(conn)

    def _demoted(self, conn: Connection) -> None:
        if conn in self._dedicated:
            conn.retire()
        elif conn is not self.conn:
            return
        self._wrong_server = True
        self._redial(conn)

    def _redial(self, conn: Connection) -> None:
        if self._attempt is not None or self._closed or conn.loop.is_closed():
            return
        # A peer that drops every new connection must not be dialled in a tight loop.
        if self._up_at is None or conn.loop.time() - self._up_at > LAST_BACKOFF:
            self._pause = 0.0
        self._start()

    async def _dial(
        self, on_push: OnPush | None, on_lost: Callable[[Connection], None] | None
    ) -> Connection:
        return await dial(
            self.address,
            name=self._name,
            connect_timeout=self._connect_timeout,
            request_timeout=self._request_timeout,
            max_in_flight=self._max_in_flight,
            on_push=on_push,
            on_lost=on_lost,
            on_demoted=self._demoted,
        )

    async def _dial_until_up(self) -> None:
        while True:
            await asyncio.sleep(jittered(self._pause))
            self._pause = min(max(self._pause * 2, FIRST_BACKOFF), LAST_BACKOFF)
            attempt = self._attempt
            assert attempt is not None
            try:
                conn = await self._dial(None, self._lost)
                self._error = None if conn.is_open else conn.ended()
                if conn.is_open:
                    self._take(conn)
            except TransportError as error:
                self._error = error
                await self._try_to_revive()
            if self._error is None or not self._error.safe_to_repeat:
                error, self._error, self._attempt = self._error, None, None
                attempt.set_result(error)
                return
            self._attempt = asyncio.get_running_loop().create_future()
            attempt.set_result(self._error)

    async def _try_to_revive(self) -> None:
        if self._revive is None:
            return
        try:
            await asyncio.to_thread(self._revive)
        except Exception as error:  # noqa: BLE001 - whatever it is, dialling goes on
            if not self._told:
                log.warning("server not revived: %s", error, extra={"action": "revive_failed"})
            self._told = True

    def _take(self, conn: Connection) -> None:
        old, self.conn, self._told = self.conn, conn, False
        self._up_at = conn.loop.time()
        if old is not None:
            self._replaced.add(old)
            old.retire()
        if self._wrong_server:
            self._wrong_server = False
            # The address may lead elsewhere now: whoever blocks there must dial again.
            for each in list(self._dedicated):
                each.abort("the server was a replica; its address is dialled again")


class Client:
    """A standalone server behind one multiplexed connection. Belongs to one event loop.

    >>> client = Client(parse_url("valkey://127.0.0.1:6379"))  # doctest: +SKIP
    >>> await client.fcall("ff_version", "{fp:0}")  # doctest: +SKIP
    """

    def __init__(
        self,
        address: Address,
        *,
        request_timeout: float = REQUEST_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        name: str = "flowfabric",
        max_in_flight: int = MAX_IN_FLIGHT,
        revive: Revive | None = None,
    ) -> None:
        self.address = address
        self.is_cluster = False
        self.patience_s = PATIENCE * request_timeout
        self._request_timeout = request_timeout
        self._connect_timeout = connect_timeout
        self._link = Link(
            address,
            name=name,
            request_timeout=request_timeout,
            connect_timeout=connect_timeout,
            max_in_flight=max_in_flight,
            revive=revive,
        )

    def call(
        self,
        *args: Arg,
        key: str | bytes | None = None,  # noqa: ARG002 - one server needs no route
        timeout: float | None = None,
        replay_safe: bool = False,
    ) -> Coroutine[Any, Any, Reply]:
        """Send one command. `replay_safe`: repeat it if its reply is lost."""
        return self._send(args, timeout, replay_safe)

    def fcall(
        self,
        function: str,
        tag: str,
        args: Sequence[Arg] = (),
        *,
        replay_safe: bool = False,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Reply]:
        """`FCALL function 1 tag *args`."""
        return self._send(("FCALL", function, 1, tag, *args), timeout, replay_safe)

    async def blocking(
        self,
        tag: str | None = None,  # noqa: ARG002 - one server needs no route
        *,
        on_push: OnPush | None = None,
    ) -> Connection:
        """A connection of its own for blocking reads or subscriptions; the caller closes it."""
        return await self._link.dedicated(on_push)

    async def primaries(self) -> dict[str, Ask]:
        """The one server there is."""
        return {self.address.peer: self._ask}

    async def call_all_primaries(
        self, *args: Arg, timeout: float | None = None
    ) -> dict[str, Reply]:
        """Send one command to the one server there is."""
        return {self.address.peer: await self._send(args, timeout, replay_safe=False)}

    async def call_all_nodes(self, *args: Arg, timeout: float | None = None) -> dict[str, Reply]:
        """Send one command to the one server there is."""
        return await self.call_all_primaries(*args, timeout=timeout)

    async def wait_ready(self, timeout: float | None = None, *, patient: bool = True) -> None:
        """Return when the server answers PING; raise what was wrong at the deadline."""
        limit = self._connect_timeout if timeout is None else timeout
        if not patient:
            await self._link.acquire(asyncio.get_running_loop().time() + limit, patient=False)
        check_pong(await self.call("PING", timeout=limit))

    def hurry(self, *, leaving: bool = True) -> None:
        """From now on no call waits for a server that cannot be reached: its user is leaving."""
        self._link.hurried = leaving

    async def aclose(self) -> None:
        """Fail what is pending and close the connection. A closed client stays closed."""
        await self._link.aclose()

    def _ask(self, *args: Arg, timeout: float | None = None) -> Coroutine[Any, Any, Reply]:
        return self._link.ask(args, timeout)

    async def _send(
        self,
        args: tuple[Arg, ...],
        timeout: float | None,
        replay_safe: bool,  # noqa: FBT001
    ) -> Reply:
        conn = self._link.conn
        limit = self._request_timeout if timeout is None else timeout
        failed: TransportError | None = None
        if conn is None:
            begun = asyncio.get_running_loop().time()
        else:
            begun = conn.loop.time()
            try:
                return await conn.send(args, begun + limit)
            except TransportError as error:
                failed = error
        call = PatientCall(
            args,
            begun,
            timeout,
            self._request_timeout,
            replay_safe=replay_safe,
            leaving=lambda: self._link.is_leaving,
        )
        return await self._link.send(call, failed)


def check_pong(reply: Reply) -> None:
    """Raise unless this is the answer to PING."""
    if reply != b"PONG":
        raise TransportError("protocol", f"PING was answered with {reply!r}")
