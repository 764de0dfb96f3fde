"""Who may call what: every route with every scope, other namespaces, rate limits, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from flowfabric.core.errors import ConfigError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.http.address import parse_url
from flowfabric.server.auth import (
    SCOPES,
    RateLimit,
    new_token,
    read_tokens,
    write_tokens,
)
from flowfabric.server.config import ServerConfig
from flowfabric.server.process import ServerProcess
from flowfabric.server.routes.table import all_routes
from flowfabric.server.routing import Route
from tests.server.conftest import Serving, serving
from tests.server.status_rows import ROWS
from tests.server.test_events import follow
from tests.server.test_statuses import filled
from tests.support.engine import Engine
from tests.support.flows import graph
from tests.support.http import Http

UUID = "11111111-2222-4333-8444-555555555555"
EXECUTION = f"{{fp:7}}:{UUID}"
E, F, B = "/v1/executions/{id}", "/v1/flows/{id}", "/v1/budgets/{id}"
W = f"{E}/waitpoints/{{waitpoint_id}}"
ATTEMPT = f"{E}/attempts/{{idx}}"
DECIDED: dict[str | None, str] = {
    None: "GET /livez,GET /healthz,GET /readyz,GET /metrics,"
    "POST /v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}",
    "read": f"GET /v1/executions,GET {E},GET {E}/state,GET {E}/result,GET {E}/outcome,"
    f"GET {E}/describe,GET {E}/history,GET {E}/steps,GET {E}/tags,GET {E}/explain,"
    f"GET {E}/pending-waitpoints,"
    f"GET {E}/events,GET /v1/suspended,GET {ATTEMPT}/stream,GET {ATTEMPT}/stream/tail,"
    f"GET {ATTEMPT}/stream/events,GET {ATTEMPT}/summary,GET /v1/events,GET /v1/flows,GET {F},"
    f"GET {F}/events,GET {F}/summary,GET {F}/members,GET {F}/edges,GET /v1/budgets,GET {B},"
    "GET /v1/quotas,GET /v1/quotas/{id},GET /v1/lanes,GET /v1/lanes/{lane},GET /v1/workers,"
    "GET /v1/workers/{instance}/leases,GET /v1/leases/expired,GET /v1/capabilities,"
    "GET /openapi.json,GET /docs",
    "submit": f"POST /v1/executions,PUT {E}/tags,POST /v1/bulk/executions,POST /v1/flows,"
    f"PUT {F}/tags,POST {F}/members,POST {F}/edges,POST {F}/edges/apply,POST /v1/flows/submit,"
    f"POST {F}/extend,PUT {F}/groups/{{execution_id}}",
    "signal": f"GET {W}/token,POST {E}/signal",
    "operate": f"POST {E}/cancel,PUT {E}/priority,POST {E}/replay,POST {E}/revoke-lease,"
    f"POST {E}/resume,POST {E}/reclaim,POST {E}/block,POST {E}/unblock,POST {W}/approve,"
    f"POST {W}/close,POST /v1/bulk/cancel,POST /v1/workers/{{worker_id}}/claim,DELETE {F},"
    f"POST {F}/cancel,POST {F}/release,POST {F}/replay,POST /v1/budgets,POST {B}/usage,"
    f"POST {B}/reset,PUT {B},DELETE {B},POST /v1/quotas,PUT /v1/quotas/{{id}},"
    "PUT /v1/lanes/{lane}/state,PUT /v1/lanes/{lane}/config,POST /v1/workers/{instance}/drain,"
    "POST /v1/workers/{instance}/dead",
    "remote": "POST /v1/remote/claim,POST /v1/remote/renew,POST /v1/remote/complete,"
    "POST /v1/remote/fail,POST /v1/remote/delay,POST /v1/remote/suspend,POST /v1/remote/frames,"
    "POST /v1/remote/progress,POST /v1/remote/usage",
    "admin": "POST /v1/admin/rotate-waitpoint-secret,GET /v1/admin/rotations/{id},"
    "GET /v1/admin/waitpoint-kids,GET /v1/admin/scanners,POST /v1/admin/scanners/{name}/run",
}
"""What each scope allows. A new route must be decided here, too.

