"""Lanes with their settings, and the places in use; scanners and listings read no others."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from flowfabric.core import errors, ids
from flowfabric.core.stored import Stored
from flowfabric.core.text import lossless
from flowfabric.engine.api import check
from flowfabric.engine.api.places import Lanes, LaneSettings, Places
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, at_once, text
from flowfabric.engine.valkey.pages import chunks, given_cursor

_LANE_STATES = ("active", "paused", "draining", "disabled")
_FAN_OUT = 16
_AT_ONCE = 500
# A process keeps registering what it used within this time.
_FORGET_S = 300.0
_REPEAT_S = 10.0
KEPT = "kept"
"""The stamp of a lane that was declared or has settings: it stays registered when empty."""
ANYWHERE = "*"
"""Stands for all partitions in entries about a lane as a whole."""
MAX_LANES = 10_000
"""The most lanes of a deployment."""


class ValkeyPlaces(Places):
    """Registers places before their first use and repeats that while they are used.

    A failover to a lagging replica loses registrations without notice; repeating restores them.
    A place that is no longer repeated leaves the registry once it is empty.
    """

    def __init__(self, calls: FunctionCalls) -> None:
        self._calls = calls
        self.known_places: dict[str, set[str]] = {}
        self.known_namespaces: set[str] = set()
        # Used in the last period, not yet in this one.
        self._older_places: dict[str, set[str]] = {}
        self._forget_at: float | None = None
        # When, on the monotonic clock, to register everything again; None: at the next call.
        self._repeat_at: float | None = None

    async def register_places(self, places: Mapping[str, Iterable[str]]) -> None:
        check.instance(places, Mapping, "places")
        wanted = {
            self._calls.checked_tag(tag, "places"): set(ids.validate_lanes(lanes))
            for tag, lanes in places.items()
        }
        if self._repeat_is_due():
            await self.register_again()
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
            refused.update(await _stamp(self._calls, part))
        await add_names(self._calls, keys.PARTITIONS, map(_number, places))
        return refused

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

        Under `ANYWHERE` stand those of lanes as a whole. What is malformed is told of once.
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


class ValkeyLanes(Lanes):
    """`Lanes` on Valkey."""

    def __init__(self, calls: FunctionCalls, places: ValkeyPlaces) -> None:
        self._calls = calls
        self._places = places

    async def list_lanes(self, cursor: str = "", limit: int = 1000) -> tuple[list[str], str | None]:
        given_cursor(cursor)
        check.whole(limit, "limit")
        rest = [lane for lane in await self._places.lanes_in_use() if lane > cursor]
        page = rest[: max(0, limit)]
        return page, page[-1] if page and len(rest) > len(page) else None

    async def get_lane(self, lane_id: str) -> LaneSettings:
        ids.validate_lane(lane_id)
        if not await self._calls.read(f"{keys.LANES}: registry", "SISMEMBER", keys.LANES, lane_id):
            raise errors.NotFoundError("lane_not_found", lane_id, op="get_lane")
        key = keys.lane_config(lane_id)
        context = f"lane {lane_id}"
        stored = Stored.from_hash(
            context, await self._calls.read(f"{context}: config", "HGETALL", key)
        )
        return LaneSettings(
            lane_id=lane_id,
            state=stored.text("state", "active"),
            reason=stored.text("reason", ""),
            priority_weight_ms=stored.number("priority_weight_ms", 10**12),
            reclaim_grace_ms=stored.number("reclaim_grace_ms", 0),
            emit_renewals=stored.text("emit_renewals", "") == "1",
        )

    async def set_lane_state(self, lane_id: str, state: str, reason: str = "") -> str:
        check.one_of(state, "state", _LANE_STATES)
        told = check.reason(reason, "reason")
        return await self._store_lane(lane_id, ("state", state, "reason", told))

    async def set_lane_config(
        self,
        lane_id: str,
        *,
        priority_weight_ms: int | None = None,
        reclaim_grace_ms: int | None = None,
        emit_renewals: bool | None = None,
    ) -> None:
        fields: list[Any] = []
        for name, value, low in (
            ("priority_weight_ms", priority_weight_ms, 1),
            ("reclaim_grace_ms", reclaim_grace_ms, 0),
        ):
            if value is not None:
                fields += (name, check.whole(value, name, low, 10**12))
        if emit_renewals is not None:
            fields += ("emit_renewals", "1" if check.flag(emit_renewals, "emit_renewals") else "0")
        if fields:
            await self._store_lane(lane_id, fields)

    async def _store_lane(self, lane_id: str, fields: Sequence[Any]) -> str:
        """Store the global settings, then each partition's copy; running it again converges.

        Returns the state the lane had.
        """
        key = keys.lane_config(ids.validate_lane(lane_id))
        await keep_lanes(self._calls, [lane_id])
        before = await self._calls.ask(
            "ff_store_lane", key, fields, lambda reply: text(reply[2]), op="set_lane"
        )

        async def copy(partition: int) -> None:
            tag = f"{{fp:{partition}}}"
            await self._calls.fcall("ff_set_lane", tag, (lane_id, *fields), op="set_lane")

        await at_once(_FAN_OUT, copy, range(self._calls.counts.flow))
        return before or "active"


async def add_names(calls: FunctionCalls, key: str, names: Iterable[str | int]) -> None:
    """Add to one of the registries of names in use."""
    for part in chunks(list(names), _AT_ONCE):
        await calls.fcall("ff_register_names", key, part, op="register_names")


def lane_limit(lane: str) -> errors.EngineError:
    """The error for a lane that does not fit into the registry."""
    return errors.engine_error("lane_limit_exceeded", [f"{lane}: {MAX_LANES} lanes are in use"])


async def _stamp(calls: FunctionCalls, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Register pairs of partition number and lane; returns the lanes that were refused."""
    return await calls.ask(
        *("ff_register_places", keys.LANES_TAG, (MAX_LANES, *chain.from_iterable(pairs))),
        lambda reply: [text(lane) for lane in reply[2]],
        op="register_places",
    )


async def keep_lanes(calls: FunctionCalls, lanes: Iterable[str]) -> None:
    """Register lanes that stay when they are empty."""
    for part in chunks(list(lanes), _AT_ONCE):
        if refused := await _stamp(calls, [(ANYWHERE, lane) for lane in part]):
            raise lane_limit(refused[0])


def _number(tag: str) -> str:
    return str(ids.PartitionKey.trusted(tag).index_number)
