"""The places in use; scanners and listings read no others."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from flowfabric.core import errors, ids, partition
from flowfabric.core.text import lossless
from flowfabric.engine.api import check
from flowfabric.engine.api.places import Places
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, text
from flowfabric.engine.valkey.pages import chunks
from flowfabric.engine.valkey.placements import Placements

log = logging.getLogger(__name__)

_AT_ONCE = 500
# A process keeps registering what it used within this time.
_FORGET_S = 300.0
_REPEAT_S = 10.0
_REPEAT_WAIT_S = 0.5
"""How long a call waits for that. In a cluster, the registries may be on a node that is away."""
KEPT = "kept"
"""The stamp of a lane that was declared or has settings: it stays registered when it is empty."""
ANYWHERE = "*"
"""Stands for all partitions in entries about a lane as a whole."""
MAX_LANES = 10_000
"""The most lanes of a deployment."""


class ValkeyPlaces(Places):
    """Registers places before their first use and repeats that while they are used.

    A failover to a lagging replica silently loses registrations; repeating restores them.
    A place that is no longer repeated leaves the registry once it is empty.
    """

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self.placements = Placements(calls.counts)
        self.known_places: dict[str, set[str]] = {}
        self.known_namespaces: set[str] = set()
        # Used in the last period, not yet in this one.
        self._older_places: dict[str, set[str]] = {}
        self._forget_at: float | None = None
        # When, on the monotonic clock, to register everything again; None: at the next call.
        self._repeat_at: float | None = None
        self._repeating: asyncio.Task[None] | None = None

    async def register_places(self, places: Mapping[str, Iterable[str]]) -> None:
        check.instance(places, Mapping, "places")
        wanted = {
            self._calls.checked_tag(tag, "places"): set(ids.validate_lanes(lanes))
            for tag, lanes in places.items()
        }
        if self._repeat_is_due():
            await self._try_again()
        new = {
            tag: lanes - self.known_places.get(tag, set())
            for tag, lanes in wanted.items()
            if tag not in self.known_places or not lanes <= self.known_places[tag]
        }
        if not new:
            return
        refused = await self._store(new)
        for tag, lanes in new.items():
            self.known_places.setdefault(tag, set()).update(lanes - refused)
        if refused:
            raise lane_limit(min(refused))

    async def _try_again(self) -> None:
        """Register again. The caller may continue if this fails: its own places are registered."""
        if self._repeating is None:
            self._repeating = asyncio.create_task(self.register_again())
            self._repeating.add_done_callback(self._repeated)
            await asyncio.wait([self._repeating], timeout=_REPEAT_WAIT_S)

    def _repeated(self, task: asyncio.Task[None]) -> None:
        self._repeating = None
        if not task.cancelled() and (error := task.exception()) is not None:
            # The next call tries again.
            log.debug("could not register places again: %s", error)

    async def aclose(self) -> None:
        """Stop registering again."""
        if self._repeating is not None:
            self._repeating.cancel()
            await asyncio.wait([self._repeating])

    async def register_again(self) -> None:
        now = time.monotonic()
        # Set first: concurrent calls must not repeat it too.
        self._repeat_at = now + _REPEAT_S
        # Copies: another thread may share the places and add to them.
        used = {tag: lanes.copy() for tag, lanes in self.known_places.copy().items()}
        for tag, lanes in self._older_places.items():
            used.setdefault(tag, set()).update(lanes)
        try:
            refused = await self._store(used)
            await add_names(self._calls, keys.NAMESPACES, self.known_namespaces.copy())
        except BaseException:
            self._repeat_at = None
            raise
        for lanes in self.known_places.copy().values():
            lanes.difference_update(refused)
        if self._forget_at is None or now >= self._forget_at:
            self._forget_at = now + _FORGET_S
            self._older_places = self.known_places.copy()
            self.known_places.clear()

    def _repeat_is_due(self) -> bool:
        return self._repeat_at is None or time.monotonic() >= self._repeat_at

    async def _store(self, places: Mapping[str, set[str]]) -> set[str]:
        """Write the registries; returns the lanes that did not fit."""
        refused: set[str] = set()
        pairs = [(_number(tag), lane) for tag, lanes in places.items() for lane in sorted(lanes)]
        for part in chunks(pairs, _AT_ONCE):
            refused.update(await self._stamp(part))
        await add_names(self._calls, keys.PARTITIONS, map(_number, places))
        return refused

    async def _stamp(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Register pairs of partition number and lane; returns the lanes that did not fit."""
        refused, now, placements = await _stamp(self._calls, pairs)
        self.placements.learn({lane for _, lane in pairs}, now, placements)
        return refused

    async def read_placements(self, lanes: Iterable[str]) -> None:
        """Learn where the executions of lanes are created; registers them."""
        counts = self._calls.counts
        pairs = [(str(partition.solo_partition(lane, counts)), lane) for lane in lanes]
        for part in chunks(pairs, _AT_ONCE):
            await self._stamp(part)

    async def learn_lane(self, lane_id: str) -> None:
        if not self.placements.knows(check.text(lane_id, "lane_id")):
            await self.read_placements([ids.validate_lane(lane_id)])

    def shards(self, lane_id: str) -> int:
        return self.placements.of(lane_id).shards

    async def register(self, tag: str, lanes: set[str]) -> None:
        """`register_places` for the hot path: usually one dictionary lookup."""
        known = self.known_places.get(tag)
        if known is None or not lanes <= known or self._repeat_is_due():
            await self.register_places({tag: lanes})

    async def lanes_by_partition(self) -> dict[str, frozenset[str]]:
        places, tags = await asyncio.gather(self.places_in_use(), self.used_partitions())
        return {
            tag: frozenset(places.get(tag, ())) for tag in sorted({*tags, *places} - {ANYWHERE})
        }

    async def places_in_use(self) -> dict[str, dict[str, str]]:
        """The lanes of each partition's tag with the time of their last registration.

        Lanes as a whole are listed under `ANYWHERE`. Malformed entries are logged once.
        """
        places: dict[str, dict[str, str]] = {}
        stored = await self._calls.scan(f"{keys.PLACES}: registry", keys.PLACES)
        for place, stamp in stored.items():
            self._take_place(places, lossless(place), lossless(stamp))
        return places

    def _take_place(self, places: dict[str, dict[str, str]], place: str, stamp: str) -> None:
        number, _, lane = place.partition(" ")
        try:
            ids.stored_lane(lane, "places_in_use")
            tag = number if number == ANYWHERE else f"{{fp:{self._calls.partition(number)}}}"
        except (errors.CorruptionError, ValueError):
            self._calls.warn_of(keys.PLACES, place)
        else:
            places.setdefault(tag, {})[lane] = stamp

    async def used_partitions(self) -> list[str]:
        return [f"{{fp:{index}}}" for index in await self.partitions_in_use()]

    async def occupied_partitions(self, tags: Sequence[str]) -> list[str]:
        names = [keys.index(tag, "all_executions") for tag in tags]
        if not self._calls.transport.is_cluster and (
            not names or not await self._calls.transport.call("EXISTS", *names, key="")
        ):
            return []
        found: list[Any] = await asyncio.gather(
            *(self._calls.transport.call("EXISTS", name, key=name) for name in names)
        )
        return [tag for tag, exists in zip(tags, found, strict=True) if exists]

    async def partitions_in_use(self) -> list[int]:
        return await self._calls.registered(keys.PARTITIONS, self._calls.partition)

    async def lanes_in_use(self) -> list[str]:
        return await self._calls.registered(
            keys.LANES, lambda stored: ids.stored_lane(stored, "lanes_in_use")
        )

    async def namespaces_in_use(self) -> list[str]:
        return await self._calls.registered(keys.NAMESPACES, ids.validate_namespace)


