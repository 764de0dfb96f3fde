"""How long a body may be: the table of 10 §2.4, for every route."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from flowfabric.server.config import BodyLimits, ServerConfig
from tests.server.conftest import Serving
from tests.server.test_statuses import PUBLIC, plain
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.subjects import Subjects

LARGE = {"/v1/executions"}
CALLBACK = "/v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}"
MEDIUM = {"/v1/executions/{id}/signal", CALLBACK}
BULK = {"/v1/bulk/executions", "/v1/bulk/cancel", "/v1/flows/submit", "/v1/flows/{id}/extend"}
OF_WORKERS: Mapping[str, int] = {
    "/v1/remote/claim": 262_144,
    **dict.fromkeys(
        (f"/v1/remote/{each}" for each in ("renew", "complete", "fail", "delay", "suspend")),
        8_388_608,
    ),
    **dict.fromkeys((f"/v1/remote/{each}" for each in ("frames", "progress", "usage")), 8_388_608),
}
"""Routes that the specification does not have."""
WRITES = [route for route in PUBLIC.values() if route.method in ("POST", "PUT")]


def limit_of(template: str) -> int:
    if template in OF_WORKERS:
        return OF_WORKERS[template]
    if template in LARGE:
        return 1_048_576
    return 262_144 if template in MEDIUM else 8_388_608 if template in BULK else 65_536


def test_the_defaults() -> None:
    limits = ServerConfig().limits
    assert limits == BodyLimits(large=1_048_576, medium=262_144, control=65_536, bulk=8_388_608)


async def test_every_route_has_the_limit_of_the_table(http: Http) -> None:
    for route in WRITES:
        limit = limit_of(route.template)
        headers = {"content-type": "application/json", "content-length": str(limit + 1)}
        answer = await http.send(route.method, plain(route), None, headers)
        assert answer.status == 413, route.template
        assert answer.json == {
            "error": "payload_too_large",
            "kind": "payload_too_large",
            "retryable": False,
            "code": "payload_too_large",
            "class": "terminal",
            "group": "validation",
            "request_id": answer.headers["x-request-id"],
            "limit_bytes": limit,
            "route": route.template,
        }


async def test_every_route_counts_what_arrives(serve: Serving) -> None:
    """Without a declared length, and on routes that ignore their bodies, too."""
    chunks = (b"28\r\n" + b" " * 40 + b"\r\n") * 3 + b"0\r\n\r\n"
    headers = {"transfer-encoding": "chunked", "content-length": ""}
    headers |= {"content-type": "application/json"}
    async with serve(limits=BodyLimits(large=100, medium=100, control=100, bulk=100)) as http:
        for route in WRITES:
            answer = await http.send(route.method, plain(route), chunks, headers)
            assert (answer.status, answer.json.get("limit_bytes")) == (413, 100), route.template


async def test_a_body_that_is_ignored_may_be_anything(http: Http, engine: Engine) -> None:
    facts = await Subjects(engine, http).make("running")
    path = f"/v1/executions/{facts['id']}/revoke-lease"
    answer = await http.post(path, b"\xff{", content_type="text/plain")
    assert (answer.status, list(answer.json)) == (200, ["Revoked"])
    # It does not make a request another one.
    for body in (b"a", b"b"):
        answer = await http.post(path, body, idempotency_key="k")
        assert answer.json == {"AlreadySatisfied": {"reason": "already_revoked"}}


@pytest.mark.parametrize("extra", [0, 1])
async def test_an_approval_has_the_limit_of_a_control(
    http: Http, engine: Engine, extra: int
) -> None:
    facts = await Subjects(engine, http).make("parked")
    path = f"/v1/executions/{facts['id']}/waitpoints/{facts['waitpoint_id']}/approve"
    body = json.dumps({"signal_name": "go", "x": ""}).encode()
    long = body[:-2] + b"y" * (65_536 - len(body) + extra) + b'"}'
    answer = await http.post(path, long, content_type="application/json")
    assert answer.status == (413 if extra else 200)
