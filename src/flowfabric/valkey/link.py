"""The connection to one server, which is dialled again when lost, and calls that survive that.

A call that meets an outage is repeated for `PATIENCE` request timeouts, 10 s by default: most
outages (a restart, a server that loads its data, a failover, a slot on the move) end by themselves.
A refused call never ran, so any call is repeated after a refusal. After a lost reply only reads and
replay-safe calls are. A call with a `timeout` of its own ends with it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from flowfabric.core.backoff import Backoff, jittered
from flowfabric.core.errors import TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.valkey import faults
from flowfabric.valkey.address import Address
from flowfabric.valkey.connection import Arg, Connection, DialOptions, OnPush, Reply, Watcher, dial

PATIENCE: Final = 2
"""For how many request timeouts to repeat a call; twice 5 s is the connect timeout."""
_FIRST_BACKOFF: Final = 0.020
_LAST_BACKOFF: Final = 1.0
_LAST_PAUSE: Final = 0.5

READ_FUNCTIONS: Final = frozenset(
    {
        *("ff_budget_exhausted", "ff_budget_read", "ff_count_lanes", "ff_oldest_eligible"),
        *("ff_flow_edges", "ff_flow_members", "ff_get_inputs", "ff_idle_lanes", "ff_list_kids"),
        *(
            "ff_quota_status",
            "ff_list_suspended",
            "ff_read_steps",
            "ff_read_waits",
            "ff_scan_due",
            "ff_stream_read",
            "ff_survey",
        ),
        *("ff_version", "ff_waitpoint_token"),
    }
)
"""Every function with the flag `no-writes`, and two reads that only record that they ran."""

_COMMANDS: Final = frozenset(
    {
        *("PING", "TIME", "INFO", "GET", "EXISTS", "PTTL"),
        *("HGET", "HMGET", "HGETALL", "HSCAN", "HKEYS", "HLEN", "HRANDFIELD"),
        *("SMEMBERS", "SISMEMBER", "SCARD", "SRANDMEMBER", "LRANGE"),
        *("ZRANGE", "ZMSCORE", "ZCARD"),
        *("XRANGE", "XREVRANGE", "XREAD", "XINFO", "XLEN"),
    }
)
_SUBCOMMANDS: Final = frozenset(
    {("ACL", "GETUSER"), ("CONFIG", "GET"), ("CLUSTER", "SLOTS"), ("FUNCTION", "LIST")}
)

Revive = Callable[[], object]
"""Called on a thread when a server cannot be reached; its owner may restart it."""
T = TypeVar("T")

log = logging.getLogger(__name__)


def is_read(args: Sequence[object]) -> bool:
    """Whether a command changes nothing."""
    if args[0] in _COMMANDS:
        return True
    if args[0] == "FCALL":
        return args[1] in READ_FUNCTIONS
    return tuple(args[:2]) in _SUBCOMMANDS


@dataclass(slots=True)
class PatientCall:
    """One call that met an outage. Times are on the loop's clock."""

    args: tuple[Arg, ...]
    give_up: float
    """The last time at which the call is sent."""
    timeout: float | None
    """How long each send waits for its reply; None: until `give_up`."""
    replay_safe: bool
    leaving: Callable[[], bool]

    @property
    def deadline(self) -> float:
        """When a call sent now must be answered."""
        if self.timeout is None:
            return self.give_up
        return asyncio.get_running_loop().time() + self.timeout

    async def run(
        self,
        attempt: Callable[[TransportError | None], Awaitable[T]],
        failed: TransportError | None = None,
    ) -> T:
        """Repeat `attempt`, which gets the error of the one before, until it returns."""
        loop = asyncio.get_running_loop()
        backoff, reads = Backoff(_FIRST_BACKOFF, _LAST_PAUSE), is_read(self.args)
        while True:
            if failed is not None:
                pause = backoff.jittered_s()
                late = loop.time() + pause >= self.give_up
                safe = reads or self.replay_safe or not failed.ambiguous
                if late or self.leaving() or not (safe and failed.passing):
                    if reads:
                        failed.ambiguous = False
                    raise failed
                await asyncio.sleep(pause)
            try:
                return await attempt(failed)
            except TransportError as error:
                # Stays ambiguous after a later clean failure, because an earlier send may have run.
                error.ambiguous = error.ambiguous or (failed is not None and failed.ambiguous)
                failed = error


