"""Each endpoint with each status: what the OpenAPI document names occurs, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.server.auth import new_token, write_tokens
from flowfabric.server.config import ServerConfig
from flowfabric.server.openapi import document
from flowfabric.server.process import ServerProcess
from flowfabric.server.queries import NoQuery
from flowfabric.server.routes.table import all_routes
from flowfabric.server.routing import Route
from flowfabric.valkey.address import parse_url
from tests.server.conftest import Serving, serving, waiters
from tests.server.status_rows import (
    CUT_OFF,
    LATE,
    ROTATE,
    ROWS,
    STOPPING,
    Row,
)
from tests.support.engine import Engine
from tests.support.flows import drained, set_units, submitted
from tests.support.http import Http, Response
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.shapes import EXECUTION, UUID
from tests.support.subjects import Facts, Subjects

PUBLIC = {f"{route.method} {route.template}": route for route in all_routes() if not route.internal}
DOCUMENTED: dict[str, set[int]] = {
    f"{method.upper()} {path}": {
        int(status) for status in operation["responses"] if status[0] < "a"
    }
    for path, methods in document(all_routes())["paths"].items()
    for method, operation in methods.items()
}
GENERATED = {400, 401, 403, 409, 413, 415, 422, 429}
"""What follows from the kind of a route: tests below, and 401 and 403 in `test_auth`."""
LIMITS = ServerConfig().limits
TOKEN = {"x-ff-waitpoint-token": "x"}


def filled(value: Any, facts: Facts) -> Any:
    """A value with the facts that it refers to."""
    if isinstance(value, dict):
        return {name: filled(each, facts) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [filled(each, facts) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return facts[value[1:]] if isinstance(value, str) and value.startswith("$") else value


def path_of(route: Route, facts: Mapping[str, str]) -> str:
    path = route.template
    for name in route.names:
        path = path.replace(f"{{{name}}}", quote(facts[name], safe=""))
    return path


async def sent(
    http: Http, route: Route, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer, which must have a documented status; a stream of events is left at once."""
    async with http.open(route.method, path, body, headers) as (reader, status, found):
        content = b""
        if found.get("content-type") != "text/event-stream" and status != 204:
            content = await reader.readexactly(int(found["content-length"]))
    name = f"{route.method} {route.template}"
    assert status in DOCUMENTED[name], (name, status, content)
    return Response(status, found, content)


def test_every_status_has_a_row_and_every_row_is_documented() -> None:
    assert ROWS.keys() == PUBLIC.keys() == DOCUMENTED.keys()
    for name, route in PUBLIC.items():
        shown = {row.status for row in ROWS[name]}
        shown |= {503} if name in (*STOPPING, *CUT_OFF) else set()
        shown |= {504} if name in LATE else set()
        assert DOCUMENTED[name] == {*route.answers, *route.refusals}
        assert shown <= DOCUMENTED[name], name
        # A refusal that this route has for a reason of its own needs a row of its own.
        assert DOCUMENTED[name] - GENERATED | set(route.errors) <= shown, name


# --- rows -----------------------------------------------------------------------------------


@pytest.fixture
async def callers(engine: Engine, tmp_path: Path) -> AsyncIterator[dict[str, Http]]:
    """Clients of one server: one with all rights, one of other namespaces, one over its rate."""
    made = {
        "all": new_token("all", ["admin"], None),
        "theirs": new_token("theirs", ["admin"], ["theirs"]),
        "slow": new_token("slow", ["admin"], None, rate_per_s=0.001, burst=1),
    }
    write_tokens(tmp_path / "tokens", [stored for _, stored in made.values()])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        yield {name: http.with_token(token) for name, (token, _) in made.items()}


async def check(callers: dict[str, Http], subjects: Subjects, name: str, row: Row) -> None:
    route, http = PUBLIC[name], callers["theirs" if row.theirs else "all"]
    facts = await subjects.make(row.subject)
    query = "&".join(
        f"{key}={filled(value, facts)}"
        for key, _, value in (part.partition("=") for part in row.query.split("&"))
    )
    path = path_of(route, facts) + (f"?{query}" if row.query else "")
    body, headers = filled(row.body, facts), filled(dict(row.headers), facts)
    if row.repeated:
        await sent(http, route, path, body, headers)
    answer = await sent(http, route, path, body, headers)
    said = (name, row, answer.body)
    assert answer.status == row.status, said
    if row.status == 401:
        assert answer.json["code"] == row.word, said
    elif row.status >= 400:
        assert answer.json["kind"] == row.word, said
        if row.status == 404:
            assert answer.json["detail"] in named(row.word, facts), said
    elif row.word:
        # A bare string, or one of the members.
        assert row.word in (answer.json, *answer.json), said


