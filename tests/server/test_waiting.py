"""Requests that wait, and what HEAD answers."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.conftest import Serving, waiters
from tests.server.status_rows import CLAIM
from tests.server.test_statuses import PUBLIC, path_of
from tests.support.engine import Engine
from tests.support.flows import submitted
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.subjects import Subjects


@pytest.mark.parametrize("route", ["state", "result", "outcome"])
async def test_a_client_that_leaves_ends_its_wait(
    serve: Serving, engine: Engine, route: str
) -> None:
    execution_id = await engine.create()
    async with serve(max_requests=1) as http:
        path = f"/v1/executions/{execution_id}/{route}?wait_ms=30000"
        _, writer = await asyncio.open_connection(*http.address)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        await waiters(engine, 1)
        assert (await http.get("/v1/lanes")).status == 429
        writer.close()
        await waiters(engine, 0)

        async def is_free() -> bool:
            return (await http.get("/v1/lanes")).status == 200

        # Its place is free a moment after the engine has forgotten the wait.
        await until(is_free, "a free place")


async def leaves(http: Http, head: str, body: bytes = b"") -> None:
    """Send a request that waits, and go away; return when its place is free again."""

    async def is_full() -> bool:
        return (await http.get("/v1/lanes")).status == 429

    async def is_free() -> bool:
        return not await is_full()

    _, writer = await asyncio.open_connection(*http.address)
    writer.write(f"{head} HTTP/1.1\r\nhost: t\r\n".encode() + body)
    await until(is_full, "a waiting request")
    writer.close()
    await until(is_free, "a free place")


async def test_a_client_that_leaves_a_summary(serve: Serving, engine: Engine) -> None:
    flow = await submitted(engine, "a")
    async with serve(max_requests=1) as http:
        await leaves(http, f"GET /v1/flows/{flow.flow_id}/summary?wait_ms=30000", b"\r\n")


async def test_a_client_that_leaves_a_claim(serve: Serving, engine: Engine) -> None:
    body = b'{"lane_id":"idle","worker_instance_id":"w-1","grant_ttl_ms":60000}'
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with serve(max_requests=1) as http:
        await leaves(http, "POST /v1/workers/w/claim?wait_ms=30000", head + body)
        execution_id = await engine.create(lane="idle")
        # It was not given to the one that left.
        granted = await http.post("/v1/workers/w/claim", CLAIM | {"lane_id": "idle"})
        assert (granted.status, granted.json["execution_id"]) == (200, execution_id)


async def test_a_worker_id_may_contain_a_slash(http: Http, engine: Engine) -> None:
    execution_id = await engine.create(lane="a/b")
    granted = await http.post("/v1/workers/pool%2Feu/claim", CLAIM | {"lane_id": "a/b"})
    assert (granted.status, granted.json["execution_id"]) == (200, execution_id)
    assert (await http.post("/v1/workers/pool/eu/claim", CLAIM)).status == 404
    lane = await http.get("/v1/lanes/a%2Fb")
    assert (lane.status, lane.json["lane_id"]) == (200, "a/b")


async def test_head_answers_as_get_without_a_body(http: Http, engine: Engine) -> None:
    subjects = Subjects(engine, http)
    count = 0
    for name, route in PUBLIC.items():
        # Streams have no end; /metrics and /readyz may differ from one call to the next.
        if route.method != "GET" or name.endswith(("/events", "/metrics")):
            continue
        subject = "flow" if "/flows/" in name else "budget" if "/budgets/" in name else "quota"
        if "/quotas/" not in name and subject == "quota":
            subject = "waiting"
        facts = await subjects.make(subject)
        path = path_of(route, facts)
        got, headed = await http.get(path), await http.send("HEAD", path)
        assert (headed.status, headed.body) == (got.status, b""), name
        if got.status < 400:
            length = "content-length"
            assert headed.headers[length] == got.headers[length], name
            count += 1
    assert count > 20
    unknown = await http.send("HEAD", "/nope")
    assert (unknown.status, unknown.headers["content-length"]) == (404, "21")
    refused = await http.send("HEAD", "/v1/bulk/cancel")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")
