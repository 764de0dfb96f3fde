"""Hearing rings in a cluster, where each partition rings on a channel of its own."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from flowfabric.core.errors import TransportError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scheduler.hints import Lanes
from flowfabric.valkey.transport import Connection

log = logging.getLogger(__name__)


class ClusterBell:
    """Subscribed to the channels of all partitions, with one connection per primary.

    Every idle worker hears every ring of its lanes: a blocking pop that wakes only one cannot
    span slots.
    """

    def __init__(self, backend: ValkeyBackend, lanes: Lanes) -> None:
        self._backend = backend
        self._lanes = {lane.lane_id for lane in lanes}
        self._conns: list[Connection] = []
        self._rings: dict[tuple[str, str], None] = {}
        self._rung = asyncio.Event()
        self._moved = True

    async def wait(self, timeout: float) -> list[tuple[str, str]]:
        """The lanes and partitions that rang; empty when none did in time."""
        if self._moved or not all(conn.is_open for conn in self._conns):
            await self._subscribe()
        try:
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()
        rings, self._rings = self._rings, {}
        return list(rings)

    async def _subscribe(self) -> None:
        await self.aclose()
        left = [f"{{fp:{partition}}}" for partition in range(self._backend.counts.flow)]
        refused = ""
        while left:
            conn = await self._backend.transport.blocking(left[0], on_push=self._hear)
            self._conns.append(conn)
            outcomes = await asyncio.gather(
                *(conn.submit(("SSUBSCRIBE", keys.wake_channel(tag))) for tag in left),
                return_exceptions=True,
            )
            # The others are answered by the name of the primary that has them.
            rest = [
                tag
                for tag, outcome in zip(left, outcomes, strict=True)
                if isinstance(outcome, BaseException)
            ]
            if len(rest) == len(left):
                if refused == left[0]:
                    raise TransportError("cluster", f"no primary takes subscriptions for {refused}")
                # It has moved: a call that is redirected learns where to.
                refused = left[0]
                await self._backend.transport.call("EXISTS", refused, key=refused)
            left = rest
        self._moved = False
        # Whatever rang before was not heard.
        for tag in await self._backend.places.used_partitions():
            for lane_id in self._lanes:
                self._rings[lane_id, tag] = None
                self._rung.set()

    def _hear(self, push: list[Any]) -> None:
        if push[0] == b"sunsubscribe":
            # The slot went to another primary.
            self._moved = True
            self._rung.set()
        elif push[0] == b"smessage":
            lane_id = push[2].decode()
            if lane_id in self._lanes:
                self._rings[lane_id, keys.wake_tag(push[1].decode())] = None
                self._rung.set()

    async def aclose(self) -> None:
        """Close every connection."""
        self._moved = True
        conns, self._conns = self._conns, []
        for conn in conns:
            conn.close()
        await asyncio.gather(*(conn.aclose() for conn in conns))
