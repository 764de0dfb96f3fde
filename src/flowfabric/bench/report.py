"""The options, progress and figures of a scenario."""

import math
from collections.abc import Mapping, Sequence

import msgspec
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from flowfabric.bench.command import Aof

Figures = dict[str, float]
"""The measured values of one run by key."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run of a scenario."""

    n: int
    aof: Aof = "no"
    unbatched: bool = False
    with_floor: bool = False
    workers: int = 100
    """How many idle workers `idle` starts, and how many tails `stream` does."""
    seconds: float = 5.0
    """How long `idle` counts commands."""


class Progress(bars.Progress):
    """One bar on stderr for the current phase; nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(
            *(bars.TextColumn("{task.description}"), bars.BarColumn()),
            *(bars.MofNCompleteColumn(), bars.TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self._phase = self.add_task("", total=None)

    def begin(self, phase: str, total: int) -> None:
        """Start a phase of `total` steps."""
        self.reset(self._phase, total=total, description=phase)

    def step(self, steps: int = 1) -> None:
        """Count steps of the phase."""
        self.advance(self._phase, steps)


_MEANING = {
    "submit_per_s": ("submitted", "/s"),
    "process_per_s": ("claimed, run and completed", "/s"),
    "lifecycle_per_s": ("whole lifecycles", "/s"),
    "callers": ("submitting callers, and slots of the worker", ""),
    "serial_per_s": ("whole lifecycles, one caller and one slot", "/s"),
    "ping_us": ("one PING round trip, one caller", "µs"),
    "claim_per_s": ("claimed", "/s"),
    "complete_per_s": ("completed", "/s"),
    "floor_per_s": ("floor: raw batched calls", "/s"),
    "of_floor": ("share of the floor", ""),
    "server_us": ("server CPU per lifecycle", "µs"),
    "python_us": ("Python CPU per lifecycle", "µs"),
    "start_ms": ("submit → handler starts", "ms"),
    "result_ms": ("submit → result seen", "ms"),
    "bytes_waiting": ("one waiting execution", "bytes"),
    "bytes_active": ("one running execution", "bytes"),
    "bytes_finished": ("one finished execution", "bytes"),
    "bytes_feed": ("event feed of the partition, in total", "bytes"),
    "feed_entries": ("entries in that feed", ""),
    "commands_per_s": ("one idle worker", "commands/s"),
    "commands_per_s_100": ("100 idle workers", "commands/s"),
    "submit_slowdown_pct": ("submitter with 100 idle workers on another lane", "% slower"),
    "submit_slowdown_same_lane_pct": ("… on its lane that cannot run the work", "% slower"),
    "submit_server_us": ("server CPU per submit, without workers", "µs"),
    "submit_server_us_same_lane": ("… with 100 idle workers on its lane", "µs"),
    "one_lane_per_s": ("run on one lane", "/s"),
    "lanes_100_per_s": ("run on 100 lanes", "/s"),
    "of_one_lane": ("100 lanes / one lane", ""),
    "lanes_1000_per_s": ("run on 1,000 lanes, 10 each", "/s"),
    "idle_commands_per_s": ("idle worker with 100 lanes", "commands/s"),
    "plain_per_s": ("lifecycles without limits", "/s"),
    "limited_per_s": ("lifecycles with a budget and a quota", "/s"),
    "of_plain": ("with limits / without", ""),
    "claim_ms_1e3": ("claim, a thousand waiting", "ms"),
    "claim_ms_1e6": ("claim, n waiting", "ms"),
    "ratio_p99": ("99th percentile, n waiting / a thousand waiting", ""),
    "recovery_s": ("killed worker also ran the scanners", "s"),
    "recovery_follower_s": ("killed worker did not", "s"),
    "lease_ttl_s": ("lease of the killed worker", "s"),
    "ms": ("signal → handler resumes", "ms"),
    "per_s": ("many at once", "/s"),
    "frames_per_s": ("frames of one task", "/s"),
    "frames_per_s_10": ("frames of ten tasks", "/s"),
    "lag_ms": ("written → read, one reader", "ms"),
    "lag_ms_100": ("… with 99 other readers", "ms"),
    "call_slowdown_pct": ("other calls while 100 readers wait", "% slower"),
    "flows_per_s": ("flows of ten members", "/s"),
    "chain ms": ("one flow, submitted → finished", "ms"),
    "flow_server_us": ("server CPU per flow", "µs"),
    "release_ms": ("completed → 1,000 members can run", "ms"),
    "whole_ms": ("whole flow, 1 → 1,000 → 1", "ms"),
    "members_per_s": ("members of that flow", "/s"),
    "cancelled_per_s": ("members cancelled", "/s"),
    "bulk_per_s": ("submitted in bulk requests", "/s"),
    "http per_s": ("submitted one by one", "/s"),
    "http ms": ("one submit", "ms"),
    "sse_lag_ms": ("appended → read by its client, of 200", "ms"),
    "bulk_of_engine": ("of the same batches through the engine", ""),
    "race_ms_10": ("completed → 9 siblings cancelled", "ms"),
    "race_ms_100": ("… 99 siblings", "ms"),
    "race_ms_1000": ("… 999 siblings", "ms"),
    "routed per_s": ("run by forty workers", "/s"),
    "routed ms": ("submit → handler starts, one at a time", "ms"),
    "of_lifecycle": ("share of a plain lifecycle", ""),
    "alone_ms": ("submit → handler starts, alone", "ms"),
    "beside_ms": ("… beside a backlog of another namespace", "ms"),
    "fairness_ratio_p99": ("99th percentile, beside / alone", ""),
    "noise_left": ("waiting of that backlog at the end", ""),
    "calm_ms": ("submit → handler starts, one every 10 ms", "ms"),
    "busy_ms": ("… while another namespace submits ten times as many", "ms"),
    "arrivals_ratio_p99": ("99th percentile, with those arrivals / without", ""),
    "tried": ("forged tokens tried", ""),
    "accepted": ("forged tokens accepted", ""),
}

_PERCENTILES = {"p50_": ", median", "p99_": ", 99th percentile"}
_ABOUT = ("scenario", "n", "aof", "repeat")


def rounded(value: float) -> float:
    """At most four significant digits, or a whole number."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def as_table(report: Mapping[str, object]) -> Table:
    """The figures of a report, each with the AOF setting."""
    repeat, aof = report["repeat"], str(report["aof"])
    runs = "" if repeat == 1 else f", median of {repeat} runs"
    table = Table(title=f"{report['scenario']}: n = {report['n']:,}{runs}")
    figures = {key: f"{value:,}" for key, value in report.items() if key not in _ABOUT}
    meanings = {key: _meaning(str(report["scenario"]), key) for key in figures}
    # Never cut numbers and units; names wrap if the terminal is too narrow.
    table.add_column("figure", overflow="fold")
    widest = max(map(len, figures.values()))
    table.add_column("", justify="right", no_wrap=True, min_width=widest)
    table.add_column("", no_wrap=True, min_width=max(len(unit) for _, unit in meanings.values()))
    table.add_column("key", overflow="fold")
    table.add_column("AOF", no_wrap=True, min_width=len(aof))
    for key, (label, unit) in meanings.items():
        table.add_row(label, figures[key], unit, key, aof)
    return table


def _meaning(scenario: str, key: str) -> tuple[str, str]:
    """What a figure says, and its unit."""
    which = next((each for each in _PERCENTILES if each in key), "")
    plain = key.replace(which, "")
    label, unit = _MEANING.get(f"{scenario} {plain}") or _MEANING[plain]
    return label + _PERCENTILES.get(which, ""), unit


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is at least as large as `percent` of all.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50)
    2.0
    """
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def percentiles(values: Sequence[float], prefix: str = "", suffix: str = "") -> Figures:
    """The median and the 99th percentile of milliseconds, under their keys."""
    return {f"{prefix}p{each}_ms{suffix}": percentile(values, each) for each in (50, 99)}


def median_run(runs: Sequence[Figures], key: str) -> Figures:
    """The run with the median figure; the figures of a run belong together.

    >>> median_run([{"a": 3.0}, {"a": 1.0}, {"a": 2.0}], "a")
    {'a': 2.0}
    """
    return sorted(runs, key=lambda run: run[key])[(len(runs) - 1) // 2]
