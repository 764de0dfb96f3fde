"""Lanes and their settings."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flowfabric.engine.api.concern import Concern


class LaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a lane; the defaults are those of a new lane."""

    lane_id: str
    state: str = "active"
    reason: str = ""
    priority_weight_ms: int = 10**12
    reclaim_grace_ms: int = 0
    emit_renewals: bool = False


class Lanes(Concern, Protocol):
    """Lanes and their settings."""

    async def list_lanes(self, cursor: str = "", limit: int = 1000) -> tuple[list[str], str | None]:
        """Registered lanes by name after `cursor`, and the next cursor if more follow."""
        ...

    async def get_lane(self, lane_id: str) -> LaneSettings:
        """The lane's settings; raises `lane_not_found` for a name that was never used."""
        ...

    async def set_lane_state(self, lane_id: str, state: str, reason: str = "") -> str:
        """Pause, drain, disable or re-activate a lane; returns the state it had."""
        ...

    async def set_lane_config(
        self,
        lane_id: str,
        *,
        priority_weight_ms: int | None = None,
        reclaim_grace_ms: int | None = None,
        emit_renewals: bool | None = None,
    ) -> None:
        """Change a lane's scheduling settings."""
        ...
