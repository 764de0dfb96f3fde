"""One pipelined connection to one Valkey server.

Calls made in one loop tick leave together, in a few writes at most; replies come back in order,
so a call is just a future in a queue.
"""

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final, TypeAlias, TypedDict, Unpack, cast

from libvalkey import Reader, ReplyError, pack_command

from flowfabric.core.errors import TransportError
from flowfabric.valkey import faults
from flowfabric.valkey.address import Address

Arg: TypeAlias = bytes | str | int | float
# bytes, int, float, bool, None, list or dict; callers know the shape of what they asked for.
Reply: TypeAlias = Any
Key: TypeAlias = str | bytes | None
OnPush: TypeAlias = Callable[[list[Reply]], None]

REQUEST_TIMEOUT: Final = 5.0
CONNECT_TIMEOUT: Final = 10.0
MAX_IN_FLIGHT: Final = 4096
# If a reply is this late after its deadline, the peer is gone, even if its socket looks alive.
STALL_GRACE: Final = 5.0

# The longest extension of a deadline that passed while user code blocked the loop.
_HELD_GRACE: Final = 0.05
_CLOSE_GRACE: Final = 1.0
# Send after this many calls without waiting for the end of the tick, so that the server can start.
_EARLY: Final = 16
_WRITE_HIGH_WATER: Final = 1 << 20
_NOTHING: Final = object()
# Subscription confirmations are not here: they answer the SUBSCRIBE call that caused them.
_PUSHES: Final = frozenset({b"message", b"pmessage", b"smessage", b"sunsubscribe", b"invalidate"})


class DialOptions(TypedDict, total=False):
    """The options that all connections to a deployment share."""

    name: str
    connect_timeout: float
    request_timeout: float
    max_in_flight: int


Watcher: TypeAlias = Callable[["Connection"], None]
_Call: TypeAlias = tuple[asyncio.Future[Reply], float, bytes]
"""The future of the reply, the deadline, the packed command."""


