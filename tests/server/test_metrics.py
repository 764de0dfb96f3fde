"""`/metrics`: what it shows, and what requests count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import observability
from flowfabric.engine.metrics import Meter
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.observability.gauges import Gauges
from tests.server.conftest import Serving
from tests.support.engine import Engine, prepared_backend
from tests.support.http import Http
from tests.support.server import TestServer

REQUESTS = "ff_http_requests_total"


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
