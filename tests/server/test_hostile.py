"""Hostile input on every route: whatever is sent, the answer is never the server's fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flowfabric.server.openapi import document
from flowfabric.server.routes.table import all_routes
from flowfabric.server.routing import Route
from flowfabric.server.schemas import EVENTS
from tests.support.engine import Engine
from tests.support.http import Http, Response

EXECUTION = "{fp:7}:11111111-2222-4333-8444-555555555555"
UUID = "11111111-2222-4333-8444-555555555555"
ODD = [
    *(
        "",
        "0",
        "-1",
        "1e999",
        "null",
        "true",
        "🙂",
        "\x00",
        "a" * 300,
        "../..",
        "%",
        "{fp:999999}:x",
    ),
    *(
        "{fp:0}:",
        "start",
        "end",
        "+",
        "-",
        "0-0",
        "99999999999999999999999-1",
        "é",
        "\n",
        "\r\nx: y",
    ),
    *(UUID.upper(), EXECUTION, UUID, "default", "waiting", "eligible", "active", "cancel_all"),
]
DOCUMENT = document(all_routes())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
ROUTES = [route for route in all_routes() if not route.internal]

texts = st.sampled_from(ODD) | st.text(max_size=30)
numbers = st.integers() | st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**400, -(2**70)])
positions = st.sampled_from(["", "0-0", "1-1", "now", "-", "AQAAAaHucvxk", "AQ==", "a" * 300])
plain = st.none() | st.booleans() | numbers | st.floats() | texts
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def fitting(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema, now and then something else."""
    if "$ref" in schema:
        return fitting(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return st.one_of([fitting(each) for each in schema[name]])
    kind = schema.get("type")
    if kind == "object":
        properties: dict[str, Any] = schema.get("properties", {})
        if not properties:
            return st.dictionaries(texts, texts, max_size=3) | anything
        required = set(schema.get("required", ()))
        fields = {name: fitting(each) | anything for name, each in properties.items()}
        return st.fixed_dictionaries(
            {name: each for name, each in fields.items() if name in required},
            optional={name: each for name, each in fields.items() if name not in required},
        )
    if kind == "array":
        return st.lists(fitting(schema.get("items", {})), max_size=4)
    simple = {
        "string": texts,
        "integer": st.integers(schema.get("minimum", 0), schema.get("maximum", 2**40)),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return simple.get(kind, anything) if isinstance(kind, str) else anything


def body_of(route: Route) -> st.SearchStrategy[Any]:
    operation = DOCUMENT["paths"][route.template][route.method.lower()]
    if "requestBody" not in operation:
        return st.none()
    return fitting(operation["requestBody"]["content"]["application/json"]["schema"]) | anything


def sent_to(route: Route) -> list[tuple[str, Any, dict[str, str]]]:
    """Paths, bodies and headers for a route; the same in every run."""
    names = DOCUMENT["paths"][route.template][route.method.lower()].get("parameters", ())
    # Waiting would only make the test slow.
    queries = [
        each["name"]
        for each in names
        if each["in"] == "query" and each["name"] not in ("wait_ms", "block_ms")
    ]
    sent: list[tuple[str, Any, dict[str, str]]] = []

    @settings(
        max_examples=8,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def collect(data: st.DataObject) -> None:
        path = route.template
        for name in route.names:
            value = data.draw(st.sampled_from([EXECUTION, UUID, "0"]) | texts)
            path = path.replace(f"{{{name}}}", quote(value, safe="") or "%20")
        if queries:
            pairs = data.draw(st.dictionaries(st.sampled_from(queries), texts, max_size=3))
            path += "?" + "&".join(f"{n}={quote(v, safe='')}" for n, v in pairs.items())
        body = data.draw(body_of(route))
        headers = {"idempotency-key": "k"} if data.draw(st.booleans()) else {}
        headers |= (
            {"last-event-id": data.draw(positions)} if EVENTS in route.answers.values() else {}
        )
        sent.append((path, body, headers))

    collect()
    return sent


async def answered(
    http: Http, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> Response:
    """The answer; of an endless one only the head."""
    async with http.open(method, path, body, headers) as (reader, status, found):
        if found.get("content-type") == "text/event-stream":
            return Response(status, found, b"")
        return Response(status, found, await reader.read())


@pytest.mark.corrupts
async def test_no_input_makes_a_route_fail(http: Http, engine: Engine) -> None:
    for route in ROUTES:
        for path, body, headers in await asyncio.to_thread(sent_to, route):
            raw = None if body is None else json.dumps(body).encode()
            kind = {"content-type": "application/json"} if raw is not None else {}
            answer = await answered(http, route.method, path, raw, headers | kind)
            assert answer.status < 500 or route.template == "/readyz", (path, body, answer.body)
            if answer.status >= 400 and answer.status not in (401, 404, 405):
                assert {"error", "kind", "retryable", "code"} <= answer.json.keys()
