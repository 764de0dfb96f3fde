"""Lanes and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowfabric.core.errors import NotFoundError
from flowfabric.core.ids import validate_lane
from flowfabric.core.stored import Stored
from flowfabric.engine.api import check
from flowfabric.engine.api.lanes import Lanes, LaneSettings
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.calls import FunctionCalls, at_once, text
from flowfabric.engine.valkey.pages import given_cursor
from flowfabric.engine.valkey.places import ValkeyPlaces, keep_lanes

_LANE_STATES = ("active", "paused", "draining", "disabled")
_FAN_OUT = 16


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
        validate_lane(lane_id)
        if not await self._calls.read(f"{keys.LANES}: registry", "SISMEMBER", keys.LANES, lane_id):
            raise NotFoundError("lane_not_found", lane_id, op="get_lane")
        return await self._lane_settings(lane_id)

    async def _lane_settings(self, lane_id: str) -> LaneSettings:
        key = keys.lane_config(validate_lane(lane_id))
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
        key = keys.lane_config(validate_lane(lane_id))
        await keep_lanes(self._calls, [lane_id])
        before = await self._calls.ask(
            "ff_store_lane", key, fields, lambda reply: text(reply[2]), op="set_lane"
        )

        async def copy(partition: int) -> None:
            tag = f"{{fp:{partition}}}"
            await self._calls.fcall("ff_set_lane", tag, (lane_id, *fields), op="set_lane")

        await at_once(_FAN_OUT, map(copy, range(self._calls.counts.flow)))
        return before or "active"
