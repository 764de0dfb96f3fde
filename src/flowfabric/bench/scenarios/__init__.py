"""What `flowfabric bench` measures: one function per scenario, each run on its own server."""

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from flowfabric.bench.arena import Arena, arena
from flowfabric.bench.command import Scenario
from flowfabric.bench.report import Figures, Options, Progress, median_run, rounded
from flowfabric.bench.scenarios import (
    admission,
    delays,
    flows,
    http,
    lanes,
    lifecycle,
    load,
    remote,
    routing,
    stream,
    tokens,
)


class Measurement(NamedTuple):
    """How a scenario is measured, with its defaults for n and repeat."""

    run: Callable[[Arena], Awaitable[Figures]]
    n: int
    repeat: int
    decides: str
    """The figure whose median selects the run to report."""


MEASUREMENTS: Mapping[Scenario, Measurement] = {
    "lifecycle": Measurement(lifecycle.lifecycle, 20_000, 3, "lifecycle_per_s"),
    "floor": Measurement(lifecycle.floor, 20_000, 3, "lifecycle_per_s"),
    "latency": Measurement(delays.latency, 1_000, 3, "start_p50_ms"),
    "memory": Measurement(load.memory, 20_000, 1, "bytes_waiting"),
    "lanes": Measurement(lanes.run, 10_000, 1, "of_one_lane"),
    "admission": Measurement(admission.run, 10_000, 3, "of_plain"),
    "idle": Measurement(load.idle, 8_000, 1, "submit_slowdown_pct"),
    "backlog": Measurement(load.backlog, 1_000_000, 1, "ratio_p99"),
    "recovery": Measurement(delays.recovery, 8, 3, "recovery_s"),
    "resume": Measurement(delays.resume, 1_000, 3, "p50_ms"),
    "stream": Measurement(stream.run, 100_000, 3, "frames_per_s"),
    "chain": Measurement(flows.chain, 2_000, 3, "flows_per_s"),
    "fanout": Measurement(flows.fanout, 20, 1, "release_p50_ms"),
    "cancel": Measurement(flows.cancel, 50, 1, "cancelled_per_s"),
    "http": Measurement(http.run, 8_000, 3, "per_s"),
    "remote": Measurement(remote.run, 10_000, 3, "lifecycle_per_s"),
    "routed": Measurement(routing.routed, 10_000, 1, "per_s"),
    "fairness": Measurement(routing.fairness, 500, 1, "fairness_ratio_p99"),
    "tokens": Measurement(tokens.run, 1_000_000, 1, "per_s"),
}


async def measure(
    scenario: Scenario, options: Options, repeat: int, progress: Progress
) -> dict[str, str | float]:
    """Run a scenario `repeat` times, each on a new server, and report the median run."""
    runs = [await _run_once(scenario, options, progress) for _ in range(repeat)]
    decides = "of_floor" if options.with_floor else MEASUREMENTS[scenario].decides
    figures = {key: rounded(value) for key, value in median_run(runs, decides).items()}
    about = {"scenario": scenario, "n": options.n, "aof": options.aof, "repeat": repeat}
    return about | figures


async def _run_once(scenario: Scenario, options: Options, progress: Progress) -> Figures:
    """The figures of one run and, if requested, of the floor right after it."""
    async with arena(options, progress) as at:
        figures = await MEASUREMENTS[scenario].run(at)
    if options.with_floor:
        async with arena(options, progress) as at:
            most = (await lifecycle.floor(at))["lifecycle_per_s"]
        figures |= {"floor_per_s": most, "of_floor": figures["lifecycle_per_s"] / most}
    return figures
