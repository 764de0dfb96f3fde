"""Faults of the server and of Valkey as answers: 500 and 503, and when to try again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.errors import LimitError, UnavailableError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.server.app import ServerApp
from flowfabric.server.calls import Call
from flowfabric.server.config import ServerConfig
from flowfabric.server.listener import Listener, bind
from flowfabric.server.process import ServerProcess
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes, RouteTable
from flowfabric.server.wire import Reply
from flowfabric.valkey.address import parse_url
from tests.server.status_rows import SIGNAL
from tests.server.test_statuses import filled
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.server import TestServer
from tests.support.subjects import Subjects


@pytest.mark.corrupts
async def test_unreadable_records_are_corruption(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    key = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HSET", key, "state", "??????")
    answer = await http.get(f"/v1/executions/{execution_id}")
    assert answer.status == 500
    detail = answer.json["detail"]
    assert execution_id in detail
    assert answer.json == {
        "error": f"corruption: {detail}",
        "kind": "corruption",
        "retryable": False,
        "code": "corruption",
        "class": "terminal",
        "group": "corruption",
        "detail": detail,
        "request_id": answer.headers["x-request-id"],
    }


async def test_an_unreadable_handle_is_a_mistake_of_its_sender(http: Http) -> None:
    body = {"items": [{"handle": "bm9uc2Vuc2U="}]}
    (row,) = (await http.post("/v1/remote/renew", body)).json["results"]
    assert (row["status"], row["kind"]) == (400, "invalid_input")
    assert row["detail"] == "handle: is malformed; send it as the claim returned it"


@asynccontextmanager
async def cut_off(valkey: TestServer) -> AsyncGenerator[Http]:
    """A server whose connection to Valkey is closed."""
    backend = await ValkeyBackend.connect(parse_url(valkey.url))
    await backend.aclose()
    server = ServerProcess(backend, ServerConfig(listen=("127.0.0.1", 0)))
    await server.listen()
    try:
        yield Http(server.address)
    finally:
        await server.stop_serving()


async def test_without_valkey_calls_fail_with_the_kind_of_fault(
    engine: Engine, valkey: TestServer
) -> None:
    async with cut_off(valkey) as http:
        answer = await http.post("/v1/executions", {"namespace": "x", "execution_kind": "x"})
        assert answer.status == 500
        detail = answer.json["detail"]
        assert answer.json == {
            "error": f"transport: {detail}",
            "kind": "transport",
            "retryable": True,
            "code": "transport",
            "class": "retryable",
            "group": "availability",
            "detail": detail,
            "request_id": answer.headers["x-request-id"],
            "ambiguous": False,
        }


async def test_without_valkey_503_has_a_retry_after(engine: Engine, valkey: TestServer) -> None:
    rotation = {"new_kid": "k2", "new_secret_hex": "cd" * 32}
    async with cut_off(valkey) as http:
        for answer, error in (
            (await http.get("/healthz"), "ping"),
            (await http.get("/readyz"), "readyz"),
            (await http.post("/v1/admin/rotate-waitpoint-secret", rotation), "rotate"),
        ):
            assert answer.kind == (503, "unavailable")
            assert answer.json["error"] == f"backend op unavailable: {error}"
            assert answer.headers["retry-after"] == "1"


async def test_a_signal_without_stored_keys_is_503(http: Http, engine: Engine) -> None:
    facts = await Subjects(engine, http).make("parked")
    key = keys.secrets(facts["id"].tag)
    assert await engine.backend.transport.call("DEL", key) == 1
    answer = await http.post(f"/v1/executions/{facts['id']}/signal", filled(SIGNAL, facts))
    assert answer.kind == (503, "hmac_secret_not_initialized")
    assert (answer.json["group"], answer.json["retryable"]) == ("key_store", False)
    assert answer.headers["retry-after"] == "1"


# --- what handlers raise --------------------------------------------------------------------


@asynccontextmanager
async def raising(engine: Engine, error: Exception) -> AsyncGenerator[Http]:
    """A server with one route, whose handler fails."""
    routes = Routes()

    @routes.get("/fails", scope=None)
    async def fails(call: Call[None, NoQuery]) -> Reply:
        raise error

    process = ServerProcess(engine.backend, ServerConfig(listen=("127.0.0.1", 0)))
    bound = bind("127.0.0.1", 0)
    listener = Listener(ServerApp(process.services, RouteTable(routes.found)), bound)
    await listener.start()
    try:
        yield Http(bound.getsockname()[:2])
    finally:
        await listener.stop(5.0)


FAULTS: list[tuple[Exception, int, dict[str, Any]]] = [
    (
        RuntimeError("secret"),
        500,
        {
            "error": "invariant_violation: see the server's log for the cause",
            "kind": "invariant_violation",
            "retryable": False,
            "code": "invariant_violation",
            "class": "bug",
            "group": "bug",
            "detail": "see the server's log for the cause",
        },
    ),
    (
        UnavailableError("unavailable", op="list_things"),
        503,
        {
            "error": "backend op unavailable: list_things",
            "kind": "unavailable",
            "retryable": False,
            "code": "unavailable",
            "class": "terminal",
            "group": "availability",
            "detail": "list_things",
        },
    ),
    (
        LimitError("signature_limit_exceeded"),
        429,
        {
            "error": "signature_limit_exceeded",
            "kind": "signature_limit_exceeded",
            "retryable": True,
            "code": "signature_limit_exceeded",
            "class": "retryable",
            "group": "limit",
        },
    ),
]


@pytest.mark.parametrize(
    ("error", "status", "body"), FAULTS, ids=[each[2]["code"] for each in FAULTS]
)
async def test_what_a_handler_raises(
    engine: Engine, error: Exception, status: int, body: dict[str, Any]
) -> None:
    async with raising(engine, error) as http:
        answer = await http.get("/fails")
    assert answer.status == status
    assert answer.json == body | {"request_id": answer.headers["x-request-id"]}
    assert answer.headers.get("retry-after") == (None if status == 500 else "1")
