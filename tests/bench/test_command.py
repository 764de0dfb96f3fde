"""The command itself: help, refusals, tables, and cleaning up."""

from __future__ import annotations

from typing import get_args

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from flowfabric.bench.arena import arena
from flowfabric.bench.command import Scenario, register
from flowfabric.bench.report import Options, Progress, as_table, median_run, percentile, rounded
from flowfabric.bench.workers import worker_process
from flowfabric.core.errors import ConfigError


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def test_help_names_every_scenario_and_defines_unbatched():
    text = invoke("--help").output
    assert all(scenario in text for scenario in get_args(Scenario))
    assert "n / total time" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nosuch"], "'nosuch' is not one of"),
        (["floor", "--n", "0"], "greater than or equal to 1"),
        (["floor", "--repeat", "0"], "greater than or equal to 1"),
        (["floor", "--aof", "sometimes"], "'sometimes' is not one of"),
        (["floor", "--unbatched"], "--unbatched is only for the lifecycle scenario"),
        (["memory", "--with-floor"], "--with-floor is only for the lifecycle scenario"),
    ],
)
def test_bad_arguments_are_told_without_a_traceback(arguments: list[str], told: str):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert result.stdout == ""


def test_a_server_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FF_VALKEY_BINARY", "/nonexistent/valkey-server")
    result = invoke("floor", "--n", "1", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "/nonexistent/valkey-server" in result.stderr


def test_table_shows_the_aof_setting_beside_every_figure():
    report = {"scenario": "floor", "n": 20000, "aof": "always", "repeat": 3, "of_floor": 0.81}
    report["lifecycle_per_s"] = 12345
    console = Console(width=120, record=True, quiet=False, file=None)
    with console.capture() as captured:
        console.print(as_table(report))
    text = captured.get()
    assert text.count("always") == 2
    assert "12,345" in text
    assert "median of 3 runs" in text


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_no_number(width: int):
    report = {"scenario": "chain", "n": 2000, "aof": "everysec", "repeat": 3}
    figures = {"flows_per_s": 1_234_567, "p50_ms": 12.34, "p99_ms": 12_345_678, "ping_us": 57.1}
    console = Console(width=width)
    with console.capture() as captured:
        console.print(as_table(report | figures))
    text = captured.get()
    assert all(f" {value:,} " in text for value in figures.values())
    assert "…" not in text


def test_without_a_scenario_they_are_listed():
    result = invoke()
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.splitlines() if not line.startswith(" ")}
    assert listed == set(get_args(Scenario))


def test_percentile_is_a_measured_value():
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile([7.0], 99) == 7.0


def test_median_run_keeps_a_run_whole():
    runs = [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 3.0}]
    assert median_run(runs, "a") == {"a": 2.0, "b": 3.0}


def test_rounding_keeps_small_and_large_values_readable():
    assert rounded(12345.678) == 12346
    assert rounded(0.0123456) == 0.01235


async def test_a_worker_process_ends_with_its_block():
    async with arena(Options(n=1), Progress()) as at:
        async with worker_process(at.url) as worker:
            running = worker.process.returncode
        assert running is None
        assert worker.process.returncode == 0


async def test_a_worker_process_that_cannot_start_tells_why():
    with pytest.raises(ConfigError, match=r"a worker process ended: .*invalid value for url"):
        async with worker_process("gopher://nowhere"):
            pass
