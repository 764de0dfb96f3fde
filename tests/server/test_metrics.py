"""`/metrics`: what it shows, and what requests count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import observability
from flowfabric.engine.label_budget import LABEL_SETS
from flowfabric.engine.metrics import Meter
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.observability.gauges import Gauges
from tests.server.conftest import Serving
from tests.support.engine import Engine, prepared_backend
from tests.support.http import Http
from tests.support.metrics import label_sets, samples
from tests.support.server import TestServer

REQUESTS = "ff_http_requests_total"
LANE = "lane-0"


@pytest.fixture
def meter() -> Meter:
    return observability.enable()


@pytest.fixture
async def backend(valkey: TestServer, meter: Meter) -> AsyncIterator[ValkeyBackend]:
    async with prepared_backend(valkey.url) as prepared:
        yield prepared


async def test_it_shows_the_deployment(engine: Engine, http: Http) -> None:
    await engine.create(lane="mails")
    page = await http.get("/metrics")
    assert page.status == 200
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'ff_eligible_depth{lane="mails"} 1.0' in page.body.decode()


async def test_requests_count_by_route_and_status(engine: Engine, http: Http, meter: Meter) -> None:
    execution_id = await engine.create()
    await http.get(f"/v1/executions/{execution_id}/state")
    await http.get("/v1/nonsense")
    await http.get("/metrics")
    template = "/v1/executions/{id}/state"
    assert meter.numbers[REQUESTS] == {
        ("GET", template, "200"): 1,
        ("GET", "unknown", "404"): 1,
    }
    assert meter.value("ff_http_request_duration_seconds", "GET", template, "200") == 1


async def test_a_head_request_is_not_a_get(http: Http, meter: Meter) -> None:
    await http.send("HEAD", "/v1/executions")
    assert meter.numbers[REQUESTS] == {("HEAD", "/v1/executions", "200"): 1}


async def test_it_needs_no_token_and_refusals_count(serve: Serving, meter: Meter) -> None:
    async with serve(api_token="secret") as http:
        assert (await http.get("/metrics")).status == 200
        assert (await http.get("/v1/executions")).status == 401
    assert meter.numbers[REQUESTS] == {("GET", "/v1/executions", "401"): 1}


async def test_a_stalled_valkey_does_not_hide_what_the_process_counts(
    http: Http, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = asyncio.Event()

    async def stall(gauges: Gauges) -> None:
        await released.wait()

    monkeypatch.setattr(Gauges, "refresh", stall)
    monkeypatch.setattr("flowfabric.observability.exposition._REFRESH_S", 0.01)
    await http.get("/nope")
    page = await http.get("/metrics")
    assert page.status == 200
    assert f'{REQUESTS}{{method="GET",path="unknown",status="404"}}' in page.body.decode()
    released.set()


async def test_an_unknown_method_is_not_a_label(http: Http, meter: Meter) -> None:
    await http.send("PROPFIND", "/v1/executions")
    assert meter.numbers[REQUESTS] == {("OTHER", "unknown", "405"): 1}


LANES, NAMESPACES = 120, 60
RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 60_000}}}


async def _used_in_every_way(engine: Engine, lane: str, namespace: str) -> None:
    """Attempts that end in three ways, one execution that waits, and a worker."""
    backend = engine.backend
    for priority, policy in ((9, RETRY), (5, None), (4, None), (0, None)):
        await engine.create(lane=lane, namespace=namespace, priority=priority, policy=policy)
    retried, done, cancelled = (one.handle for one in await engine.claim_all(3, lane=lane))
    await backend.executions.fail(retried, "no", "error")
    await backend.executions.complete(done)
    await backend.executions.cancel(cancelled, "no")
    await backend.workers.register_worker(
        worker_id="w", worker_instance_id=f"w-{lane}", lanes=[lane], namespace=namespace
    )


async def test_many_lanes_outcomes_and_namespaces_stay_within_the_budget(
    engine: Engine, http: Http, meter: Meter
) -> None:
    for number in range(LANES):
        lane = f"lane-{number}"
        await _used_in_every_way(engine, lane, f"tenant-{number % NAMESPACES}")
        await http.get(f"/v1/lanes/{lane}")
    page = (await http.get("/metrics")).body
    found, values = label_sets(page), samples(page)
    assert sum(map(len, found.values())) <= LABEL_SETS
    outcomes = "ff_attempt_outcome_total"
    for outcome in ("ok", "retry", "cancelled"):
        assert (LANE, outcome) in found[outcomes]
        assert ("other", outcome) in found[outcomes]
    for name, total in ((outcomes, 3 * LANES), ("ff_eligible_depth", LANES)):
        assert 16 < len(found[name]) < total
        assert sum(value for (of, _), value in values.items() if of == name) == total
    workers = {labels: value for (of, labels), value in values.items() if of == "ff_workers_alive"}
    assert sum(workers.values()) == LANES
    # The flood of lanes left the others their room.
    assert ("GET", "/v1/lanes/{lane}", "200") in found["ff_http_requests_total"]


async def test_a_few_lanes_are_exact(engine: Engine, http: Http) -> None:
    for number in range(5):
        await _used_in_every_way(engine, f"lane-{number}", f"tenant-{number}")
    page = (await http.get("/metrics")).body
    assert not any("other" in labels for _, labels in samples(page))
