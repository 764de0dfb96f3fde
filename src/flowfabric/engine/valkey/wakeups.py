"""Doorbells: a blocking pop on a single server, sharded channels in a cluster."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowfabric.core.capabilities import Offer
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import new_uuid, validate_lane
from flowfabric.engine.api import check
from flowfabric.engine.api.places import Doorbell, WorkPlace
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, call_each, places_of, raised, split, text
from flowfabric.engine.valkey.pages import chunks
from flowfabric.engine.valkey.places import ValkeyPlaces
from flowfabric.valkey.transport import Connection

log = logging.getLogger(__name__)
_GRACE_S = 2.0
_PEEKED = 16
_LANES_RUNG = 100
_PLACES_AT_ONCE = 500
_BELLS_KNOWN = 10_000
_LISTEN_S = 60
"""How long a listener is told of new bells; it asks again well before."""


class ValkeyWakeups:
    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    def listen(self, lanes: Iterable[str]) -> Doorbell:
        if self._calls.transport.is_cluster:
            return _ClusterDoorbell(self._calls, self._places, lanes)
        return _ServerDoorbell(self._calls, lanes)

    async def find_work(self, places: Sequence[WorkPlace], likely: int = 1) -> list[WorkPlace]:
        places = [
            (validate_lane(lane_id), self._calls.checked_tag(tag, "places"))
            for lane_id, tag in check.pairs(places, "places")
        ]
        if self._calls.transport.is_cluster:
            return places
        first = check.whole(likely, "likely", 1)
        found = await asyncio.gather(
            *(self._narrow(part, first) for part in chunks(places, _PLACES_AT_ONCE))
        )
        return [place for part in found for place in part]

    async def _narrow(self, places: Sequence[WorkPlace], first: int) -> Sequence[WorkPlace]:
        """Those of the places that have work, found by asking about parts of the list."""
        if not places or not await self._any_work(places):
            return ()
        if len(places) == 1:
            return places
        parts = (places[:first], places[first:])
        found = await asyncio.gather(
            *(self._narrow(part, max(1, len(part) // 2)) for part in parts)
        )
        return (*found[0], *found[1])

    async def _any_work(self, places: Sequence[WorkPlace]) -> bool:
        indexes = ("eligible", "sigs", "reclaimable")
        names = [keys.lane(tag, lane_id, index) for lane_id, tag in places for index in indexes]
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
    """Which rings concern a listener: those of its lanes, for work that it may take."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self._lanes = tuple(lanes)
        self._offer = Offer(None)
        self._lane_of: dict[str, str | None] = {}

    def hear(self, offer: Offer) -> None:
        if offer is not self._offer:
            self._offer = offer
            self._lane_of.clear()

    def _lane(self, bell: str) -> str | None:
        """The lane of a bell that concerns this listener."""
        if bell not in self._lane_of:
            if len(self._lane_of) >= _BELLS_KNOWN:
                self._lane_of.clear()
            lane_id, signature = keys.bell_parts(bell)
            concerns = lane_id in self._lanes and self._offer.covers(signature)
            self._lane_of[bell] = lane_id if concerns else None
        return self._lane_of[bell]


class _ServerDoorbell(_Bells):
    """Pops rings from a sorted set per bell: each ring wakes one listener of the deployment.

    It knows the bells that rang lately, and hears of new ones through a sorted set of its own.
    """

    heard_by_all = False

    def __init__(self, calls: FunctionCalls, lanes: Iterable[str]) -> None:
        super().__init__(lanes)
        self._calls = calls
        self._conn: Connection | None = None
        self._listener = new_uuid()
        self._ear = keys.ear(self._listener)
        self._known: list[str] = []
        self._read_at = -math.inf

    async def wait(self, timeout_s: float) -> list[WorkPlace]:
        until = time.monotonic() + timeout_s
        while True:
            conn = self._conn
            if conn is None or not conn.is_open:
                conn = self._conn = await self._calls.transport.blocking()
                self._read_at = -math.inf
            if time.monotonic() - self._read_at >= _LISTEN_S / 3:
                await self._learn()
            # The shortest wait that is not forever.
            left = max(0.001, until - time.monotonic())
            lanes = {keys.wake(bell): lane for bell in self._known if (lane := self._lane(bell))}
            try:
                reply: Any = await conn.submit(
                    ("BZPOPMIN", self._ear, *lanes, left), timeout_s + _GRACE_S
                )
            except TransportError as error:
                await self._mend(error)
                continue
            if reply is None:
                return []
            lane_id = lanes.get(reply[0].decode())
            if lane_id is not None:
                return [_place(lane_id, reply[1].decode())]
            # There are new bells, each of which rings for one of those who then listen to it.
            self._read_at = -math.inf

    async def _mend(self, error: TransportError) -> None:
        """Remove keys that are no bells, if that was the error."""
        if not error.message.startswith("WRONGTYPE"):
            raise error
        log.warning(
            *("removed damaged doorbells: %s", error.message), extra={"action": "bells_mended"}
        )
        heard = (bell for bell in self._known if self._lane(bell))
        await self._learn(dict.fromkeys((*self._lanes, *heard)))

    async def _learn(self, damaged: Iterable[str] = ()) -> None:
        """Read which bells there are, and be told of new ones from now on."""
        self._read_at = time.monotonic()
        args = (self._listener, _LISTEN_S * 1000, *damaged)
        self._known = await self._calls.ask(
            *("ff_listen", "{fp:0}", args),
            lambda reply: [*self._lanes, *map(text, reply[2])],
            op="listen",
        )

    async def peek(self) -> list[WorkPlace]:
        found: list[WorkPlace] = []
        # Not those with a signature, which may be many: sweeps of a busy worker find their work.
        for lane_id in self._lanes if self._offer.serves("default") else ():
            key = keys.wake(lane_id)
            try:
                rings: Any = await self._calls.transport.call(
                    "ZRANGE", key, 0, _PEEKED - 1, key=key
                )
            except TransportError as error:
                await self._mend(error)
                continue
            found += [_place(lane_id, ring.decode()) for ring in rings]
        return found

    async def aclose(self) -> None:
        if self._conn is not None:
            await self._conn.aclose()
            self._conn = None


def _place(lane_id: str, partition: str) -> WorkPlace:
    return lane_id, f"{{fp:{partition}}}"


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
        lane_id = self._lane(bell)
        if lane_id is not None:
            self._rings[lane_id, tag] = None
            self._rung.set()

    async def aclose(self) -> None:
        self._moved = True
        conns, self._conns = self._conns, []
        for conn in conns:
            conn.close()
        await asyncio.gather(*(conn.aclose() for conn in conns))