class Link:
    """One server's connection, dialled again in the background whenever it is lost.

    A server that refuses a write because it is a replica may have been demoted, so its address is
    dialled again too. The old connection serves until the new one is up, so that no call waits or
    becomes ambiguous; then all others to that server end.
    """

    def __init__(
        self, address: Address, options: DialOptions, revive: Revive | None = None
    ) -> None:
        self.address = address
        self.conn: Connection | None = None
        self.fails_fast = False
        """Whether calls fail at once when the server cannot be reached."""
        self._options = options
        self._revive = revive
        self._dialler: asyncio.Task[None] | None = None
        # Resolves with the current attempt: None, or what went wrong.
        self._attempt: asyncio.Future[TransportError | None] | None = None
        self._error: TransportError | None = None
        self.closed = False
        self._pause = 0.0
        self._up_at: float | None = None
        self._wrong_server = False
        self._logged_outage = False
        # Owned by callers; closed here only if the address leads to another server.
        self._dedicated: set[Connection] = set()
        # Replaced while replies were due; they close after the last one.
        self._replaced: set[Connection] = set()
        self._closing: list[Connection] = []
        forget_on_fork(self)

    async def acquire(self, deadline: float, *, patient: bool = True) -> Connection:
        """The open connection. Unless `patient`, raises after the first failed attempt."""
        loop = asyncio.get_running_loop()
        while self.conn is None:
            if self.closed:
                raise self._closed_error()
            if self._error is not None and (self.fails_fast or not patient):
                raise self._failure(self._error)
            attempt = self._attempt or self._start()
            done, _ = await asyncio.wait([attempt], timeout=max(0.0, deadline - loop.time()))
            error = attempt.result() if done else self._error
            if not done or (error is not None and not (patient and error.safe_to_repeat)):
                raise self._failure(error)
        return self.conn

    async def send(self, call: PatientCall, failed: TransportError | None = None) -> Reply:
        """Send a call to this server and repeat it while it may be repeated."""
        return await call.run(lambda _: self.send_once(call), failed)

    async def send_once(self, call: PatientCall) -> Reply:
        """Send a call as soon as the server can be reached."""
        conn = await self.acquire(call.give_up)
        return await conn.send(call.args, call.deadline)

    async def dedicated(self, on_push: OnPush | None) -> Connection:
        """Another connection to the same server, owned by the caller."""
        if self.closed:
            raise self._closed_error()
        conn = await self._dial(on_push, self._dedicated.discard)
        if conn.is_open:
            self._dedicated.add(conn)
        return conn

    def close(self) -> None:
        """Stop dialling, fail every waiting call, and start closing the connections."""
        self.closed = True
        if self._dialler is not None:
            self._dialler.cancel()
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_result(self._closed_error())
        self._closing += self._replaced
        if self.conn is not None:
            self._closing.append(self.conn)
        self.conn = None
        for conn in self._closing:
            conn.close()

    async def aclose(self) -> None:
        """Close and wait until closed. A cancelled caller only stops waiting."""
        self.close()
        if self._dialler is not None:
            await asyncio.wait([self._dialler])
        await asyncio.gather(*(conn.aclose() for conn in self._closing))

    def forget(self) -> None:
        """In a forked child: leave the parent's sockets and loop alone and start afresh."""
        leave_behind(self._dialler, self._attempt)
        # Their owners will find them closed and dial again.
        shared = [self.conn] if self.conn is not None else []
        for conn in (*shared, *self._dedicated, *self._replaced, *self._closing):
            leave_behind(conn.disown())
        self.conn = self._dialler = self._attempt = self._error = None
        self._dedicated, self._replaced, self._closing = set(), set(), []

    def _closed_error(self) -> TransportError:
        return faults.lost(self.address.peer, "the client is closed", sent=False)

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
        if self._attempt is not None or self.closed or conn.loop.is_closed():
            return
        # A peer that drops every new connection must not be dialled in a tight loop.
        if self._up_at is None or conn.loop.time() - self._up_at > _LAST_BACKOFF:
            self._pause = 0.0
        self._start()

    async def _dial(self, on_push: OnPush | None, on_lost: Watcher) -> Connection:
        conn = await dial(self.address, on_push=on_push, **self._options)
        conn.on_lost, conn.on_demoted = on_lost, self._demoted
        return conn

    async def _dial_until_up(self) -> None:
        while True:
            await asyncio.sleep(jittered(self._pause))
            self._pause = min(max(self._pause * 2, _FIRST_BACKOFF), _LAST_BACKOFF)
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
        except Exception as error:  # noqa: BLE001 - dialling continues, whatever it is
            if not self._logged_outage:
                log.warning(
                    "cannot restart the server: %s", error, extra={"action": "revive_failed"}
                )
            self._logged_outage = True

    def _take(self, conn: Connection) -> None:
        old, self.conn, self._logged_outage = self.conn, conn, False
        self._up_at = conn.loop.time()
        if old is not None:
            self._replaced.add(old)
            old.retire()
        if self._wrong_server:
            self._wrong_server = False
            # The address may lead elsewhere now, so blocked readers must dial again.
            for each in list(self._dedicated):
                each.abort("the server was a replica; reconnecting")
