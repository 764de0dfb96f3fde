"""Lanes and their settings."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from flowfabric.core import errors, ids
from flowfabric.core.ids import new_uuid
from flowfabric.core.stored import Stored
from flowfabric.engine.api import check
from flowfabric.engine.api.places import (
    LANE_STATES,
    PLACEMENTS,
    LaneDetail,
    LaneLoad,
    Lanes,
    LaneSettings,
    PartitionLoad,
)
from flowfabric.engine.valkey import keys, places
from flowfabric.engine.valkey.calls import FunctionCalls, finished, text
from flowfabric.engine.valkey.listings import ValkeyListings
from flowfabric.engine.valkey.pages import given_cursor, reading_cursor
from flowfabric.engine.valkey.places import ValkeyPlaces

_FAN_OUT = 16
_READ_AT_ONCE = 16


class ValkeyLanes(Lanes):
    """`Lanes` on Valkey."""

    def __init__(self, calls: FunctionCalls, used: ValkeyPlaces, listings: ValkeyListings) -> None:
        self._calls = calls
        self._places = used
        self._listings = listings

    async def list_lanes(self, cursor: str = "", limit: int = 1000) -> tuple[list[str], str | None]:
        if given_cursor(cursor):
            with reading_cursor():
                ids.validate_lane(cursor)
        check.whole(limit, "limit")
        rest = [lane for lane in await self._places.lanes_in_use() if lane > cursor]
        page = rest[: max(0, limit)]
        return page, page[-1] if page and len(rest) > len(page) else None

    async def get_lane(self, lane_id: str) -> LaneDetail:
        ids.validate_lane(lane_id)
        if not await self._calls.read(f"{keys.LANES}: registry", "SISMEMBER", keys.LANES, lane_id):
            raise errors.NotFoundError("lane_not_found", lane_id, op="get_lane")
        (settings,) = await self.read_settings([lane_id])
        counts = await self._listings.count_lanes([lane_id])
        return LaneDetail(**msgspec.structs.asdict(settings), counts=counts[lane_id])

    async def read_settings(self, lanes: Iterable[str]) -> list[LaneSettings]:
        return await finished(_READ_AT_ONCE, self._settings, ids.validate_lanes(lanes))

    async def _settings(self, lane_id: str) -> LaneSettings:
        context = f"lane {lane_id}"
        key = keys.lane_config(keys.LANES_TAG, lane_id)
        stored = Stored.from_hash(
            context, await self._calls.read(f"{context}: config", "HGETALL", key)
        )
        return LaneSettings(
            lane_id=lane_id,
            state=stored.text("state", "active"),
            reason=stored.text("reason", ""),
            changed_at=stored.maybe_number("changed_at"),
            placement=stored.text("placement", "pinned"),
            shards=stored.number("shards", self._calls.counts.flow),
            priority_weight_ms=stored.number("priority_weight_ms", 10**12),
            reclaim_grace_ms=stored.number("reclaim_grace_ms", 0),
            emit_renewals=stored.text("emit_renewals", "") == "1",
        )

    async def busiest_partitions(self, limit: int = 20) -> list[PartitionLoad]:
        check.whole(limit, "limit", 0)
        loads: dict[int, list[LaneLoad]] = {}
        counted = await self._listings.count_places(by_route=False)
        for (tag, lane), counts in counted.items():
            # An execution whose lease was lost is in two indexes; it waits for another worker.
            waiting = counts["eligible"] + counts["reclaimable"]
            active = max(0, counts["active"] - counts["reclaimable"])
            if waiting or active:
                index = ids.PartitionKey.trusted(tag).index_number
                load = LaneLoad(lane_id=lane, waiting=waiting, active=active)
                loads.setdefault(index, []).append(load)
        found = [_partition_load(index, lanes) for index, lanes in loads.items()]
        found.sort(key=lambda load: (-load.waiting - load.active, load.partition))
        return found[:limit]

    async def set_lane_state(self, lane_id: str, state: str, reason: str = "") -> str:
        check.one_of(state, "state", LANE_STATES)
        told = check.reason(reason, "reason")
        return await self._store(lane_id, ("state", state, "reason", told))

    async def set_lane_config(
        self,
        lane_id: str,
        *,
        placement: str | None = None,
        shards: int | None = None,
        priority_weight_ms: int | None = None,
        reclaim_grace_ms: int | None = None,
        emit_renewals: bool | None = None,
    ) -> None:
        fields: list[Any] = []
        if placement is not None:
            fields += ("placement", check.one_of(placement, "placement", PLACEMENTS))
        for name, value, low, high in (
            ("shards", shards, 1, self._calls.counts.flow),
            ("priority_weight_ms", priority_weight_ms, 1, 10**12),
            ("reclaim_grace_ms", reclaim_grace_ms, 0, 10**12),
        ):
            if value is not None:
                fields += (name, check.whole(value, name, low, high))
        if emit_renewals is not None:
            fields += ("emit_renewals", "1" if check.flag(emit_renewals, "emit_renewals") else "0")
        if not fields:
            raise errors.invalid_input("settings", "pass at least one setting to change")
        await self._store(lane_id, fields)

    async def _store(self, lane_id: str, fields: Sequence[Any]) -> str:
        """Store the global settings, then each partition's copy; repeating it converges.

        Returns the state that the lane had before.
        """
        ids.validate_lane(lane_id)
        counts = self._calls.counts
        before, copy = await self._calls.ask(
            *("ff_store_lane", keys.LANES_TAG),
            (lane_id, places.MAX_LANES, counts.flow, new_uuid(), *fields),
            lambda reply: (text(reply[2]), list(reply[3])),
            op="set_lane",
        )

        async def store(partition: int) -> None:
            tag = f"{{fp:{partition}}}"
            await self._calls.fcall("ff_set_lane", tag, (lane_id, *copy), op="set_lane")

        await finished(_FAN_OUT, store, range(counts.flow))
        await self._places.read_placements([lane_id])
        return before


def _partition_load(partition: int, lanes: list[LaneLoad]) -> PartitionLoad:
    lanes.sort(key=lambda load: (-load.waiting - load.active, load.lane_id))
    return PartitionLoad(
        partition=partition,
        waiting=sum(load.waiting for load in lanes),
        active=sum(load.active for load in lanes),
        lanes=tuple(lanes),
    )
