"""Metrics as Prometheus reads them, the dashboard, and what off means."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from flowfabric import observability
from flowfabric.core.errors import ConfigError
from flowfabric.engine import metrics
from flowfabric.engine.metrics import METRICS, Meter
from flowfabric.observability import Gauges
from tests.support.engine import Engine, prepared_backend
from tests.support.metrics import samples
from tests.support.server import TestServer


def test_counters_gauges_and_histograms(meter: Meter) -> None:
    meter.count("ff_attempt_outcome_total", "default", "ok", by=3)
    meter.set("ff_cancel_backlog_depth", 2)
    for seconds in (0.0005, 0.001, 0.003, 99):
        meter.observe("ff_claim_from_grant_duration_seconds", seconds, "default")
    found = samples(observability.render())
    assert found["ff_attempt_outcome_total", ("default", "ok")] == 3
    assert found["ff_cancel_backlog_depth", ()] == 2
    name = "ff_claim_from_grant_duration_seconds"
    assert found[f"{name}_bucket", ("default", "0.001")] == 2
    assert found[f"{name}_bucket", ("default", "0.005")] == 3
    assert found[f"{name}_bucket", ("default", "30.0")] == 3
    assert found[f"{name}_bucket", ("default", "+Inf")] == 4
    assert found[f"{name}_count", ("default",)] == 4
    assert found[f"{name}_sum", ("default",)] == pytest.approx(99.0045)


def test_counters_without_labels_are_shown_from_the_start(meter: Meter) -> None:
    found = samples(observability.render())
    for metric in METRICS.values():
        if metric.kind == "counter" and not metric.labels:
            assert found[metric.name, ()] == 0


def test_nothing_is_shown_while_metrics_are_off() -> None:
    assert metrics.active() is None
    assert samples(observability.render()) == {}


def test_every_name_follows_the_rules() -> None:
    for metric in METRICS.values():
        assert metric.name.startswith("ff_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")


def test_an_unknown_name_is_a_mistake(meter: Meter) -> None:
    with pytest.raises(KeyError):
        meter.count("ff_unheard_of_total")


async def test_a_backend_without_metrics_is_not_wrapped(valkey: TestServer) -> None:
    assert metrics.active() is None
    async with prepared_backend(valkey.url) as plain:
        assert "renew_many" not in vars(plain.leases)
        assert "append_frames" not in vars(plain.streams)


async def test_a_scrape_over_http(engine: Engine, meter: Meter) -> None:
    await engine.create()
    server = observability.serve(engine.backend, 0)
    try:
        text = await asyncio.to_thread(_get, server.port)
    finally:
        await asyncio.to_thread(server.close)
    assert samples(text)["ff_eligible_depth", ("default",)] == 1


async def test_a_scrape_for_a_server_of_your_own(engine: Engine, meter: Meter) -> None:
    await engine.create(lane="mails")
    text = await observability.scrape(Gauges(engine.backend, meter))
    assert samples(text)["ff_eligible_depth", ("mails",)] == 1


async def test_a_port_in_use(engine: Engine) -> None:
    server = observability.serve(engine.backend, 0)
    try:
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}"):
            observability.serve(engine.backend, server.port)
    finally:
        await asyncio.to_thread(server.close)


def _get(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read()


# --- the dashboard --------------------------------------------------------------------------


def expressions(part: Any) -> list[str]:
    """Every query of a dashboard."""
    return [query["expr"] for panel in part["panels"] for query in panel.get("targets", ())]


def test_every_query_of_the_dashboard_names_an_existing_metric() -> None:
    queries = expressions(json.loads(observability.dashboard()))
    assert len(queries) >= 15
    for query in queries:
        names = re.findall(r"\bff_\w+", query)
        assert names, query
        for name in names:
            metric = METRICS.get(name) or METRICS[re.sub(r"_(bucket|sum|count)$", "", name)]
            used = re.findall(r"by \(([^)]*)\)", query)
            labels = {label.strip() for group in used for label in group.split(",")} - {"le"}
            labels -= set(re.findall(r'label_replace\(.*?, "(\w+)"', query))
            assert labels <= set(metric.labels), query


def test_the_dashboard_shows_what_operators_need() -> None:
    queries = " ".join(expressions(json.loads(observability.dashboard())))
    assert '"class", "${1}xx", "status"' in queries
    for name in (
        *("ff_claim_from_grant_duration_seconds_bucket", "ff_claim_outcome_total"),
        *("ff_lease_renewal_total", "ff_worker_at_capacity_total", "ff_quota_hit_total"),
        *("ff_budget_hit_total", "ff_scanner_cycle_duration_seconds_bucket"),
        *("ff_scanner_cycle_total", "ff_cancel_backlog_depth", "ff_http_requests_total"),
        *("ff_http_request_duration_seconds_bucket", "ff_attempt_outcome_total"),
    ):
        assert name in queries


# --- imports --------------------------------------------------------------------------------


def test_programs_without_metrics_or_tracing_do_not_import_their_libraries() -> None:
    program = (
        "import sys, flowfabric as ff\n"
        "from flowfabric.app.worker import AppWorker\n"
        "import flowfabric.cli.main, flowfabric.cli.commands.worker\n"
        "app = ff.Fabric()\n"
        "heavy = {'prometheus_client', 'opentelemetry'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import flowfabric.server.process\n"
        "assert 'opentelemetry' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
