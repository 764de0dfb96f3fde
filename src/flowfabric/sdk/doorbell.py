"""Waiting for work without asking for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from flowfabric.core import keys
from flowfabric.core.errors import EngineError
from flowfabric.engine.backend import Backend
from flowfabric.scheduler.hints import Lanes
from flowfabric.valkey.transport import Connection

__all__ = ["Doorbell"]

log = logging.getLogger(__name__)

_GRACE_S = 2.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0


class Doorbell:
    """Sleeps until one of the lanes rings, at most the poll interval long.

    A ring wakes one waiting worker of the whole deployment. Rings may be lost, so a wait that
    nobody ended looks at the lanes itself: one command for a window of partitions.
    """

    def __init__(self, backend: Backend, lanes: Lanes, poll_interval_s: float) -> None:
        self._backend = backend
        self._lanes = lanes
        self._poll_s = poll_interval_s
        self._conn: Connection | None = None
        self._keys = {keys.wake(lane.lane_id): lane.lane_id for lane in lanes}
        self._pause = _FIRST_PAUSE_S

    async def wait(self) -> list[tuple[str, str]]:
        """Lanes and partitions that may hold work now; often empty."""
        if self._backend.transport.is_cluster:
            await asyncio.sleep(self._poll_s)
            return await self._look()
        try:
            conn = self._conn
            if conn is None or not conn.is_open:
                conn = self._conn = await self._backend.transport.blocking()
            reply: Any = await conn.submit(
                ("BZPOPMIN", *self._keys, self._poll_s), self._poll_s + _GRACE_S
            )
        except EngineError as error:
            log.debug("doorbell lost: %s", error)
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, _LAST_PAUSE_S)
            return [(lane.lane_id, lane.home) for lane in self._lanes]
        self._pause = _FIRST_PAUSE_S
        if reply is None:
            return await self._look()
        return [(self._keys[reply[0].decode()], f"{{fp:{reply[1].decode()}}}")]

    async def _look(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for lane in self._lanes:
            tags = lane.sweep()
            try:
                if await self._backend.any_work(lane.lane_id, tags):
                    found += [(lane.lane_id, tag) for tag in tags]
            except EngineError as error:
                log.debug("lane %s not looked at: %s", lane.lane_id, error)
        return found

    async def ring_back(self, lane_id: str, tag: str) -> None:
        """Pass a ring on that this worker cannot answer."""
        key = keys.wake(lane_id)
        partition = tag[4:-1]
        try:
            await self._backend.transport.call("ZADD", key, "NX", 0, partition, key=key)
        except EngineError as error:
            log.debug("ring not passed on: %s", error)

    async def aclose(self) -> None:
        """Close the blocking connection."""
        if self._conn is not None:
            await self._conn.aclose()
            self._conn = None
