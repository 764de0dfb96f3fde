"""Following the event feeds: who waits for an execution learns of its end at once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from flowfabric.core import keys
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.engine.backend import Backend
from flowfabric.valkey.transport import Connection

__all__ = ["CompletionWatch"]

log = logging.getLogger(__name__)

_BLOCK_S = 5.0
_GRACE_S = 2.0
_PAGE = 1000
_CLUSTER_POLL_S = 0.05
_RETRY_S = 0.1

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
    that read stands behind the noted position, so no completion is missed.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._positions: dict[str, str] = {}
        self._waiters: dict[str, dict[bytes, list[asyncio.Future[None]]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._conn: Connection | None = None
        self._client_id = 0

    async def wait_ended(self, execution_id: ExecutionId) -> None:
        """Return once the execution is terminal; an unknown one is `execution_not_found`."""
        tag = execution_id.tag
        ended = asyncio.get_running_loop().create_future()
        waiting = self._waiters.setdefault(tag, {}).setdefault(execution_id.encode(), [])
        waiting.append(ended)
        try:
            await self._follow(tag)
            state = await self._backend.read_execution_state(execution_id)
            if state not in _ENDED:
                await ended
        finally:
            self._forget(tag, execution_id.encode(), ended)

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
        if tag in self._positions:
            return
        feed = keys.events(tag)
        last: Any = await self._backend.transport.call(
            "XREVRANGE", feed, "+", "-", "COUNT", 1, key=feed
        )
        self._positions.setdefault(tag, last[0][0].decode() if last else "0-0")
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        elif self._client_id:
            # The reader is blocked on other feeds: make it read again with this one.
            await self._backend.transport.call("CLIENT", "UNBLOCK", self._client_id, key="")

    async def _read(self) -> None:
        while self._waiters:
            try:
                await self._read_once()
            except TransportError as error:
                log.debug("event feed lost, resuming: %s", error)
                self._client_id = 0
                await asyncio.sleep(_RETRY_S)
            except EngineError:
                log.exception("event feed not readable", extra={"action": "feed_failed"})
                await asyncio.sleep(1.0)
        self._reader = None

    async def _read_once(self) -> None:
        positions = dict(self._positions)
        if not positions:
            await asyncio.sleep(0)
            return
        if self._backend.transport.is_cluster:
            for tag, position in positions.items():
                feed = keys.events(tag)
                self._deliver(
                    await self._backend.transport.call(
                        "XREAD", "COUNT", _PAGE, "STREAMS", feed, position, key=feed
                    )
                )
            await asyncio.sleep(_CLUSTER_POLL_S)
            return
        conn = self._conn
        if conn is None or not conn.is_open:
            conn = self._conn = await self._backend.transport.blocking()
            client_id: Any = await conn.submit(("CLIENT", "ID"))
            self._client_id = client_id
            positions = dict(self._positions)
        feeds = [keys.events(tag) for tag in positions]
        command = (
            *("XREAD", "COUNT", _PAGE, "BLOCK", int(_BLOCK_S * 1000), "STREAMS"),
            *feeds,
            *positions.values(),
        )
        self._deliver(await conn.submit(command, _BLOCK_S + _GRACE_S))

    def _deliver(self, reply: Any) -> None:
        if not reply:
            return
        for feed, entries in reply.items():
            tag = feed.decode().removeprefix("ff:part:").removesuffix(":events")
            if tag in self._positions:
                self._positions[tag] = entries[-1][0].decode()
            waiting = self._waiters.get(tag, {})
            for _, flat in entries:
                # Every entry begins with its type and its execution.
                if flat[1] == b"completion":
                    for ended in waiting.get(flat[3], ()):
                        if not ended.done():
                            ended.set_result(None)

    async def aclose(self) -> None:
        """Stop reading; whoever still waits is cancelled."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None
        for of_tag in self._waiters.values():
            for waiting in of_tag.values():
                for ended in waiting:
                    ended.cancel()
        if self._conn is not None:
            await self._conn.aclose()
            self._conn = None
