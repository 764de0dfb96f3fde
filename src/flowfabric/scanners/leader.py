"""An advisory lease that lets one process scan for all, only to save commands."""

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Collection

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.backend import Backend
from flowfabric.scanners.base import wait_until
from flowfabric.scanners.settings import ScannerFilter

log = logging.getLogger(__name__)

_POLL_S = 3.0
_RETRY_S = 1.0
_ACQUIRE_AGAIN_S = 60.0


def duty_of(where: ScannerFilter, disabled: Collection[str]) -> str:
    """The duty of a process: those with the same duty share a leader. Empty means everything."""
    if where.is_empty and not disabled:
        return ""
    what = repr((where.namespace, where.instance_tag, sorted(disabled)))
    return hashlib.sha256(what.encode()).hexdigest()[:16]


class LeaderElection:
    """Decides whether this process scans. Two that scan at once only do the same work twice.

    A process whose scanners are stuck gives up its lease, but scans until another process has it.
    """

    def __init__(
        self, backend: Backend, *, duty: str = "", ttl_s: float = 1.5, healthy: Callable[[], bool]
    ) -> None:
        self.duty = duty
        self.identity = f"{socket.gethostname()}:{os.getpid()}:{new_uuid()}"
        self.scanning = asyncio.Event()
        """Set while this process should scan."""
        self.is_leader = False
        self.since: float | None = None
        """When, on the loop's clock, this process last began to scan."""
        self._lease = backend.leadership
        self._ttl_ms = max(1, round(ttl_s * 1000))
        # Renewed rarely, because a lease that expires only causes double work.
        self._renew_s = ttl_s * 2 / 3
        self._poll_s = min(_POLL_S, self._renew_s)
        self._healthy = healthy
        self._acquired_at = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Acquire, renew and watch the lease until stopped; then release it."""
        while not stop.is_set():
            try:
                pause = await self._step()
            except EngineError as error:
                log.debug(
                    "cannot renew the leader lease: %s",
                    error,
                    extra={"action": "leader_unreadable"},
                )
                pause = _RETRY_S
            await wait_until(stop, pause)
        try:
            await self.resign()
        except EngineError as error:
            # The lease expires; the next leader starts a few seconds later.
            log.debug("leader lease not released: %s", error)

    async def _step(self) -> float:
        """Check the lease once; returns the pause before the next check."""
        if self.is_leader:
            if not self._healthy():
                # Check this first: in an outage no process can take over, and it is logged.
                await self.resign()
                message = "a scanner makes no progress; other processes may take over"
                log.warning(message, extra={"action": "leader_unhealthy"})
                return self._poll_s
            if await self._renew():
                return self._renew_s
            self.is_leader = False
        left = await self._lease.remaining_ms(self.duty)
        if left is not None:
            self._follow()
            # At the end of this pause the lease is either renewed or free.
            return max(self._poll_s, left / 1000 + 0.05)
        if not self._healthy():
            self._scan()
        elif await self._acquire():
            self.is_leader = True
            self._scan()
            return self._renew_s
        else:
            self._follow()
        return self._poll_s

    async def _renew(self) -> bool:
        # Acquiring lists the leader for operators, and that list expires.
        if asyncio.get_running_loop().time() - self._acquired_at > _ACQUIRE_AGAIN_S:
            return await self._acquire()
        return await self._lease.renew(self.duty, self.identity, self._ttl_ms)

    async def _acquire(self) -> bool:
        self._acquired_at = asyncio.get_running_loop().time()
        return await self._lease.acquire(self.duty, self.identity, self._ttl_ms)

    def _scan(self) -> None:
        if not self.scanning.is_set():
            self.since = asyncio.get_running_loop().time()
            self.scanning.set()
            log.info("this process runs the scanners", extra={"action": "leader_acquired"})

    def _follow(self) -> None:
        if self.scanning.is_set():
            self.scanning.clear()
            log.info("another process runs the scanners", extra={"action": "leader_lost"})

    async def resign(self) -> None:
        if self.is_leader:
            self.is_leader = False
            await self._lease.resign(self.duty, self.identity)
