"""Each scenario on a few executions: the promised keys, and values that can be."""

from __future__ import annotations

import json
import logging
import random
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flowfabric.bench.arena import arena
from flowfabric.bench.command import register
from flowfabric.bench.report import Options, Progress, as_table
from flowfabric.bench.scenarios import measure, tokens
from flowfabric.core.errors import FlowFabricError
from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.worker import Worker

ABOUT = {"scenario", "n", "aof", "repeat"}
_COMPARED = ("alone", "beside", "calm", "busy")
RATES = {"submit_per_s", "process_per_s", "lifecycle_per_s", "server_us"}


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the private servers live during the test; the name of a unix socket must be short."""
    with tempfile.TemporaryDirectory(prefix="ffb-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def run(*arguments: str) -> dict[str, Any]:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, [*arguments, "--json", "--repeat", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert report["scenario"] == arguments[0]
    # Every figure also has a line in the table for people.
    assert as_table(report).row_count == len(report) - len(ABOUT)
    return report


def figures(report: dict[str, Any], *keys: str) -> list[float]:
    """The values of exactly these keys, all above zero."""
    assert set(report) == ABOUT | set(keys)
    values = [report[key] for key in keys]
    assert all(value > 0 for value in values), report
    return values


def test_lifecycle_with_its_floor():
    report = run("lifecycle", "--n", "300", "--with-floor")
    figures(report, *RATES, "python_us", "floor_per_s", "of_floor")
    assert report["n"] == 300
    assert report["lifecycle_per_s"] < min(report["submit_per_s"], report["process_per_s"])
    ratio = report["lifecycle_per_s"] / report["floor_per_s"]
    assert report["of_floor"] == pytest.approx(ratio, rel=0.01)


def test_lifecycle_without_floor_keeps_the_log_it_was_asked_to():
    report = run("lifecycle", "--n", "100", "--aof", "everysec")
    figures(report, *RATES, "python_us")
    assert report["aof"] == "everysec"


def test_admission_compares_with_executions_without_limits():
    report = run("admission", "--n", "200")
    figures(report, "plain_per_s", "limited_per_s", "of_plain", "server_us")


def test_unbatched_lifecycle_counts_the_whole():
    report = run("lifecycle", "--n", "50", "--unbatched")
    figures(report, *RATES, "callers", "serial_per_s", "ping_us")
    assert report["callers"] == 64
    assert report["lifecycle_per_s"] == report["process_per_s"] <= report["submit_per_s"]


def test_floor(scratch: Path):
    report = run("floor", "--n", "300")
    figures(report, "submit_per_s", "claim_per_s", "complete_per_s", "lifecycle_per_s", "server_us")
    assert report["lifecycle_per_s"] < report["claim_per_s"]
    assert not list(scratch.iterdir()), "the server's folder is still there"


def test_latency():
    keys = ("start_p50_ms", "start_p99_ms", "result_p50_ms", "result_p99_ms")
    start_50, start_99, result_50, result_99 = figures(run("latency", "--n", "5"), *keys)
    assert start_50 <= start_99 <= result_99
    assert start_50 < result_50 <= result_99


def test_memory():
    keys = ("bytes_waiting", "bytes_active", "bytes_finished", "bytes_feed", "feed_entries")
    waiting, active, finished, _, _ = figures(run("memory", "--n", "2000"), *keys)
    # The payload alone has 200 bytes; a running execution has a lease on top of a waiting one.
    assert 200 < waiting < active < 4000
    assert 200 < finished < 4000


def test_backlog():
    report = run("backlog", "--n", "1200")
    p50, p99, many_p50, many_p99, ratio = figures(
        report,
        "claim_p50_ms_1e3",
        "claim_p99_ms_1e3",
        "claim_p50_ms_1e6",
        "claim_p99_ms_1e6",
        "ratio_p99",
    )
    assert p50 <= p99
    assert many_p50 <= many_p99
    assert ratio == pytest.approx(many_p99 / p99, rel=0.01)


def test_recovery():
    report = run("recovery", "--n", "2")
    worst, follower, ttl = figures(report, "recovery_s", "recovery_follower_s", "lease_ttl_s")
    # Renewed at a third of its time: a lease outlives its worker by at least a third.
    assert min(worst, follower) > ttl / 3


async def test_idle():
    options = Options(n=20, workers=4, seconds=1.0)
    with Progress() as progress:
        report = await measure("idle", options, 1, progress)
    slower = {"submit_slowdown_pct", "submit_slowdown_same_lane_pct"}
    rates = {"commands_per_s", "commands_per_s_100", "submit_per_s"}
    server = {"submit_server_us", "submit_server_us_same_lane"}
    assert set(report) == ABOUT | slower | rates | server
    assert 0 < float(report["commands_per_s"]) < float(report["commands_per_s_100"])
    assert all(float(report[key]) < 100 for key in slower)


def test_resume():
    p50, p99, per_s = figures(run("resume", "--n", "5"), "p50_ms", "p99_ms", "per_s")
    assert p50 <= p99
    assert per_s < 1e6


def test_chain():
    keys = ("flows_per_s", "p50_ms", "p99_ms", "flow_server_us")
    _, p50, p99, _ = figures(run("chain", "--n", "10"), *keys)
    assert p50 <= p99


def test_fanout():
    keys = ("release_p50_ms", "release_p99_ms", "whole_p50_ms", "whole_p99_ms", "members_per_s")
    release, _, whole, _, _ = figures(run("fanout", "--n", "1"), *keys)
    assert release < whole


def test_cancel():
    keys = ("cancelled_per_s", "race_p99_ms_10", "race_p99_ms_100", "race_p99_ms_1000")
    figures(run("cancel", "--n", "1"), *keys)


async def test_stream(monkeypatch: pytest.MonkeyPatch):
    # The scenario sets this for its own process; restore it for the tests that follow.
    monkeypatch.setenv("FF_MAX_CONCURRENT_STREAM_OPS", "64")
    with Progress() as progress:
        report = await measure("stream", Options(n=2000, workers=12), 1, progress)
    slowdown = report.pop("call_slowdown_pct")
    _, _, lag_50, lag_99, crowd_50, crowd_99 = figures(
        report,
        "frames_per_s",
        "frames_per_s_10",
        "lag_p50_ms",
        "lag_p99_ms",
        "lag_p50_ms_100",
        "lag_p99_ms_100",
    )
    assert lag_50 <= lag_99
    assert crowd_50 <= crowd_99
    assert float(slowdown) > -100


def test_no_forged_token_is_accepted():
    report = run("tokens", "--n", "3000")
    assert set(report) == ABOUT | {"tried", "accepted", "per_s"}
    assert (report["tried"], report["accepted"]) == (3000, 0)
    assert report["per_s"] > 0


async def test_a_right_token_does_not_go_unnoticed(monkeypatch: pytest.MonkeyPatch):
    """Here every forger hands in the real token, and the run does not end well."""

    def honest(_: object, target: Any, __: object) -> Any:
        return target

    monkeypatch.setattr(tokens, "FORGERS", (honest,))
    with Progress() as progress, pytest.raises(FlowFabricError):
        # The first one ends the wait, so the next is refused for another reason.
        await measure("tokens", Options(n=200), 1, progress)


def test_forgeries_are_never_the_real_token():
    ids = [ExecutionId.parse(f"{{fp:1}}:{uuid.UUID(int=n)}") for n in range(3)]
    targets = [
        tokens.SignalTarget(eid, str(uuid.UUID(int=n)), f"k1:{n:040x}") for n, eid in enumerate(ids)
    ]
    made = list(tokens.forgeries(random.Random(7), targets, 2000))
    assert len(made) == 2000
    assert set(targets).isdisjoint(made)
    assert len({forged.token for forged in made}) > 800


async def test_what_is_so_on_purpose_is_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server of a run keeps no log; the worker's look at its health must not say so."""
    config = WorkerConfig(scanners=False)
    async with arena(Options(n=1), Progress()) as at, await Worker.connect(config, at.url):
        pass
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_lanes() -> None:
    found = run("lanes", "--n", "200", "--repeat", "1")
    rates = {"one_lane_per_s", "lanes_100_per_s", "lanes_1000_per_s"}
    assert found.keys() == ABOUT | rates | {"of_one_lane", "idle_commands_per_s"}
    assert all(found[rate] > 0 for rate in rates)
    # A look at each lane by itself would be 100 commands; a busy machine adds some to the few.
    assert found["idle_commands_per_s"] < 60