async def add_names(calls: FunctionCalls, key: str, names: Iterable[str | int]) -> None:
    """Add to one of the registries of names in use."""
    for part in chunks(list(names), _AT_ONCE):
        await calls.fcall("ff_register_names", key, part, op="register_names")


def lane_limit(lane: str) -> errors.EngineError:
    """The error for a lane that does not fit into the registry."""
    return errors.engine_error("lane_limit_exceeded", [f"{lane}: {MAX_LANES} lanes are in use"])


async def _stamp(
    calls: FunctionCalls, pairs: Sequence[tuple[str, str]]
) -> tuple[list[str], int, list[Any]]:
    """Register pairs of partition number and lane.

    Returns the lanes that did not fit, the server's time, and the placements of the others.
    """
    return await calls.ask(
        *("ff_register_places", keys.LANES_TAG, (MAX_LANES, *chain.from_iterable(pairs))),
        lambda reply: ([text(lane) for lane in reply[2]], int(reply[3]), list(reply[4])),
        op="register_places",
    )


async def keep_lanes(calls: FunctionCalls, lanes: Iterable[str]) -> None:
    """Register lanes that stay when they are empty."""
    for part in chunks(list(lanes), _AT_ONCE):
        refused, *_ = await _stamp(calls, [(ANYWHERE, lane) for lane in part])
        if refused:
            raise lane_limit(refused[0])


def _number(tag: str) -> str:
    return str(ids.PartitionKey.trusted(tag).index_number)