class Connection(asyncio.Protocol):
    """One multiplexed connection. `dial` makes it; it never reconnects.

    With `on_push`, published messages go to that callback. The parser cannot distinguish a push
    from an array, so such a connection should carry only subscription commands, one channel each.
    """

    def __init__(self, peer: str, options: DialOptions, on_push: OnPush | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.peer = peer
        self._timeout = options.get("request_timeout", REQUEST_TIMEOUT)
        self._max_in_flight = options.get("max_in_flight", MAX_IN_FLIGHT)
        self._on_push = on_push
        self.on_lost: Watcher | None = None
        self.on_demoted: Watcher | None = None
        """Called when the server refuses a call because it is a replica."""
        self._transport: asyncio.Transport | None = None
        self._gone = self.loop.create_future()
        self.why = "not connected"
        """What ended the connection, in words."""
        self._kind = "transport"
        self._sent: deque[_Call] = deque()
        self._unsent: deque[_Call] = deque()
        self._flush_due = self._stuck = self._paused = False
        self._retiring = self._disowned = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = inf
        # RESP3 sets may hold lists, and False is a reply, not a sign of missing data.
        reader = Reader(notEnoughData=_NOTHING, convertSetsToLists=True)
        self._feed, self._gets = reader.feed, reader.gets

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def in_flight(self) -> int:
        """Calls without a reply so far, abandoned ones included."""
        return len(self._sent)

    async def call(self, *args: Arg, timeout: float | None = None) -> Reply:
        """Send one command and return its reply; an error reply is raised typed."""
        return await self.submit(args, timeout)

    def submit(self, args: tuple[Arg, ...], timeout: float | None = None) -> asyncio.Future[Reply]:
        """Queue one command for this tick's write and return the future of its reply."""
        limit = self._timeout if timeout is None else timeout
        return self.send(args, self.loop.time() + limit)

    def send(self, args: tuple[Arg, ...], deadline: float) -> asyncio.Future[Reply]:
        """`submit` with an absolute deadline on the loop's clock: the hot path."""
        packed = pack_command(args)
        future = self.loop.create_future()
        if self._transport is None:
            future.set_exception(self.ended())
            return future
        self._unsent.append((future, deadline, packed))
        if deadline < self._alarm_at:
            self._set_alarm(deadline)
        if not self._flush_due:
            self._flush_due = True
            self.loop.call_soon(self._flush)
        elif len(self._unsent) >= _EARLY and not self._stuck:
            self._flush()
        return future

    async def aclose(self) -> None:
        """Close: what was sent fails as ambiguous, what was not sent fails cleanly."""
        self.close()
        if not self._disowned:
            await asyncio.wait([self._gone], timeout=2 * _CLOSE_GRACE)

    def close(self) -> None:
        """Start closing; `aclose` also waits for the end."""
        self._end("the client closed the connection", abort=False)

    def retire(self) -> None:
        """Close as soon as every call made so far is answered."""
        self._retiring = True
        self._leave_if_idle()

    def abort(self, why: str) -> None:
        """Drop the socket at once and fail every call with this reason."""
        self._end(why, abort=True)

    def disown(self) -> object:
        """In a forked child: leave the parent's socket open. Also keep the result alive."""
        transport, self._transport = self._transport, None
        self.why = "it belongs to the parent of this process"
        self._disowned = True
        return self, transport

    def ended(self) -> TransportError:
        return faults.lost(self.peer, self.why, sent=False, kind=self._kind)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Without a buffer, a write goes to the socket at once; otherwise some loops wait for the
        # end of the tick. TLS needs a buffer, because asyncio's never drains below a limit of 0.
        plain = transport.get_extra_info("sslcontext") is None
        self._transport.set_write_buffer_limits(high=0 if plain else _WRITE_HIGH_WATER)
        self.why = "the connection was lost"

    def data_received(self, data: bytes) -> None:
        gets, sent, on_push = self._gets, self._sent, self._on_push
        try:
            self._feed(data)
            while (reply := gets()) is not _NOTHING:
                if on_push is not None and _is_push(reply):
                    # Through the loop, because a failing callback must not break the reply stream.
                    self.loop.call_soon(on_push, reply)
                    continue
                future = sent.popleft()[0]
                if isinstance(reply, ReplyError):
                    self._refuse(future, str(reply))
                # An abandoned call stays in the queue, so its reply is dropped here.
                elif not future.done():
                    future.set_result(reply)
        except Exception as error:  # noqa: BLE001 - replies can no longer be matched to calls
            what = "a reply that no call asked for" if isinstance(error, IndexError) else error
            self._end(f"the reply stream is broken: {what}", abort=True, kind="protocol")
        if self._stuck:
            self._flush()
        if self._retiring:
            self._leave_if_idle()

    def _refuse(self, future: asyncio.Future[Reply], text: str) -> None:
        error = faults.from_reply(text)
        if not future.done():
            future.set_exception(error)
        # Dial again: the address of a replica may now lead to the primary.
        replica = error.kind == "read_only" or text.startswith("MASTERDOWN")
        if replica and self.on_demoted is not None:
            self.on_demoted(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._stuck:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.why = f"the connection was lost ({exc})"
        self._end(self.why, abort=True)
        if self._alarm is not None:
            self._alarm.cancel()
        if not self._gone.done():
            self._gone.set_result(None)

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        unsent = self._unsent
        room = self._max_in_flight - len(self._sent)
        if len(unsent) <= room and not self._paused:
            self._flush_due = self._stuck = False
            if unsent:
                self._sent.extend(unsent)
                data = b"".join([call[2] for call in unsent])
                unsent.clear()
                transport.write(data)
            return
        # `_flush_due` stays set: the next reply or the drained socket flushes, not every new call.
        self._stuck = True
        if self._paused:
            return
        chosen: list[bytes] = []
        while len(chosen) < room and unsent:
            call = unsent.popleft()
            if not call[0].done():
                self._sent.append(call)
                chosen.append(call[2])
        if not unsent:
            # If all other calls were abandoned and none is in flight, no reply would flush again.
            self._flush_due = self._stuck = False
        if chosen:
            transport.write(b"".join(chosen))

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self.loop.call_at(at, self._ring)

    def _ring(self) -> None:
        # If user code blocked the loop past the deadline, the reply may be waiting in the socket,
        # or the request may not have been sent. Extend the deadline by part of that time.
        held = self.loop.time() - self._alarm_at
        self._alarm = self.loop.call_later(min(max(held, 0.001), _HELD_GRACE), self._sweep)

    def _sweep(self) -> None:
        self._alarm, self._alarm_at = None, inf
        now = self.loop.time()
        if self._transport is None:
            return
        soonest = self._sent[0][1] + STALL_GRACE if self._sent else inf
        if soonest <= now:
            self.abort(f"no reply for {STALL_GRACE:g} s after a deadline")
            return
        for calls, sent in ((self._sent, True), (self._unsent, False)):
            for future, deadline, _ in calls:
                if future.done():
                    continue
                if deadline <= now:
                    future.set_exception(faults.timed_out(self.peer, sent=sent))
                else:
                    soonest = min(soonest, deadline)
        # A call reported as not sent must not be sent later.
        self._unsent = deque(call for call in self._unsent if not call[0].done())
        if soonest < self._alarm_at:
            self._set_alarm(soonest)
        if self._retiring:
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self._sent and not self._unsent:
            self._end("the connection was replaced", abort=False)

    def _end(self, why: str, *, abort: bool, kind: str = "transport") -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self.why, self._kind = why, kind
        # First, so that no caller gets this connection again.
        if self.on_lost is not None:
            self.on_lost(self)
        if self._alarm is not None:
            self._alarm.cancel()
        for calls, sent in ((self._sent, True), (self._unsent, False)):
            for future, *_ in calls:
                if not future.done():
                    future.set_exception(faults.lost(self.peer, why, sent=sent, kind=kind))
            calls.clear()
        if abort:
            transport.abort()
        else:
            transport.close()
            # A peer that reads nothing must not keep the socket open.
            self._alarm = self.loop.call_later(_CLOSE_GRACE, transport.abort)


def _is_push(reply: Reply) -> bool:
    if not isinstance(reply, list) or not reply:
        return False
    kind = cast("list[Reply]", reply)[0]
    return isinstance(kind, bytes) and kind in _PUSHES


async def dial(
    address: Address, *, on_push: OnPush | None = None, **options: Unpack[DialOptions]
) -> Connection:
    """Open one connection: RESP3, login, client name, database."""
    conn = Connection(address.peer, options, on_push)
    timeout = options.get("connect_timeout", CONNECT_TIMEOUT)
    try:
        async with asyncio.timeout(timeout):
            await _open_socket(conn, address)
            await _greet(conn, address, options.get("name", "flowfabric"), timeout)
    except BaseException as error:
        conn.abort("the handshake failed")
        if isinstance(error, TransportError) and error.ambiguous:
            # TLS 1.3 refuses a client without a certificate only after the handshake.
            advice = "if it requires client certificates, set FF_TLS_CERT and FF_TLS_KEY"
            hint = f" ({advice})" if address.tls and address.tls_cert is None else ""
            reason = f"no connection to {address.peer}: {conn.why}{hint}"
            raise TransportError(error.kind, reason) from None
        if isinstance(error, Exception) and not isinstance(error, TransportError):
            raise faults.from_connect(error, address.peer, tls=address.tls) from error
        raise
    return conn


async def _open_socket(conn: Connection, address: Address) -> None:
    tls = tls_context(address)
    loop, path, owner = conn.loop, address.socket_path, address.socket_owner
    if path is not None:
        transport, _ = await loop.create_unix_connection(lambda: conn, path)
        sock = transport.get_extra_info("socket")
        if owner is not None and (wrong := wrong_peer(sock, path, owner)):
            raise TransportError("auth", wrong)
        return
    transport, _ = await loop.create_connection(lambda: conn, address.host, address.port, ssl=tls)
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def wrong_peer(sock: socket.socket, path: str, owner: int) -> str | None:
    """The problem if a process of another user listens on a unix socket."""
    # macOS has no SO_PEERCRED; there the permissions of the folder are the only check.
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user == owner:
        return None
    return f"the process that listens on {path} runs as uid {user}; it should be uid {owner}"


def tls_context(address: Address) -> ssl.SSLContext | None:
    """What TLS needs, from the files of the address; None without TLS."""
    if not address.tls:
        return None
    what = f"the CA file {address.tls_ca}", "FF_TLS_CA"
    try:
        context = ssl.create_default_context(cafile=address.tls_ca)
        if address.tls_cert is not None:
            what = f"the client certificate {address.tls_cert}", "FF_TLS_CERT and FF_TLS_KEY"
            # Without a passphrase here, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(address.tls_cert, address.tls_key, password="")
    except OSError as error:
        reason = error.strerror or str(error)
        raise TransportError("auth", f"cannot use {what[0]}: {reason} (see {what[1]})") from None
    return context


async def _greet(conn: Connection, address: Address, name: str, timeout: float) -> None:
    hello: list[Arg] = ["HELLO", 3]
    if address.password is not None:
        hello += ["AUTH", address.username or "default", address.password]
    hello += ["SETNAME", name]
    steps = [conn.submit(tuple(hello), timeout)]
    if address.db:
        steps.append(conn.submit(("SELECT", address.db), timeout))
    # Both are awaited even if the first fails, so that no error goes unread.
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