The routes of our own clients have their scopes in one table: `engine/http/operations.py`.
"""
INCLUDED = {"operate": "remote"}


def test_every_route_has_its_scope() -> None:
    found: dict[str | None, set[str]] = {scope: set() for scope in DECIDED}
    for route in (each for each in all_routes() if not each.internal):
        found[route.scope].add(f"{route.method} {route.template}")
    assert found == {scope: set(names.split(",")) for scope, names in DECIDED.items()}


def path_of(route: Route, **ids: str) -> str:
    """A path of the route; what is not given does not exist."""
    known = {"idx": "0", "waitpoint_id": UUID, "execution_id": EXECUTION, **ids}
    known.setdefault("id", EXECUTION if route.template.startswith(f"{E}") else UUID)
    path = route.template
    for name in route.names:
        path = path.replace(f"{{{name}}}", quote(known.get(name, "x"), safe=""))
    # A stream that would start is refused for its cursor.
    return f"{path}?cursor=nope" if path == "/v1/events" else path


async def status_of(http: Http, route: Route, body: Any = None, **ids: str) -> int:
    given: Any = body if body is not None or route.body is None else {}
    return (await http.send(route.method, path_of(route, **ids), given)).status


@pytest.fixture
async def callers(engine: Engine, tmp_path: Path) -> AsyncIterator[dict[str, Http]]:
    """A client per scope on one server, and `nobody`."""
    made = {scope: new_token(scope, [scope], None) for scope in SCOPES}
    write_tokens(tmp_path / "tokens", [stored for _, stored in made.values()])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        yield {scope: http.with_token(token) for scope, (token, _) in made.items()} | {
            "nobody": http
        }


@pytest.mark.parametrize("scope", [*SCOPES, "nobody"])
async def test_a_scope_allows_its_routes_and_no_others(
    callers: dict[str, Http], scope: str
) -> None:
    for route in all_routes():
        status = await status_of(callers[scope], route)
        called = (scope, route.method, route.template, status)
        if route.scope is None:
            assert status in (200, 401, 503), called
        elif scope == "nobody":
            assert status == 401, called
        elif scope == "admin" or route.scope in (scope, INCLUDED.get(scope)):
            assert status not in (401, 403), called
        else:
            assert status == 403, called


HEADERS = {"worker_id": "w", "worker_instance_id": "w-1", "lane_id": "default"}


def bodies(execution_id: ExecutionId, flow_id: str) -> dict[str, Any]:
    """Valid bodies of the routes that name an execution or a flow in their path."""
    edge = {"flow_id": flow_id, "edge_id": UUID}
    ends = {"upstream_execution_id": execution_id, "downstream_execution_id": execution_id}
    signal = dict.fromkeys(
        *(["signal_name", "signal_category", "source_type", "source_identity", "target_scope"], "x")
    )
    named = {"waitpoint_id": UUID, "signal_id": UUID, "waitpoint_token": "k:" + "0" * 40}
    return {
        f"{E}/tags": {"app.a": "1"},
        f"{E}/cancel": {"execution_id": execution_id, "reason": "x"},
        f"{E}/priority": {"new_priority": 1},
        f"{E}/signal": {"execution_id": execution_id, **signal, **named},
        f"{E}/reclaim": {**HEADERS, "grant_ttl_ms": 1000},
        f"{W}/approve": {"signal_name": "x"},
        f"{F}/tags": {"app.a": "1"},
        f"{F}/members": {"flow_id": flow_id, "execution_id": execution_id},
        f"{F}/edges": edge | ends,
        f"{F}/edges/apply": edge,
        f"{F}/extend": {"nodes": [{"key": "z", "execution_kind": "k"}]},
        f"{F}/cancel": {"flow_id": flow_id, "reason": "", "cancellation_policy": "cancel_all"},
        f"{F}/groups/{{execution_id}}": {"kind": "all_of"},
    }


async def test_executions_and_flows_of_other_namespaces_are_not_found(
    engine: Engine, tmp_path: Path
) -> None:
    theirs = await engine.create(namespace="theirs")
    wanted = msgspec.structs.replace(graph("a>b"), namespace="theirs")
    flow = await engine.backend.flows.submit_flow(wanted)
    token, stored = new_token("ours", ["admin"], ["ours"])
    write_tokens(tmp_path / "tokens", [stored])
    given = bodies(theirs, flow.flow_id)
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        ours = http.with_token(token)
        for route in all_routes():
            if route.scope is None or not route.template.startswith((E, F)):
                continue
            id_ = theirs if route.template.startswith(E) else flow.flow_id
            sent = given.get(route.template) if route.method != "GET" else None
            answer = await ours.send(
                route.method, path_of(route, id=id_, execution_id=flow.nodes["a"]), sent
            )
            assert answer.status == 404, (route.method, route.template, answer.body)
        for path, noun in (
            ("/v1/executions", "executions"),
            ("/v1/flows", "flows"),
            ("/v1/suspended", "suspensions"),
            ("/v1/workers", "workers"),
            ("/v1/leases/expired", "leases"),
        ):
            assert (await ours.get(path)).json[noun] == [], path
        claim = {"lane_id": "default", "worker_instance_id": "w-1", "grant_ttl_ms": 1000}
        assert (await ours.post("/v1/workers/w/claim", claim)).status == 204
        mine = {"namespace": "ours", "execution_kind": "k"}
        joined = await ours.post("/v1/executions", mine | {"flow_id": flow.flow_id})
        assert joined.kind == (404, "flow_not_found")
        row = (await ours.post("/v1/bulk/executions", [mine | {"flow_id": flow.flow_id}])).json
        assert (row["results"][0]["status"], row["results"][0]["kind"]) == (404, "flow_not_found")
        cancel = [{"execution_id": theirs, "reason": "x"}]
        row = (await ours.post("/v1/bulk/cancel", cancel)).json["results"][0]
        assert (row["status"], row["kind"]) == (404, "execution_not_found")
        assert (await ours.post("/v1/executions", mine)).status == 201
        assert (await ours.post("/v1/workers/w/claim", claim)).status == 200
    assert await engine.backend.reads.read_execution_state(theirs) == "waiting"


async def test_leases_of_other_namespaces_are_not_revoked(engine: Engine, tmp_path: Path) -> None:
    """Instance ids are often guessable, such as the names of pods."""
    for namespace in ("ours", "theirs"):
        await engine.create(namespace=namespace)
    held = [(await engine.claim(namespaces=[name])).handle for name in ("ours", "theirs")]
    token, stored = new_token("ours", ["operate", "remote"], ["ours"])
    write_tokens(tmp_path / "tokens", [stored])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        ours = http.with_token(token)
        dead = await ours.post("/v1/workers/w-1/dead?namespace=ours", {"revoke_leases": True})
        assert (dead.status, dead.json) == (200, "NotRegistered")
        named = {"worker_instance_id": "w-1", "namespace": "ours", "revoke_leases": True}
        dead = await ours.post("/v1/engine/workers/mark_worker_dead", named)
        assert dead.status == 200, dead.body
        # Registering a namesake there is no way around it.
        other = {"worker_id": "w", "worker_instance_id": "w-1", "lanes": ["default"]}
        for name in ("theirs", "*"):
            given = other | {"namespace": "ours", "namespaces": [name]}
            answer = await ours.post("/v1/engine/workers/register_worker", given)
            assert answer.status in (403, 404), answer.body
    for handle, expected in zip(held, ("lease_revoked", "leased"), strict=True):
        info = await engine.backend.reads.read_execution_info(handle.execution_id)
        assert info.state_vector.ownership_state.value == expected


SHARED = {
    "POST /v1/budgets",
    *(f"PUT {B}", f"DELETE {B}", f"POST {B}/usage", f"POST {B}/reset"),
    *("POST /v1/quotas", "PUT /v1/quotas/{id}"),
    *("PUT /v1/lanes/{lane}/state", "PUT /v1/lanes/{lane}/config"),
    *("POST /v1/admin/rotate-waitpoint-secret", "POST /v1/admin/scanners/{name}/run"),
}


async def test_what_all_namespaces_share_needs_a_token_for_all(
    engine: Engine, tmp_path: Path
) -> None:
    token, stored = new_token("ours", ["admin"], ["ours"])
    write_tokens(tmp_path / "tokens", [stored])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        ours = http.with_token(token)
        for route in all_routes():
            name = f"{route.method} {route.template}"
            if name not in SHARED:
                continue
            body = ROWS[name][0].body
            given = None if body is None else filled(body, {"uuid": UUID})
            answer = await ours.send(route.method, path_of(route, id=UUID), given)
            assert answer.kind == (403, "forbidden"), name
            assert (
                answer.json["detail"] == "this call needs a token that is not limited to namespaces"
            ), name
        flow = {"flow_id": UUID, "flow_kind": "secret", "namespace": "theirs"}
        await engine.backend.flows.create_flow(UUID, "secret", "theirs")
        hidden = await ours.post("/v1/flows", flow | {"flow_kind": "x", "namespace": "ours"})
        assert hidden.kind == (400, "invalid_input")
        assert b"theirs" not in hidden.body
        assert b"secret" not in hidden.body


# --- the first check -----------------------------------------------------------------------


async def test_the_line_break_after_a_token_does_not_count(serve: Serving) -> None:
    """A secret read from a file ends with one; clients leave it out, too."""
    variables = {"FF_API_TOKEN": "s3cret\n"}
    config, address = ServerConfig.from_env(variables), parse_url("http://server", variables)
    assert config.api_token is not None
    assert config.api_token == address.token
    async with serve(api_token=config.api_token) as http:
        assert (await http.with_token(config.api_token).get("/v1/executions")).status == 200
    assert ServerConfig.from_env({"FF_API_TOKEN": " \n"}).listen == ("127.0.0.1", 9090)


async def test_the_token_is_checked_before_the_path(serve: Serving) -> None:
    async with serve(api_token="t") as http:
        for path in ("/nope", "/%ff", "/v1/executions/%ff", "/v1/executions/x/state", "/v1/%c3"):
            assert (await http.get(path)).status == 401, path
        known = http.with_token("t")
        for path in ("/%ff", "/v1/executions/%ff", "/v1/lanes/a%c3%28"):
            answer = await known.get(path)
            assert (*answer.kind, answer.json["detail"]) == (
                *(400, "invalid_input", "path: is not UTF-8"),
            )
        # Open paths are open for their own methods only.
        for path in ("/livez", "/healthz", "/readyz", "/metrics"):
            assert (await http.post(path)).status == 401, path
            assert (await known.post(path)).status == 405, path


async def test_every_answer_has_a_request_id(serve: Serving) -> None:
    async with serve(api_token="t") as http:
        known = http.with_token("t")
        for answer in (
            await http.get("/livez"),
            await http.get("/nope"),
            await known.get("/nope"),
            await known.post("/livez"),
            await known.get("/v1/executions/x"),
            await http.send(
                "OPTIONS",
                "/v1/executions",
                headers={"origin": "https://a.example", "access-control-request-method": "PUT"},
            ),
        ):
            assert len(answer.headers["x-request-id"]) == 36, answer.status


async def test_without_a_token_the_server_warns(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    ServerProcess(engine.backend, ServerConfig(listen=("127.0.0.1", 9090))).warn()
    admin, data = caplog.records
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert {record.__dict__["listen_addr"] for record in caplog.records} == {"127.0.0.1:9090"}
    assert "/v1/admin/*" in admin.getMessage()
    assert "waitpoint tokens and results" in data.getMessage()
    caplog.clear()
    ServerProcess(engine.backend, ServerConfig(api_token="t")).warn()
    assert caplog.records == []


# --- rate limits ----------------------------------------------------------------------------


async def test_a_token_over_its_rate_gets_a_retry_after(serve: Serving, tmp_path: Path) -> None:
    slow, limited = new_token("slow", ["read"], None, rate_per_s=0.5, burst=2)
    fast, free = new_token("fast", ["read"], None)
    write_tokens(tmp_path / "tokens", [limited, free])
    async with serve(tokens_file=tmp_path / "tokens") as http:
        one, other = http.with_token(slow), http.with_token(fast)
        assert [(await one.get("/v1/lanes")).status for _ in range(2)] == [200, 200]
        refused = await one.get("/v1/lanes", x_request_id="r-1")
        assert 0 < refused.json["retry_after_ms"] <= 2000
        assert refused.headers["retry-after"] in ("1", "2")
        assert refused.status == 429
        assert refused.json == {
            "error": "resource_exhausted: token 'slow' may send at most 0.5 requests per second",
            "kind": "resource_exhausted",
            "retryable": True,
            "code": "resource_exhausted",
            "class": "retryable",
            "group": refused.json["group"],
            "detail": "token 'slow' may send at most 0.5 requests per second",
            "request_id": "r-1",
            "retry_after_ms": refused.json["retry_after_ms"],
        }
        # Neither unknown paths nor missing scopes are a way around it; others are not affected.
        assert (await one.get("/nope")).status == 429
        assert (await one.delete("/v1/budgets/x")).status == 429
        assert (await one.get("/livez")).status == 200
        assert [(await other.get("/v1/lanes")).status for _ in range(5)] == [200] * 5


def test_a_rate_fills_up_again_but_never_above_its_burst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("flowfabric.server.auth.time.monotonic", lambda: now)
    limit = RateLimit(10, 3)
    assert [limit.take() for _ in range(3)] == [0, 0, 0]
    assert limit.take() == pytest.approx(0.1)
    now += 0.125
    assert (limit.take(), limit.take()) == (0, pytest.approx(0.075))
    now += 60
    assert [limit.take() > 0 for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rate_per_s": 0}, "rate_per_s must be above 0"),
        ({"rate_per_s": -1}, "rate_per_s must be above 0"),
        ({"burst": 5}, "burst must be from 1 to"),
        ({"rate_per_s": 1, "burst": 0}, "burst must be from 1 to"),
    ],
)
def test_a_limit_that_cannot_be_used(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        new_token("a", ["read"], None, **fields)


def test_limits_are_kept_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    stored = [
        new_token("a", ["read"], None, rate_per_s=2.5, burst=10)[1],
        new_token("b", ["read"], ["x"])[1],
    ]
    write_tokens(file, stored)
    assert read_tokens(file) == stored
    first, second = (token.caller.limit for token in stored)
    assert first is not None
    assert (first.rate_per_s, first.burst, second) == (2.5, 10, None)


# --- metrics --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/events", f"{E}/events", f"{E}/attempts/0/stream/events"])
async def test_an_event_stream_ends_when_its_token_is_revoked(
    engine: Engine, tmp_path: Path, path: str
) -> None:
    handle = await engine.running()
    (token, stored), (_, other) = (new_token(name, ["read"], None) for name in ("tv", "other"))
    write_tokens(tmp_path / "tokens", [stored])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        path = path.format(id=handle.execution_id)
        async with follow(http.with_token(token), path) as source:
            # Another change of the file does not concern it.
            write_tokens(tmp_path / "tokens", [stored, other])
            await engine.running()
            assert await source.block() is not None
            write_tokens(tmp_path / "tokens", [other])
            async with asyncio.timeout(10):
                assert "end" not in [each.name for each in await source.rest()]
        assert (await http.with_token(token).get(path)).status == 401


async def test_metrics_can_need_a_token(serve: Serving) -> None:
    async with serve(api_token="t") as http:
        assert (await http.get("/metrics")).status == 200
    async with serve(api_token="t", metrics_auth=True) as http:
        assert (await http.get("/metrics")).status == 401
        assert (await http.with_token("t").get("/metrics")).status == 200
        described = (await http.with_token("t").get("/openapi.json")).json
        assert described["paths"]["/metrics"]["get"]["x-scope"] == "read"


def test_protected_metrics_need_a_token_to_be_configured() -> None:
    with pytest.raises(ConfigError, match="FF_METRICS_AUTH"):
        ServerConfig.from_env({"FF_METRICS_AUTH": "1"})
    made = ServerConfig.from_env({"FF_METRICS_AUTH": "1", "FF_API_TOKEN": "t"})
    assert made.metrics_auth
