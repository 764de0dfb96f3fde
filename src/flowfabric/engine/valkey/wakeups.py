"""Doorbells: a blocking pop on a single server, sharded channels in a cluster."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flowfabric.core.capabilities import Offer
from flowfabric.core.errors import EngineError, TransportError
from flowfabric.core.ids import new_uuid, validate_lane
from flowfabric.engine.api import check
from flowfabric.engine.api.places import Doorbell, WorkPlace
from flowfabric.engine.outage import Outage, is_permanent
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, call_each, places_of, raised, split, text
from flowfabric.engine.valkey.pages import chunks
from flowfabric.valkey.faults import RedirectError
from flowfabric.valkey.transport import Connection

log = logging.getLogger(__name__)
_GRACE_S = 2.0
_PEEKED = 16
_LANES_RUNG = 100
_SLOW_S = 0.05
"""After how long a primary no longer holds up the others."""
_RETRY_S = 1.0
_FIND_S = 0.25
"""How long a node of a cluster may take to answer where work waits."""
_PLACES_AT_ONCE = 500
_BELLS_KNOWN = 10_000
_LISTEN_S = 60
"""How long a listener is told of new bells; it asks again well before."""


class ValkeyWakeups:
    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls

    def listen(self, lanes: Iterable[str]) -> Doorbell:
        if self._calls.transport.is_cluster:
            return _ClusterDoorbell(self, self._calls, lanes)
        return _ServerDoorbell(self._calls, lanes)

    async def find_work(self, places: Sequence[WorkPlace], likely: int = 1) -> list[WorkPlace]:
        places = [
            (validate_lane(lane_id), self._calls.checked_tag(tag, "places"))
            for lane_id, tag in check.pairs(places, "places")
        ]
        if self._calls.transport.is_cluster:
            return await self._find_apart(places)
        first = check.whole(likely, "likely", 1)
        parts = await asyncio.gather(
            *(self._narrow(part, first) for part in chunks(places, _PLACES_AT_ONCE))
        )
        return [place for part in parts for place in part]

    async def _find_apart(self, places: Sequence[WorkPlace]) -> list[WorkPlace]:
        """Those of the places that have work; a node that is away does not hide the others'."""
        found = await asyncio.gather(
            *(self._any_work([place], _FIND_S) for place in places), return_exceptions=True
        )
        answers = [answer for answer in found if not isinstance(answer, TransportError)]
        for answer in answers or found:
            if isinstance(answer, BaseException):
                raise answer
        return [place for place, answer in zip(places, found, strict=True) if answer is True]

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

    async def _any_work(self, places: Sequence[WorkPlace], timeout: float | None = None) -> bool:
        indexes = ("eligible", "sigs", "reclaimable")
        names = [keys.lane(tag, lane_id, index) for lane_id, tag in places for index in indexes]
        count: Any = await self._calls.transport.call(
            "EXISTS", *names, key=names[0], timeout=timeout
        )
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
        self._offer = Offer("")
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

    It knows the bells that rang recently, and learns of new ones through a sorted set of its own.
    """

    sweep_width = 32
    many_servers = False

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
            # There are new bells; each ring wakes one of the listeners that know its bell.
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
        """Read which bells exist, and subscribe to the announcements of new ones."""
        self._read_at = time.monotonic()
        args = (self._listener, _LISTEN_S * 1000, *damaged)
        self._known = await self._calls.ask(
            *("ff_listen", "{fp:0}", args),
            lambda reply: [*self._lanes, *map(text, reply[2])],
            op="listen",
        )

    async def peek(self) -> list[WorkPlace]:
        found: list[WorkPlace] = []
        # Only plain bells. Bells with a signature may be many; sweeps find that work.
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


@dataclass(eq=False)
class _Primary:
    """A primary that a listener hears."""

    tag: str
    """One of its partitions."""
    conn: Connection = field(init=False)
    tags: list[str] = field(default_factory=list[str])
    """Its partitions."""
    registering: asyncio.Task[None] | None = None
    register_at: float = -math.inf
    """When to register there again."""


class _ClusterDoorbell(_Bells):
    """Registers at each primary as idle; a ring there wakes one of the registered listeners.

    A blocking pop cannot span slots, so rings come on channels: each partition has one for every
    listener, and one on which it calls all of them to register again.

    A primary that is slow or away does not keep it from hearing the others.
    """

    sweep_width = 1
    many_servers = True

    def __init__(self, wakeups: ValkeyWakeups, calls: FunctionCalls, lanes: Iterable[str]) -> None:
        super().__init__(lanes)
        self._wakeups = wakeups
        self._calls = calls
        self._listener = new_uuid()
        self._primaries: deque[_Primary] = deque()
        self._rings: list[WorkPlace] = []
        self._woken = asyncio.Event()
        self._waiting = False
        self._moved = True
        self._missing: set[str] = set()
        """The partitions that it does not hear."""
        self._joining: asyncio.Task[None] | None = None
        self._join_at = -math.inf
        self._gained = False
        """Whether it hears partitions where it may have missed rings."""
        self._fault: EngineError | None = None
        """Why the last attempt to join a primary, or to register there, failed."""
        self._passing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether it has subscribed on every primary."""
        return not (self._moved or self._missing) and not any(map(self._lost, self._primaries))

    @property
    def listening(self) -> bool:
        """Whether a ring on any primary would wake it."""
        now = time.monotonic()
        known = [primary.register_at > now for primary in self._primaries]
        return self._waiting and self.connected and bool(known) and all(known)

    def hear(self, offer: Offer) -> None:
        if offer is not self._offer:
            for primary in self._primaries:
                primary.register_at = -math.inf
        super().hear(offer)

    async def wait(self, timeout_s: float) -> list[WorkPlace]:
        heard: list[WorkPlace] = []
        self._waiting = True
        try:
            await self._await_ring(time.monotonic() + timeout_s)
            heard = self._rings[:1]
            return heard
        finally:
            self._waiting = False
            for place in self._rings[len(heard) :]:
                self._pass_on(place)
            self._rings.clear()

    async def _await_ring(self, until: float) -> None:
        while True:
            self._woken.clear()
            await self._join()
            if self._gained:
                # The caller looks for itself first.
                self._gained, until = False, -math.inf
            await self._register()
            now = time.monotonic()
            if self._rings or self._moved or self._gained or now >= until:
                return
            soonest = min(until, *(primary.register_at for primary in self._primaries))
            if self._missing and self._joining is None:
                soonest = min(soonest, self._join_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, soonest - now)):
                    await self._woken.wait()

    def _lost(self, primary: _Primary) -> bool:
        """Whether its connection ended, or another node has taken its place."""
        # The connection to a hanging node stays open when its replica takes over.
        serving = self._calls.transport.peer_of(primary.tag)
        return not primary.conn.is_open or serving not in (None, primary.conn.peer)

    async def _join(self) -> None:
        """Hear all partitions, or at least those of the primaries that can be reached."""
        if self._moved:
            await self._hang_up()
            self._moved = False
            self._missing = {f"{{fp:{n}}}" for n in range(self._calls.counts.flow)}
            self._join_at = -math.inf
        for primary in [each for each in self._primaries if self._lost(each)]:
            self._primaries.remove(primary)
            await primary.conn.aclose()
            self._missing.update(primary.tags)
        if not self._missing:
            return
        started = self._joining is None and time.monotonic() >= self._join_at
        if started:
            self._join_at = time.monotonic() + _RETRY_S
            self._joining = asyncio.create_task(self._join_missing())
            self._joining.add_done_callback(self._joined)
        if self._joining is not None and (started or not self._primaries):
            await asyncio.wait([self._joining], timeout=_SLOW_S if self._primaries else _FIND_S)
        if not self._primaries or (self._fault is not None and is_permanent(self._fault)):
            raise self._fault or TransportError("timeout", "no primary takes subscriptions")

    def _joined(self, _: asyncio.Task[None]) -> None:
        self._joining = None
        self._woken.set()

    async def _join_missing(self) -> None:
        primaries: dict[str | None, list[str]] = {}
        for tag in sorted(self._missing):
            primaries.setdefault(self._calls.transport.peer_of(tag), []).append(tag)
        await asyncio.gather(*map(self._try_to_subscribe, primaries.values()))

    async def _try_to_subscribe(self, tags: list[str]) -> None:
        try:
            await self._subscribe_to(tags)
            self._fault = None
        except EngineError as error:
            log.debug("cannot hear a primary: %s", error)
            self._fault = error

    async def peek(self) -> list[WorkPlace]:
        return []

    async def _register(self) -> None:
        """Register again where a ring has woken it, until a primary returns a ring that waited."""
        for _ in range(len(self._primaries)):
            primary, now = self._primaries[0], time.monotonic()
            self._primaries.rotate(-1)
            if self._rings or primary.register_at > now or primary.registering is not None:
                continue
            # Set first: a ring may arrive before the reply.
            primary.register_at = now + _LISTEN_S / 3
            primary.registering = asyncio.create_task(self._register_at(primary))
            await asyncio.wait([primary.registering], timeout=_SLOW_S)
            if self._fault is not None and not Outage.causes(self._fault):
                self._fault, fault = None, self._fault
                raise fault

    async def _register_at(self, primary: _Primary) -> None:
        args = (self._listener, _LISTEN_S * 1000, self._offer.text, *sorted(self._lanes))
        try:
            ring = await self._calls.ask(
                *("ff_listen_here", primary.tag, args),
                lambda reply: [*map(text, reply[2:])],
                op="listen",
            )
            if ring:
                primary.register_at = -math.inf
                self._ring(*ring)
        except EngineError as error:
            log.debug("cannot register as idle: %s", error)
            primary.register_at = time.monotonic() + _RETRY_S
            self._fault = error
        finally:
            primary.registering = None
            self._woken.set()

    async def _subscribe_to(self, left: list[str]) -> None:
        transport = self._calls.transport
        refused = ""
        while left:
            primary = _Primary(left[0])
            conn = await transport.blocking(left[0], on_push=partial(self._hear, primary))
            primary.conn = conn
            try:
                taken = await self._subscribe_on(conn, left)
            except BaseException:
                await conn.aclose()
                raise
            if not taken:
                await conn.aclose()
                if refused == left[0]:
                    raise TransportError("cluster", f"no primary takes subscriptions for {refused}")
                # The slot has moved: a redirected call updates the slot map.
                refused = left[0]
                await transport.call("EXISTS", refused, key=refused)
                continue
            primary.tag, primary.tags = taken[0], taken
            self._primaries.append(primary)
            self._missing.difference_update(taken)
            self._gained = True
            self._woken.set()
            left = [tag for tag in left if tag in self._missing]

    async def _subscribe_on(self, conn: Connection, tags: list[str]) -> list[str]:
        """Subscribe to the partitions that a primary holds; none if it is a replica."""
        *outcomes, leads = await asyncio.gather(
            *(conn.submit(("SSUBSCRIBE", keys.wake(tag))) for tag in tags),
            conn.submit(("EXISTS", tags[0])),
            return_exceptions=True,
        )
        # A replica takes subscriptions, but those who wake listeners do not see them.
        if isinstance(leads, RedirectError) and not leads.asking:
            return []
        # Another primary refuses the partitions that it does not hold.
        answers = zip(tags, outcomes, strict=True)
        taken = [tag for tag, answer in answers if not isinstance(answer, BaseException)]
        own = (keys.own_wake(tag, self._listener) for tag in taken)
        await asyncio.gather(*(conn.submit(("SSUBSCRIBE", channel)) for channel in own))
        return taken

    def _hear(self, primary: _Primary, push: list[Any]) -> None:
        if push[0] == b"sunsubscribe":
            # The slot went to another primary.
            self._moved = True
        elif push[0] == b"smessage":
            primary.register_at = -math.inf
            if bell := push[2].decode():
                self._ring(bell, keys.wake_tag(push[1].decode()))
        self._woken.set()

    def _ring(self, bell: str, tag: str) -> None:
        if self._waiting and (lane_id := self._lane(bell)) is not None:
            self._rings.append((lane_id, tag))
        else:
            self._pass_on((keys.bell_parts(bell)[0], tag))

    def _pass_on(self, place: WorkPlace) -> None:
        """Ring again for others: this listener has become busy since it registered."""
        task = asyncio.create_task(self._ring_again(place))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _ring_again(self, place: WorkPlace) -> None:
        lane_id, tag = place
        try:
            await self._wakeups.ring_waiting({tag: [lane_id]})
        except EngineError as error:
            log.debug("could not wake another worker: %s", error)

    async def _hang_up(self) -> None:
        self._moved = True
        primaries, self._primaries = self._primaries, deque()
        tasks = [primary.registering for primary in primaries] + [self._joining]
        for primary in primaries:
            primary.conn.close()
        under_way = [task for task in tasks if task is not None]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        # The attempt that was cancelled may have joined more.
        primaries.extend(self._primaries)
        self._primaries.clear()
        await asyncio.gather(*(primary.conn.aclose() for primary in primaries))

    async def aclose(self) -> None:
        await self._hang_up()
        await asyncio.gather(*self._passing)
