"""Which lanes share a partition: logged at boot, when it can still be changed."""

from __future__ import annotations

import logging
from typing import Any

from flowfabric.core.partition import CollisionGrade, PartitionCounts, lane_collisions
from flowfabric.engine.valkey import keys
from flowfabric.valkey.transport import Transport

log = logging.getLogger(__name__)
_LEVELS = {
    CollisionGrade.CLEAN: logging.DEBUG,
    CollisionGrade.WATCH: logging.INFO,
    CollisionGrade.ELEVATED: logging.WARNING,
    CollisionGrade.REMEDIATE: logging.WARNING,
}
_SHOWN = 16


async def report_collisions(transport: Transport, counts: PartitionCounts) -> None:
    """Log how many registered lanes share their home partition, and which."""
    members: Any = await transport.call("SMEMBERS", keys.LANES, key=keys.LANES)
    lanes = [member.decode(errors="replace") for member in members]
    found = lane_collisions(lanes, counts)
    level = _LEVELS[found.grade]
    if log.isEnabledFor(level):
        groups = [group for _, group in zip(range(_SHOWN), found.shared.values(), strict=False)]
        log.log(
            level,
            "%d of %d lanes share a partition: %s",
            found.affected,
            found.lanes,
            "; ".join(", ".join(group) for group in groups) or "none",
            extra={
                "action": "lane_collisions",
                "grade": found.grade.value,
                "lanes": found.lanes,
                "affected": found.affected,
                "shared": groups,
            },
        )
