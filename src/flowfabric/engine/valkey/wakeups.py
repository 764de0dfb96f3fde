"""Doorbells: a blocking pop on a single server, sharded channels in a cluster."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.errors import TransportError
from flowfabric.core.ids import validate_lane
from flowfabric.engine.api import check
from flowfabric.engine.api.places import Doorbell, WorkPlace
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, call_each, places_of, raised, split
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.valkey.transport import Connection, Transport

_GRACE_S = 2.0
_PEEKED = 16
_LANES_RUNG = 100


class ValkeyWakeups:
    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    def listen(self, lanes: Iterable[str]) -> Doorbell:
        if self._calls.transport.is_cluster:
            return _ClusterDoorbell(self._calls, self._places, lanes)
        return _ServerDoorbell(self._calls.transport, lanes)

    async def find_work(self, lane_id: str, tags: Sequence[str]) -> list[str]:
        validate_lane(lane_id)
        tags = [self._calls.checked_tag(tag, "tags") for tag in check.listed(tags, "tags")]
        if self._calls.transport.is_cluster:
            return tags
        # Most often it is the first: the lane's own partition.
        return list(await self._narrow(lane_id, tags, 1))

    async def _narrow(self, lane_id: str, tags: Sequence[str], first: int) -> Sequence[str]:
        """Those of the partitions that have work, found by asking about parts of the list."""
        if not await self._any_work(lane_id, tags):
            return ()
        if len(tags) == 1:
            return tags
        parts = (tags[:first], tags[first:])
        found = await asyncio.gather(
            *(self._narrow(lane_id, part, len(part) // 2) for part in parts)
        )
        return (*found[0], *found[1])

    async def _any_work(self, lane_id: str, tags: Sequence[str]) -> bool:
        if not tags:
            return False
        indexes = ("eligible", "sigs", "reclaimable")
        names = [keys.lane(tag, lane_id, index) for tag in tags for index in indexes]
        count: Any = await self._calls.transport.call("EXISTS", *names, key=names[0])
        return count > 0

    async def ring_waiting(self, lanes: Mapping[str, Sequence[str]]) -> int:
        places = [(tag, lane) for tag, names in lanes.items() for lane in names]
        groups = split(places, _LANES_RUNG, apart=self._calls.transport.is_cluster)
        return sum(raised(await call_each(groups, self._ring)))

    async def _ring(self, places: list[tuple[str, str]]) -> int:
        tag, args = places[0][0], places_of(places)
        return await self._calls.ask(
            "ff_ring_waiting", tag, args, lambda reply: int(reply[2]), op="ring_waiting"
        )


class _Bells:
    """What a listener hears: the rings of lanes, and those for some of their tasks."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self._lanes = tuple(lanes)
        self._tasks: Sequence[str] = ()
        self._lane_of = {lane: lane for lane in self._lanes}

    def hear(self, tasks: Sequence[str]) -> None:
        if tasks is not self._tasks:
            self._tasks = tasks
            kinds = ("", *tasks)
            self._lane_of = {keys.bell(lane, kind): lane for lane in self._lanes for kind in kinds}


class _ServerDoorbell(_Bells):
    """Pops rings from a sorted set per lane: each ring wakes one listener of the deployment."""

    heard_by_all = False

    def __init__(self, transport: Transport, lanes: Iterable[str]) -> None:
        super().__init__(lanes)
        self._transport = transport
        self._conn: Connection | None = None

    async def wait(self, timeout_s: float) -> list[WorkPlace]:
        conn = self._conn
        if conn is None or not conn.is_open:
            conn = self._conn = await self._transport.blocking()
        names = {keys.wake(bell): lane_id for bell, lane_id in self._lane_of.items()}
        reply: Any = await conn.submit(("BZPOPMIN", *names, timeout_s), timeout_s + _GRACE_S)
        return [] if reply is None else [_place(names[reply[0].decode()], reply[1])]

    async def peek(self) -> list[WorkPlace]:
        found: list[WorkPlace] = []
        # Not those of tasks, which may be many: the sweeps of a busy worker find their work.
        for lane_id in self._lanes:
            key = keys.wake(lane_id)
            rings: Any = await self._transport.call("ZRANGE", key, 0, _PEEKED - 1, key=key)
            found += [_place(lane_id, ring) for ring in rings]
        return found

    async def aclose(self) -> None:
        if self._conn is not None:
            await self._conn.aclose()
            self._conn = None


def _place(lane_id: str, ring: bytes) -> WorkPlace:
    return lane_id, f"{{fp:{ring.decode()}}}"


class _ClusterDoorbell(_Bells):
    """Subscribes to the channels of all partitions: a blocking pop cannot span slots."""

    heard_by_all = True

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces, lanes: Iterable[str]) -> None:
        super().__init__(lanes)
        self._calls = calls
        self._places = places
        self._conns: list[Connection] = []
        self._rings: dict[WorkPlace, None] = {}
        self._rung = asyncio.Event()
        self._moved = True

    @property
    def connected(self) -> bool:
        return not self._moved and all(conn.is_open for conn in self._conns)

    async def wait(self, timeout_s: float) -> list[WorkPlace]:
        if not self.connected:
            await self._subscribe()
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()
        rings, self._rings = self._rings, {}
        return list(rings)

    async def peek(self) -> list[WorkPlace]:
        return []

    async def _subscribe(self) -> None:
        await self.aclose()
        transport = self._calls.transport
        left = [f"{{fp:{partition}}}" for partition in range(self._calls.counts.flow)]
        refused = ""
        while left:
            conn = await transport.blocking(left[0], on_push=self._hear)
            self._conns.append(conn)
            outcomes = await asyncio.gather(
                *(conn.submit(("SSUBSCRIBE", keys.wake(tag))) for tag in left),
                return_exceptions=True,
            )
            # Another primary refuses the partitions that it does not hold.
            answers = zip(left, outcomes, strict=True)
            rest = [tag for tag, answer in answers if isinstance(answer, BaseException)]
            if len(rest) == len(left):
                if refused == left[0]:
                    raise TransportError("cluster", f"no primary takes subscriptions for {refused}")
                # The slot has moved: a call that is redirected learns where to.
                refused = left[0]
                await transport.call("EXISTS", refused, key=refused)
            left = rest
        self._moved = False
        # Earlier rings were missed.
        for tag in await self._places.used_partitions():
            for lane_id in self._lanes:
                self._ring(lane_id, tag)

    def _hear(self, push: list[Any]) -> None:
        if push[0] == b"sunsubscribe":
            # The slot went to another primary.
            self._moved = True
            self._rung.set()
        elif push[0] == b"smessage":
            self._ring(push[2].decode(), keys.wake_tag(push[1].decode()))

    def _ring(self, bell: str, tag: str) -> None:
        lane_id = self._lane_of.get(bell)
        if lane_id is not None:
            self._rings[lane_id, tag] = None
            self._rung.set()

    async def aclose(self) -> None:
        self._moved = True
        conns, self._conns = self._conns, []
        for conn in conns:
            conn.close()
        await asyncio.gather(*(conn.aclose() for conn in conns))
