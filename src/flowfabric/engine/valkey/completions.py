"""Following the event feeds: who waits for an execution learns of its end at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.forks import forget_on_fork, leave_behind
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.transport import Connection

log = logging.getLogger(__name__)

_BLOCK_S = 5.0
_GRACE_S = 2.0
_PAGE = 1000
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
_NUDGE_S = 0.001
_RECHECK_S = 15.0
"""However an event could be missed, a waiter reads the state again after this time."""

_ENDED = frozenset(
    {
        PublicState.COMPLETED,
        PublicState.FAILED,
        PublicState.CANCELLED,
        PublicState.EXPIRED,
        PublicState.SKIPPED,
    }
)


class CompletionWatch:
    """One reader for all waiters of a process: blocking reads of the feeds that matter now.

    A waiter first notes the feed's end, then reads the state: whatever ends the execution after
    that read stands behind the noted position, so no completion is missed. In a cluster a
    blocking read cannot span slots, so there each partition has its own reader.
    """

    def __init__(self, backend: ValkeyBackend) -> None:
        self._backend = backend
        self._readers: dict[str, _Reader] = {}
        forget_on_fork(self)

    async def wait_ended(self, execution_id: ExecutionId) -> None:
        """Return when the execution is terminal, at times earlier; look at the state then.

        An unknown execution is `execution_not_found`.
        """
        tag = execution_id.tag
        group = tag if self._backend.transport.is_cluster else ""
        reader = self._readers.get(group)
        if reader is None:
            reader = self._readers[group] = _Reader(self._backend)
        await reader.wait_ended(execution_id, tag)

    @property
    def waiting(self) -> int:
        """How many executions are waited for."""
        return sum(reader.waiting for reader in self._readers.values())

    async def aclose(self) -> None:
        """Stop reading; whoever still waits gets an error."""
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            await reader.aclose()

    def forget(self) -> None:
        """In a forked child: the parent's readers stay the parent's."""
        leave_behind(self._readers)
        self._readers = {}


class _Reader:
    """Reads some feeds through one connection of its own, as long as anyone waits."""

    def __init__(self, backend: ValkeyBackend) -> None:
        self._backend = backend
        self._positions: dict[str, str] = {}
        self._waiters: dict[str, dict[bytes, list[asyncio.Future[None]]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._nudging: asyncio.Task[None] | None = None
        self._conn: Connection | None = None
        self._client_id = 0
        self._reading: frozenset[str] = frozenset()
        self._broken = False

    @property
    def waiting(self) -> int:
        return sum(len(of_tag) for of_tag in self._waiters.values())

    async def wait_ended(self, execution_id: ExecutionId, tag: str) -> None:
        ended = asyncio.get_running_loop().create_future()
        member = execution_id.encode()
        self._waiters.setdefault(tag, {}).setdefault(member, []).append(ended)
        try:
            # Both leave in one write and are answered in this order.
            _, state = await asyncio.gather(
                self._follow(tag), self._backend.reads.read_execution_state(execution_id)
            )
            if state not in _ENDED:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RECHECK_S):
                        await ended
        finally:
            self._forget(tag, member, ended)

    def _forget(self, tag: str, member: bytes, ended: asyncio.Future[None]) -> None:
        of_tag = self._waiters.get(tag, {})
        waiting = of_tag.get(member, [])
        if ended in waiting:
            waiting.remove(ended)
        if not waiting:
            of_tag.pop(member, None)
        if not of_tag:
            self._waiters.pop(tag, None)
            self._positions.pop(tag, None)

    async def _follow(self, tag: str) -> None:
        if tag not in self._positions:
            feed = keys.events(tag)
            last: Any = await self._backend.transport.call(
                "XREVRANGE", feed, "+", "-", "COUNT", 1, key=feed
            )
            if tag not in self._waiters:
                return
            self._positions.setdefault(tag, last[0][0].decode() if last else "0-0")
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._read())
        elif tag not in self._reading and self._nudging is None:
            self._nudging = loop.create_task(self._nudge())

    async def _nudge(self) -> None:
        """The reader is blocked on other feeds: make it read again with the new ones."""
        try:
            while self._task is not None and not self._reading.issuperset(self._positions):
                if self._client_id:
                    await self._backend.transport.call(
                        "CLIENT", "UNBLOCK", self._client_id, key="", replay_safe=True
                    )
                # Its read may not have reached the server yet, then nothing was unblocked.
                await asyncio.sleep(_NUDGE_S)
        except TransportError as error:
            log.debug("feed reader not nudged: %s", error)
        finally:
            self._nudging = None

    # --- the reading task -------------------------------------------------------------

    async def _read(self) -> None:
        pause = _FIRST_PAUSE_S
        try:
            while self._waiters:
                try:
                    await self._read_once()
                    pause = _FIRST_PAUSE_S
                except EngineError as error:
                    log.debug("event feed lost, resuming: %s", error)
                    # In a cluster the feed may have moved: dial again, where it is now.
                    self._hang_up("the event feed was lost")
                    self._broken = True
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LAST_PAUSE_S)
        finally:
            self._task, self._reading = None, frozenset()
            self._hang_up("nobody waits any more")

    def _hang_up(self, why: str) -> None:
        conn, self._conn, self._client_id = self._conn, None, 0
        if conn is not None:
            conn.abort(why)

    async def _read_once(self) -> None:
        conn = self._conn
        if conn is None or not conn.is_open:
            tag = next(iter(self._waiters))
            conn = self._conn = await self._backend.transport.blocking(tag)
            self._client_id = await conn.submit(("CLIENT", "ID"))
            if self._broken:
                # Entries may have been trimmed, or data lost, while nobody read.
                self._broken = False
                for of_tag in self._waiters.values():
                    _wake(of_tag)
        positions = dict(self._positions)
        if not positions:
            # A waiter is about to note its position.
            await asyncio.sleep(_NUDGE_S)
            return
        self._reading = frozenset(positions)
        command = (
            *("XREAD", "COUNT", _PAGE, "BLOCK", int(_BLOCK_S * 1000), "STREAMS"),
            *(keys.events(tag) for tag in positions),
            *positions.values(),
        )
        reply: Any = await conn.submit(command, _BLOCK_S + _GRACE_S)
        if not reply:
            return
        for feed, entries in reply.items():
            tag = keys.events_tag(feed.decode())
            self._deliver(tag, entries)
            if len(entries) == _PAGE:
                await self._check_gap(tag, positions[tag])

    def _deliver(self, tag: str, entries: Any) -> None:
        if tag in self._positions:
            self._positions[tag] = entries[-1][0].decode()
        waiting = self._waiters.get(tag, {})
        for _, flat in entries:
            # Every entry begins with its type and its execution.
            if flat[1] == b"completion" and flat[3] in waiting:
                _wake({flat[3]: waiting[flat[3]]})

    async def _check_gap(self, tag: str, before: str) -> None:
        """The feed is capped: a reader far behind may have missed entries."""
        feed = keys.events(tag)
        first: Any = await self._backend.transport.call(
            "XRANGE", feed, "-", "+", "COUNT", 1, key=feed
        )
        if first and _entry_id(first[0][0].decode()) > _entry_id(before):
            _wake(self._waiters.get(tag, {}))

    async def aclose(self) -> None:
        tasks = [task for task in (self._task, self._nudging) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for of_tag in self._waiters.values():
            for waiting in of_tag.values():
                for ended in waiting:
                    if not ended.done():
                        ended.set_exception(TransportError("transport", "the client was closed"))


def _wake(waiters: dict[bytes, list[asyncio.Future[None]]]) -> None:
    for waiting in waiters.values():
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)


def _entry_id(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("-"))