def named(code: str, facts: Facts) -> set[str]:
    """What the detail of a `*_not_found` may name: the id or the name that was asked for."""
    if code == "summary_not_found":
        return {f"{facts['id']}, attempt 0"}
    for start, key in (("waitpoint", "waitpoint_id"), ("lane", "lane"), ("scanner", "name")):
        if code.startswith(start):
            return {facts[key]}
    ids: list[str] = [facts[each] for each in ("id", "uuid", "execution_id", "gone")]
    of_execution = code.startswith(("execution", "result"))
    return {each for each in ids if each.startswith("{") == of_execution}


@pytest.mark.parametrize("part", range(4))
async def test_every_row(callers: dict[str, Http], engine: Engine, part: int) -> None:
    subjects = Subjects(engine, callers["all"])
    for name in list(ROWS)[part::4]:
        for row in ROWS[name]:
            await check(callers, subjects, name, row)


# --- what follows from the kind of a route --------------------------------------------------

BAD = {
    **dict.fromkeys(("id", "execution_id", "waitpoint_id", "idx"), "x"),
    "lane": "a" * 65,
    "instance": "a%20b",
    "worker_id": "a%20b",
    "name": "%ff",
}


def plain(route: Route) -> str:
    """A path of the route whose ids have the right form."""
    facts = dict.fromkeys(route.names, "x") | {"idx": "0", "waitpoint_id": UUID}
    facts |= {"execution_id": EXECUTION}
    facts["id"] = EXECUTION if "/executions/{id}" in route.template else UUID
    return path_of(route, facts)


async def test_other_methods_are_405(http: Http) -> None:
    for route in PUBLIC.values():
        answer = await http.send("PATCH", plain(route))
        assert (answer.status, answer.json) == (405, {"error": "method not allowed"})
        assert route.method in answer.headers["allow"].split(", ")


async def test_bodies_that_are_refused(http: Http) -> None:
    for name, route in PUBLIC.items():
        limit = getattr(LIMITS, route.limit)
        json = {"content-type": "application/json", **TOKEN}
        for status, code, body, headers in (
            (413, "payload_too_large", None, json | {"content-length": str(limit + 1)}),
            (415, "invalid_input", b"{}", json | {"content-type": "text/plain"}),
            (422, "invalid_input", b"5", json),
            (400, "invalid_input", b"{", json),
        ):
            if route.body is None and (status != 413 or status not in DOCUMENTED[name]):
                # Whatever is sent is ignored.
                assert status == 400 or status not in DOCUMENTED[name], name
                continue
            answer = await sent(http, route, plain(route), body, headers)
            assert answer.kind == (status, code), (name, answer.body)


async def test_malformed_ids_queries_and_keys_are_400(http: Http) -> None:
    for name, route in PUBLIC.items():
        none: dict[str, str] = {}
        tried = [(each, path_of_bad(route, each), none) for each in route.names]
        if route.query is not NoQuery:
            tried.append(("query", f"{plain(route)}?x=%ff", none))
        if route.method in ("POST", "PUT") and route.scope is not None:
            tried.append(("key", plain(route), {"idempotency-key": "x" * 256}))
        assert bool(tried) == (400 in DOCUMENTED[name]), name
        for what, path, headers in tried:
            body = None if route.body is None else valid_body(name)
            answer = await sent(http, route, path, body, {**headers, **TOKEN})
            assert answer.kind == (400, "invalid_input"), (name, what, answer.body)


def path_of_bad(route: Route, name: str) -> str:
    good = plain(route).split("/")
    parts = route.template.split("/")
    return "/".join(
        BAD[name] if part == f"{{{name}}}" else value
        for part, value in zip(parts, good, strict=True)
    )


def valid_body(name: str) -> Any:
    """A body that decodes, about what does not exist."""
    facts = {"id": EXECUTION, "execution_id": EXECUTION, "a": EXECUTION, "b": EXECUTION}
    facts |= {"uuid": UUID, "waitpoint_id": UUID, "lane": "x", "token": "x"}
    facts |= {"handle": "x", "gone": EXECUTION}
    if "/flows/{id}" in name:
        facts["id"] = UUID
    return filled(ROWS[name][0].body, facts)


async def test_a_key_of_another_request_is_409(callers: dict[str, Http], engine: Engine) -> None:
    subjects, http = Subjects(engine, callers["all"]), callers["all"]
    for name, route in PUBLIC.items():
        if route.method not in ("POST", "PUT") or route.scope is None:
            continue
        # The first row of a route is one that succeeds.
        row = ROWS[name][0]
        facts = await subjects.make(row.subject)
        path, body = path_of(route, facts), filled(row.body, facts)
        first = await sent(http, route, path, body, {"idempotency-key": "k"})
        assert first.status < 300, (name, first.body)
        answer = await sent(http, route, f"{path}?other", body, {"idempotency-key": "k"})
        assert answer.kind == (409, "idempotency_conflict"), name


