"""Running a scenario: repeats, and one report out of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from flowfabric.bench.figures import rounded
from flowfabric.bench.options import Figures, Options, Progress
from flowfabric.bench.scenarios import (
    backlog,
    floor,
    forgery,
    idle,
    latency,
    lifecycle,
    memory,
    recovery,
    resume,
    stream,
)
from flowfabric.bench.statistics import median_run

Scenario = Callable[[Options, Progress], Coroutine[Any, Any, Figures]]

# Each with the figure that decides which of several runs is the median one.
_SCENARIOS: dict[str, tuple[Scenario, str]] = {
    "lifecycle": (lifecycle.run, "lifecycle_per_s"),
    "floor": (floor.run, "lifecycle_per_s"),
    "latency": (latency.run, "start_p50_ms"),
    "memory": (memory.run, "bytes_waiting"),
    "idle": (idle.run, "submit_slowdown_pct"),
    "backlog": (backlog.run, "ratio_p99"),
    "recovery": (recovery.run, "recovery_s"),
    "resume": (resume.run, "p50_ms"),
    "stream": (stream.run, "frames_per_s"),
    "tokens": (forgery.run, "per_s"),
}


async def measure(
    scenario: str, options: Options, repeat: int, progress: Progress
) -> dict[str, str | float]:
    """Run a scenario `repeat` times, each on a new server, and report the median run."""
    run, deciding = _SCENARIOS[scenario]
    if options.with_floor:
        deciding = "of_floor"
    figures = median_run([await run(options, progress) for _ in range(repeat)], deciding)
    return {
        "scenario": scenario,
        "n": options.n,
        "aof": options.aof,
        "repeat": repeat,
        **{key: rounded(value) for key, value in figures.items()},
    }
