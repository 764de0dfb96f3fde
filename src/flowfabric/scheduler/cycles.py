"""What metrics tell of claim cycles: how long each took, and what it found."""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import EngineError
from flowfabric.engine.metrics import UNKNOWN, Meter, active

M = TypeVar("M", bound=Callable[..., Any])
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


def measures_grants(method: M) -> M:
    """Note each call of a method, whose first argument is `lane_id`, as one cycle."""

    @wraps(method)
    async def call(own: object, *args: Any, **options: Any) -> Any:
        meter, since = active(), time.monotonic()
        if meter is None:
            return await method(own, *args, **options)
        found: list[ClaimGrant] | None = None
        try:
            outcome = await method(own, *args, **options)
            found = [outcome] if isinstance(outcome, ClaimGrant) else []
            return outcome
        finally:
            # Only a lane with work is known to exist: clients may ask for any name.
            lane_id = args[0] if args else options.get("lane_id", UNKNOWN)
            measure_cycle(meter, lane_id if found else UNKNOWN, since, found)

    return cast("M", call)