async def test_too_many_requests_are_429(
    callers: dict[str, Http], serve: Serving, engine: Engine
) -> None:
    slow = callers["slow"]
    assert (await slow.get("/v1/lanes")).status == 200
    for name, route in PUBLIC.items():
        if route.scope is not None:
            answer = await sent(slow, route, plain(route))
            assert answer.kind == (429, "resource_exhausted"), name
    execution_id = await engine.create()
    async with serve(max_requests=1) as http:
        waiting = asyncio.ensure_future(
            http.get(f"/v1/executions/{execution_id}/state?wait_ms=30000")
        )
        await waiters(engine, 1)
        for name, route in PUBLIC.items():
            if route.counted:
                answer = await sent(http, route, plain(route))
                assert answer.kind == (429, "resource_exhausted"), name
            elif route.scope is None:
                assert (await sent(http, route, plain(route))).status == 200, name
        await engine.backend.executions.cancel_execution(execution_id)
        await waiting


# --- a server that stops, is cut off, or is late --------------------------------------------


async def test_a_stopping_server_answers_503(engine: Engine) -> None:
    config = ServerConfig(listen=("127.0.0.1", 0), shutdown_timeout_s=5)
    server = ServerProcess(engine.backend, config)
    await server.listen()
    pools = (
        *(server.services.event_streams, server.services.remote_claims),
        engine.backend.stream_pool,
    )
    try:
        server.services.stopping.set()
        for pool in pools:
            pool.closed = True
        for name in STOPPING:
            body = {"worker_instance_id": "w"} if PUBLIC[name].body is not None else None
            answer = await sent(Http(server.address), PUBLIC[name], plain(PUBLIC[name]), body)
            assert answer.kind == (503, "unavailable"), (name, answer.body)
            assert "retry-after" in answer.headers, name
            # Another server takes what a closed pool refuses (02 §16); a probe asks this one.
            assert answer.json["retryable"] is (name != "GET /readyz"), name
    finally:
        await server.stop_serving()
        engine.backend.stream_pool.closed = False


async def test_a_server_without_valkey_answers_503(engine: Engine, valkey: TestServer) -> None:
    backend = await ValkeyBackend.connect(parse_url(valkey.url))
    await backend.aclose()
    server = ServerProcess(backend, ServerConfig(listen=("127.0.0.1", 0)))
    await server.listen()
    try:
        for name in CUT_OFF:
            body = valid_body(name) if PUBLIC[name].body is not None else None
            answer = await sent(Http(server.address), PUBLIC[name], plain(PUBLIC[name]), body)
            assert answer.kind == (503, "unavailable"), (name, answer.body)
            assert answer.headers["retry-after"] == "1", name
    finally:
        await server.stop_serving()


async def test_a_server_reports_a_hanging_valkey_before_probes_time_out(
    engine: Engine, valkey: TestServer
) -> None:
    with FaultProxy(valkey.socket_path) as proxy:
        backend = await ValkeyBackend.connect(parse_url(proxy.url))
        server = ServerProcess(backend, ServerConfig(listen=("127.0.0.1", 0)))
        await server.listen()
        http = Http(server.address)
        try:
            proxy.pause()
            # Calls of the engine try for 10 s.
            async with asyncio.timeout(5):
                health, ready = await asyncio.gather(http.get("/healthz"), http.get("/readyz"))
            assert health.kind == ready.kind == (503, "unavailable")
            assert health.json["detail"] == "Valkey did not respond within 1 s"
            assert ready.json["failing"] == ["ping"]
            assert (await http.get("/livez")).status == 200
            proxy.resume()
            assert (await http.get("/readyz")).status == 200
        finally:
            proxy.resume()
            await server.stop_serving()
            await backend.aclose()


async def test_what_takes_too_long_is_504(
    http: Http, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    monkeypatch.setattr("flowfabric.server.routes.admin.ROTATION_TIMEOUT_S", 0.0)
    body = {"new_kid": "k2", "new_secret_hex": "cd" * 32}
    assert (await http.post(ROTATE, body)).kind == (504, "timeout")
    await set_units(engine, 1)
    flow = await submitted(engine, " ".join(f"n{n}" for n in range(100)))
    await drained(engine, flow.tag)
    stop = {"flow_id": flow.flow_id, "reason": "x", "cancellation_policy": "cancel_all"}
    path = f"/v1/flows/{flow.flow_id}/cancel?wait=true&wait_timeout_ms=1"
    assert (await http.post(path, stop)).kind == (504, "timeout")