def test_http() -> None:
    keys = ("per_s", "p50_ms", "p99_ms", "bulk_per_s", "bulk_of_engine")
    keys += ("sse_lag_p50_ms", "sse_lag_p99_ms")
    _, p50, p99, *_ = figures(run("http", "--n", "200", "--repeat", "1"), *keys)
    assert p50 <= p99


def test_remote() -> None:
    keys = ("lifecycle_per_s", "start_p50_ms", "start_p99_ms")
    _, p50, p99 = figures(run("remote", "--n", "200", "--repeat", "1"), *keys)
    assert p50 <= p99


def test_routed():
    report = run("routed", "--n", "40")
    per_s, p50, p99, most, share = figures(
        report, "per_s", "p50_ms", "p99_ms", "lifecycle_per_s", "of_lifecycle"
    )
    assert p50 <= p99
    assert share == pytest.approx(per_s / most, rel=0.01)


def test_fairness():
    report = run("fairness", "--n", "10")
    left = report.pop("noise_left")
    names = [f"{each}_{which}_ms" for each in _COMPARED for which in ("p50", "p99")]
    found = figures(report, *names, "fairness_ratio_p99", "arrivals_ratio_p99")
    alone, alone_p99, beside, beside_p99, calm, calm_p99, busy, busy_p99, *ratios = found
    assert alone <= alone_p99
    assert beside <= beside_p99
    assert calm <= calm_p99
    assert busy <= busy_p99
    assert ratios == pytest.approx([beside_p99 / alone_p99, busy_p99 / calm_p99], rel=0.01)
    assert 0 <= left <= 100
