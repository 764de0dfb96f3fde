"""One process scans for all: an advisory lease that saves commands and decides nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import new_uuid
from flowfabric.core.text import lossless, shown
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend

log = logging.getLogger(__name__)

_LISTED_S = 300.0
_LIST_AGAIN_S = 60.0
_POLL_S = 3.0
_RETRY_S = 1.0
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
# At the memory limit, too: only scanning frees memory again, and a doctor may ask who does.
_LIST = """#!lua flags=allow-oom
redis.call('SADD', KEYS[1], ARGV[1])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


class Leader(msgspec.Struct, frozen=True):
    """A process that runs scanners."""

    process: str
    """`<host>:<pid>`"""
    partial: bool
    """It has a filter, or leaves scanners out."""


async def read_leaders(backend: ValkeyBackend) -> list[Leader]:
    """Who runs scanners now, those for everything first."""
    call = backend.transport.call
    listed: Any = await call("SMEMBERS", keys.LEADERS, key=keys.LEADERS)
    names = [keys.LEADER, *sorted(lossless(name) for name in listed if name.isascii())]
    owners: list[Any] = await asyncio.gather(*(call("GET", name, key=name) for name in names))
    return [
        Leader(shown(lossless(owner)).rpartition(":")[0], name != keys.LEADER)
        for name, owner in zip(names, owners, strict=True)
        if owner is not None
    ]


class Leadership:
    """Whether this process should scan. Two that think so at once do the same work twice, safely.

    A process whose scanners are stuck gives the lease up for others, but goes on scanning what it
    can until another process holds it.
    """

    def __init__(
        self,
        backend: ValkeyBackend,
        *,
        key: str = keys.LEADER,
        ttl_s: float = 1.5,
        healthy: Callable[[], bool],
    ) -> None:
        self.key = key
        self.identity = f"{socket.gethostname()}:{os.getpid()}:{new_uuid()}"
        self.scanning = asyncio.Event()
        """Set while this process should scan."""
        self.holds = False
        """Whether the lease is ours."""
        self.since: float | None = None
        """When, on the loop's clock, scanning last began."""
        self._backend = backend
        self._ttl_ms = max(1, round(ttl_s * 1000))
        # Late enough to be cheap; a lease that lapses for once costs nothing but double work.
        self._renew_s = ttl_s * 2 / 3
        self._poll_s = min(_POLL_S, ttl_s * 2 / 3)
        self._healthy = healthy
        # When, on the loop's clock, the lease was last listed among those of a part.
        self._listed_at: float | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Acquire, renew and watch the lease until told to stop."""
        while not stop.is_set():
            try:
                pause = await self._step()
            except EngineError as error:
                log.debug(
                    "leader lease not readable: %s", error, extra={"action": "leader_unreadable"}
                )
                pause = _RETRY_S
            try:
                async with asyncio.timeout(pause):
                    await stop.wait()
            except TimeoutError:
                pass

    async def _step(self) -> float:
        """One look at the lease; the pause before the next."""
        if self.holds:
            if not self._healthy():
                log.warning(
                    "a scanner makes no progress, other processes may take over",
                    extra={"action": "leader_unhealthy"},
                )
                await self.release()
                return self._poll_s
            # GETEX renews and reads in one command; on a foreign lease it is harmless.
            owner = await self._call("GETEX", self.key, "PX", self._ttl_ms)
            if owner == self.identity.encode():
                await self._list()
                return self._renew_s
            self.holds = False
        left = await self._call("PTTL", self.key)
        if left >= 0:
            self._follow()
            # Sleeping through the rest of the lease finds it either renewed or gone.
            return max(self._poll_s, left / 1000 + 0.05)
        if not self._healthy():
            self._scan()
            return self._poll_s
        return await self._take()

    async def _take(self) -> float:
        """Take the free lease; the pause before the next look."""
        try:
            taken = await self._call("SET", self.key, self.identity, "NX", "PX", self._ttl_ms)
        except TransportError as error:
            if error.kind != "out_of_memory":
                raise
            # Nobody can lead then, and only scanning frees memory again.
            self._scan()
            return self._poll_s
        if taken is None:
            self._follow()
            return self._poll_s
        self.holds = True
        self._scan()
        await self._list()
        return self._renew_s

    async def _list(self) -> None:
        """Let others know of a lease that is not the usual one, again and again: it may be lost."""
        now = asyncio.get_running_loop().time()
        if self.key == keys.LEADER:
            return
        if self._listed_at is not None and now - self._listed_at < _LIST_AGAIN_S:
            return
        await self._backend.transport.call(
            *("EVAL", _LIST, 1, keys.LEADERS, self.key, round(1000 * _LISTED_S)),
            key=keys.LEADERS,
            replay_safe=True,
        )
        self._listed_at = now

    def _scan(self) -> None:
        if not self.scanning.is_set():
            self.since = asyncio.get_running_loop().time()
            self.scanning.set()
            log.info("this process runs the scanners", extra={"action": "leader_acquired"})

    def _follow(self) -> None:
        if self.scanning.is_set():
            self.scanning.clear()
            log.info("another process runs the scanners", extra={"action": "leader_lost"})

    async def release(self) -> None:
        """Let others lead at once; touches the lease only while it is ours."""
        self.holds = False
        await self._call("EVAL", _RELEASE, 1, self.key, self.identity)

    async def _call(self, *args: str | int) -> Any:
        return await self._backend.transport.call(*args, key=self.key, replay_safe=True)
