"""Metrics of claim cycles: how long each took, and what it found."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from flowfabric.core.errors import EngineError
from flowfabric.engine.metrics import Meter

T = TypeVar("T")
ClaimAt = Callable[[str, str, int], Awaitable[tuple[list[T], bool]]]


def measure_cycle(meter: Meter, lane_id: str, since: float, found: Sequence[Any] | None) -> None:
    """Note a cycle that began at `since` on the monotonic clock; None means that it failed."""
    outcome = "error" if found is None else "granted" if found else "no_work"
    seconds = time.monotonic() - since
    meter.observe("ff_claim_from_grant_duration_seconds", seconds, lane_id)
    meter.count("ff_claim_outcome_total", lane_id, outcome)


def measured(claim_at: ClaimAt[T], meter: Meter) -> ClaimAt[T]:
    """The same claims, each noted as one cycle."""

    async def claim(lane_id: str, tag: str, max_n: int) -> tuple[list[T], bool]:
        since = time.monotonic()
        try:
            tasks, again = await claim_at(lane_id, tag, max_n)
        except EngineError:
            measure_cycle(meter, lane_id, since, None)
            raise
        measure_cycle(meter, lane_id, since, tasks)
        return tasks, again

    return claim
