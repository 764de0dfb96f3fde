"""Waiting for work without asking for it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from flowfabric.core.errors import EngineError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scheduler.hints import Lanes
from flowfabric.scheduler.sweep import find_work
from flowfabric.sdk.cluster_bell import ClusterBell
from flowfabric.valkey.transport import Connection

log = logging.getLogger(__name__)

_GRACE_S = 2.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
_GLANCE = 16

Place = tuple[str, str]
"""A lane and a partition's tag."""


class Doorbell:
    """Sleeps until one of the lanes rings, at most the poll interval long.

    A ring wakes one waiting worker of the whole deployment. Rings may be lost, so a wait that
    nobody ended looks at the lanes itself: one command for a window of partitions.
    """

    def __init__(self, backend: ValkeyBackend, lanes: Lanes, poll_interval_s: float) -> None:
        self._backend = backend
        self._lanes = lanes
        self._poll_s = poll_interval_s
        self._conn: Connection | None = None
        cluster = backend.transport.is_cluster
        self._cluster = ClusterBell(backend, lanes) if cluster else None
        self._keys = {keys.wake(lane.lane_id): lane.lane_id for lane in lanes}
        self._pause = _FIRST_PAUSE_S
        self._rung: set[Place] = set()
        self._passed: dict[Place, float] = {}

    async def wait(self) -> list[Place]:
        """Lanes and partitions that may hold work now; often empty."""
        try:
            if self._cluster is None:
                rings = await self._pop()
            else:
                rings = await self._cluster.wait(self._poll_s)
        except EngineError as error:
            log.debug("doorbell lost: %s", error)
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, _LAST_PAUSE_S)
            return [(lane.lane_id, lane.home) for lane in self._lanes]
        self._pause = _FIRST_PAUSE_S
        return rings or await self._sweep()

    async def _pop(self) -> list[Place]:
        conn = self._conn
        if conn is None or not conn.is_open:
            conn = self._conn = await self._backend.transport.blocking()
        reply: Any = await conn.submit(
            ("BZPOPMIN", *self._keys, self._poll_s), self._poll_s + _GRACE_S
        )
        if reply is None:
            return []
        place = (self._keys[reply[0].decode()], f"{{fp:{reply[1].decode()}}}")
        self._rung.add(place)
        return [place]

    async def _sweep(self) -> list[Place]:
        found: list[Place] = []
        for lane in self._lanes:
            try:
                found += [(lane.lane_id, tag) for tag in await find_work(self._backend, lane)]
            except EngineError as error:
                log.debug("lane %s not looked at: %s", lane.lane_id, error)
        return found

    async def glance(self) -> list[Place]:
        """What rings now, left ringing for others, and what a sweep finds: for a busy worker."""
        found = await self._sweep()
        if self._cluster is not None:
            return found
        for key, lane_id in self._keys.items():
            try:
                rings: Any = await self._backend.transport.call(
                    "ZRANGE", key, 0, _GLANCE - 1, key=key
                )
                found += [(lane_id, f"{{fp:{ring.decode()}}}") for ring in rings]
            except EngineError as error:
                log.debug("doorbell of %s not looked at: %s", lane_id, error)
        return found

    async def pass_on(self, lane_id: str, tag: str) -> None:
        """A ring led to nothing this worker may take: let another one see, once per interval.

        The one that hears it again within that time keeps it, so a ring for work that nobody can
        take goes round the idle workers once and then ends.
        """
        place = (lane_id, tag)
        if place not in self._rung:
            return
        self._rung.discard(place)
        now = time.monotonic()
        passed = self._passed.get(place)
        if passed is not None and now - passed < self._poll_s:
            return
        if await self.ring_back(lane_id, tag):
            self._passed[place] = now

    async def ring_back(self, lane_id: str, tag: str) -> bool:
        """Ring for another worker, behind the rings that wait already; whether work waits there.

        The engine rings, like every other time: rings are in the order of the server's clock.
        """
        if self._cluster is not None:
            # Everyone heard it.
            return False
        self._rung.discard((lane_id, tag))
        try:
            return await self._backend.claims.ring_waiting({tag: [lane_id]}) > 0
        except EngineError as error:
            log.debug("ring not passed on: %s", error)
            return False

    async def aclose(self) -> None:
        """Close the blocking connection."""
        if self._conn is not None:
            await self._conn.aclose()
            self._conn = None
        if self._cluster is not None:
            await self._cluster.aclose()
