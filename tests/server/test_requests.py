"""What every request goes through: routes, auth, CORS, limits, ids, idempotency, health."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from flowfabric.server.auth import new_token, write_tokens
from flowfabric.server.config import BodyLimits
from tests.server.conftest import Serving, waiters
from tests.support.engine import Engine
from tests.support.http import Http, Response

LEAST = {"namespace": "default", "execution_kind": "resize"}
PATH = "/v1/executions"
UNAUTHORIZED = {
    "error": "missing or invalid Authorization header",
    "code": "unauthorized",
}


async def test_unknown_paths_and_methods(http: Http) -> None:
    for path in ("/nope", "/v1/executions/", "//v1/executions", "/v1/executions/a/b/c", "/"):
        answer = await http.get(path)
        assert (answer.status, answer.json) == (404, {"error": "not found"}), path
    answer = await http.delete(PATH)
    assert (answer.status, answer.json) == (405, {"error": "method not allowed"})
    assert answer.headers["allow"] == "GET, HEAD, POST"


async def test_head_answers_as_get_without_a_body(http: Http) -> None:
    got, headed = await http.get("/livez"), await http.send("HEAD", "/livez")
    assert (headed.status, headed.body) == (200, b"")
    assert headed.headers["content-length"] == got.headers["content-length"]


async def test_request_ids_are_minted_or_kept(http: Http) -> None:
    minted = await http.get("/livez")
    assert len(minted.headers["x-request-id"]) == 36
    kept = await http.get("/nope", x_request_id="abc-1")
    assert kept.headers["x-request-id"] == "abc-1"
    failed = await http.get(f"{PATH}/x", x_request_id="abc-2")
    assert failed.json["request_id"] == "abc-2"
    refused = await http.get("/livez", x_request_id="with space")
    assert refused.headers["x-request-id"] != "with space"


async def test_a_token_is_required_where_one_is_configured(serve: Serving) -> None:
    async with serve(api_token="s3cret") as http:
        for path in ("/livez", "/healthz", "/readyz"):
            assert (await http.get(path)).status == 200
        for header in (
            "",
            "s3cret",
            "bearer s3cret",
            "Bearer  s3cret",
            "Bearer s3crets",
            "Basic x",
        ):
            for path in (PATH, "/nope"):
                answer = await http.get(path, authorization=header)
                assert (answer.status, answer.json) == (401, UNAUTHORIZED), (header, path)
        allowed = http.with_token("s3cret")
        assert (await allowed.get(PATH)).status == 200
        assert (await allowed.get("/nope")).status == 404


async def test_scopes_and_namespaces_of_a_token(
    serve: Serving, engine: Engine, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.toml"
    reading, read = new_token("viewer", ["read"], ["acme"])
    writing, write = new_token("ci", ["submit", "operate"], ["acme"])
    ruling, rule = new_token("root", ["admin"], None)
    write_tokens(file, [read, write, rule])
    assert file.stat().st_mode & 0o777 == 0o600
    ours, theirs = await engine.create(namespace="acme"), await engine.create(namespace="other")
    async with serve(tokens_file=file) as http:
        viewer, ci, root = map(http.with_token, (reading, writing, ruling))
        assert (await viewer.post(PATH, LEAST)).kind == (403, "forbidden")
        assert (await ci.get(PATH)).kind == (403, "forbidden")
        assert (await ci.post(PATH, LEAST)).kind == (403, "forbidden")
        assert (await ci.post(PATH, LEAST | {"namespace": "acme"})).status == 201
        listed = (await viewer.get(PATH)).json["executions"]
        assert {row["namespace"] for row in listed} == {"acme"}
        for route in ("", "/state", "/result", "/describe", "/outcome", "/tags", "/explain"):
            hidden = await viewer.get(f"{PATH}/{theirs}{route}")
            assert hidden.kind == (404, "execution_not_found"), route
        assert (await viewer.get(f"{PATH}/{ours}")).status == 200
        assert (await root.get(f"{PATH}/{theirs}")).status == 200
        body = {"execution_id": theirs, "reason": "x"}
        assert (await ci.post(f"{PATH}/{theirs}/cancel", body)).kind == (
            404,
            "execution_not_found",
        )
        assert (await root.post(f"{PATH}/{theirs}/cancel", body)).status == 200


async def test_a_changed_tokens_file_takes_effect(
    serve: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.auth._LOOK_S", 0.0)
    file = tmp_path / "tokens.toml"
    first, stored = new_token("a", ["read"], None)
    write_tokens(file, [stored])
    async with serve(tokens_file=file) as http:
        assert (await http.with_token(first).get(PATH)).status == 200
        second, other = new_token("b", ["read"], None)
        write_tokens(file, [other])
        assert (await http.with_token(first).get(PATH)).status == 401
        assert (await http.with_token(second).get(PATH)).status == 200
        file.write_text("broken")
        assert (await http.with_token(second).get(PATH)).status == 200


async def test_cors_is_permissive_by_default(http: Http) -> None:
    answer = await http.get("/livez", origin="https://a.example")
    assert answer.headers["access-control-allow-origin"] == "*"
    asked = await http.send(
        "OPTIONS",
        PATH,
        headers={"origin": "https://a.example", "access-control-request-method": "PUT"},
    )
    assert asked.status == 200
    assert asked.headers["access-control-allow-methods"] == "*"
    # Browsers do not count `authorization` among what `*` allows.
    assert asked.headers["access-control-allow-headers"] == "*, authorization"


async def test_cors_with_a_list_and_a_token(serve: Serving) -> None:
    origins = frozenset({"https://a.example"})
    async with serve(cors_origins=origins, api_token="t") as http:
        preflight = {"access-control-request-method": "POST"}
        asked = await http.send(
            "OPTIONS", PATH, headers={"origin": "https://a.example", **preflight}
        )
        assert asked.status == 200
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        assert asked.headers["access-control-allow-methods"] == "GET, POST, PUT, DELETE"
        allowed = asked.headers["access-control-allow-headers"]
        assert allowed == "content-type, idempotency-key, last-event-id, authorization"
        other = await http.send(
            "OPTIONS", PATH, headers={"origin": "https://b.example", **preflight}
        )
        assert "access-control-allow-origin" not in other.headers
        refused = await http.get(PATH, origin="https://a.example")
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


async def test_bodies_over_their_limit(serve: Serving) -> None:
    async with serve(limits=BodyLimits(control=64, large=200)) as http:
        path = f"{PATH}/7-11111111-2222-4333-8444-555555555555/cancel"
        for body in (b"x" * 65, b"[" * 65):
            answer = await http.post(path, body, content_type="application/json")
            assert answer.status == 413
            assert answer.json == {
                "error": "payload_too_large",
                "kind": "payload_too_large",
                "retryable": False,
                "code": "payload_too_large",
                "class": "terminal",
                "group": "validation",
                "request_id": answer.headers["x-request-id"],
                "limit_bytes": 64,
                "route": "/v1/executions/{id}/cancel",
            }
        # A route that ignores its body refuses a long one all the same.
        answer = await http.post(path.replace("cancel", "revoke-lease"), b"x" * 65)
        assert answer.status == 413
        assert (await http.post(PATH, LEAST)).status == 201


async def test_a_chunked_body_is_counted_while_it_arrives(serve: Serving) -> None:
    async with serve(limits=BodyLimits(large=100)) as http:
        chunk = b"28\r\n" + b" " * 40 + b"\r\n"
        answer = await http.send(
            "POST",
            PATH,
            chunk * 3 + b"0\r\n\r\n",
            {
                "transfer-encoding": "chunked",
                "content-length": "",
                "content-type": "application/json",
            },
        )
        assert (answer.status, answer.json["limit_bytes"]) == (413, 100)


async def repeat(http: Http, key: str, body: Any = None, path: str = PATH) -> Response:
    return await http.post(path, LEAST if body is None else body, idempotency_key=key)


async def test_repeats_with_a_key_get_the_first_answer(http: Http, engine: Engine) -> None:
    first, second = await repeat(http, "k1"), await repeat(http, "k1")
    assert (second.status, second.body) == (201, first.body)
    assert second.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert (await repeat(http, "k2")).body != first.body
    assert len((await http.get(PATH)).json["executions"]) == 2


async def test_a_key_belongs_to_one_request(http: Http) -> None:
    await repeat(http, "k")
    other = await repeat(http, "k", LEAST | {"priority": 1})
    assert other.kind == (409, "idempotency_conflict")
    assert (await repeat(http, "k", path=f"{PATH}?x=1")).kind == (409, "idempotency_conflict")


async def test_which_answers_are_stored(http: Http, engine: Engine) -> None:
    """409 and 422 are stored; 400 and 404 are not, so that the next call runs."""
    execution_id = await engine.create()
    path = f"{PATH}/{execution_id}/replay"
    conflict = await http.post(path, idempotency_key="a")
    assert conflict.status == 409
    await engine.backend.executions.cancel_execution(execution_id)
    again = await http.post(path, idempotency_key="a")
    assert (again.status, again.body) == (409, conflict.body)
    assert (await http.post(path, idempotency_key="b")).status == 200
    bad = await repeat(http, "c", {})
    assert bad.status == 422
    assert (await repeat(http, "c", {})).headers["idempotency-replayed"] == "true"
    refused = await repeat(http, "d", LEAST | {"namespace": ""})
    assert refused.status == 400
    assert (
        "idempotency-replayed" not in (await repeat(http, "d", LEAST | {"namespace": ""})).headers
    )


@pytest.mark.parametrize("key", ["x" * 256, "caf\xe9"])
async def test_a_bad_key_is_400(http: Http, key: str) -> None:
    assert (await repeat(http, key)).kind == (400, "invalid_input")


async def test_a_key_whose_first_call_still_runs(http: Http, engine: Engine) -> None:
    # The marker of a call that has not ended, as another replica would have left it.
    first = await repeat(http, "busy")
    (key,) = cast("list[bytes]", await engine.backend.transport.call("KEYS", "ff:http:idem:*"))
    raw = cast("bytes", await engine.backend.transport.call("GET", key))
    digest, owner, _ = msgspec.msgpack.decode(raw)
    marker = msgspec.msgpack.encode([digest, owner, None])
    await engine.backend.transport.call("SET", key, marker, "PX", 60_000)
    answer = await repeat(http, "busy")
    assert answer.kind == (409, "idempotency_in_progress")
    assert answer.json["retryable"] is True
    assert first.status == 201


async def test_health(http: Http, engine: Engine) -> None:
    for path, status in (("/livez", "ok"), ("/healthz", "ok"), ("/readyz", "ready")):
        assert (await http.get(path)).json == {"status": status}


async def test_readiness_names_what_fails(
    http: Http, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.backend.transport.call("DEL", "ff:config:partitions")
    answer = await http.get("/readyz")
    assert answer.kind == (503, "unavailable")
    assert (answer.json["status"], answer.json["failing"]) == ("not_ready", ["partitions"])
    # As its class says (10 §5).
    assert (answer.json["class"], answer.json["retryable"]) == ("terminal", False)
    (fault,) = [each for each in map(vars, caplog.records) if each.get("action") == "backend_fault"]
    assert (fault["context"], fault["kind"]) == ("/readyz", "unavailable")
    assert fault["detail"] == "partitions", "the log of a fault says which check failed"
    await engine.backend.transport.call("FUNCTION", "FLUSH")
    assert (await http.get("/readyz")).json["failing"] == ["library", "partitions"]
    await engine.backend.meta.prepare()
    assert (await http.get("/readyz")).status == 200


async def test_metrics_are_for_no_other_origin(http: Http) -> None:
    for path in ("/metrics", "/%6Detrics", "/livez"):
        answer = await http.get(path, origin="https://a.example")
        shared = [name for name in answer.headers if name.startswith("access-control-")]
        assert (answer.status, bool(shared)) == (200, path == "/livez")


async def test_too_many_requests_at_once(serve: Serving, engine: Engine) -> None:
    execution_id = await engine.create()
    async with serve(max_requests=1) as http:
        waiting = asyncio.ensure_future(http.get(f"{PATH}/{execution_id}/state?wait_ms=30000"))
        await waiters(engine, 1)
        answer = await http.get(PATH)
        assert answer.kind == (429, "resource_exhausted")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json["error"] == (
            "too many concurrent requests calls (server max: 1); retry with backoff"
        )
        assert (await http.get("/livez")).status == 200
        await engine.backend.executions.cancel_execution(execution_id)
        assert (await waiting).json == "cancelled"


async def test_a_waiting_client_that_leaves_frees_its_place(serve: Serving, engine: Engine) -> None:
    execution_id = await engine.create()
    async with serve(max_requests=1) as http:
        path = f"{PATH}/{execution_id}/state?wait_ms=30000"
        _, writer = await asyncio.open_connection(*http.address)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        await waiters(engine, 1)
        assert (await http.get(PATH)).status == 429
        writer.close()
        await waiters(engine, 0)
        assert (await http.get(PATH)).status == 200


async def raw_exchange(http: Http, *parts: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and envelope of what the server answers before it closes the connection."""
    reader, writer = await asyncio.open_connection(*http.address)
    for part in parts:
        writer.write(part)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["content-length"] == str(len(body))
    assert headers["connection"] == "close"
    return int(status.split()[1]), headers, msgspec.json.decode(body)


async def test_an_oversized_head_ends_the_connection(http: Http) -> None:
    filler = b"x-filler: " + b"a" * 4096 + b"\r\n"
    status, headers, answer = await raw_exchange(http, b"GET /livez HTTP/1.1\r\n", *[filler] * 40)
    assert (status, answer["kind"], answer["retryable"]) == (431, "invalid_input", False)
    assert "at most 65536 bytes" in answer["error"]
    assert answer["request_id"] == headers["x-request-id"]


@pytest.mark.parametrize(
    "sent",
    [
        b"PAINT / HTTP/1.1\r\nhost: t\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: t\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/bulk/cancel HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
    ids=["method", "version", "two lengths", "chunk", "TLS"],
)
async def test_malformed_http_is_answered_with_an_envelope(http: Http, sent: bytes) -> None:
    status, headers, answer = await raw_exchange(http, sent)
    assert (status, answer["kind"], answer["retryable"]) == (400, "invalid_input", False)
    assert answer["request_id"] == headers["x-request-id"]
    assert (await http.get("/livez")).status == 200


async def test_malformed_http_does_not_end_up_in_an_answer(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    reader, writer = await asyncio.open_connection(*http.address)
    writer.write(f"GET {PATH}/{execution_id}/events HTTP/1.1\r\nhost: t\r\n\r\n".encode())
    await reader.readuntil(b"\n\n")
    writer.write(b"PAINT / HTTP/1.1\r\n\r\n")
    assert b"HTTP/1.1 400" not in await reader.read()
    writer.close()


async def test_a_slow_head_ends_the_connection(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.listener.HEAD_TIMEOUT_S", 0.05)
    async with serve() as http:
        for sent in (b"", b"GET /livez HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection(*http.address)
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()
        assert (await http.get("/livez")).status == 200


async def test_a_slow_body_is_refused(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.server.exchange.BODY_TIMEOUT_S", 0.05)
    async with serve() as http:
        answer = await http.send(
            "POST", PATH, b"{", {"content-length": "50", "content-type": "application/json"}
        )
        assert answer.kind == (400, "invalid_input")


async def test_a_keep_alive_connection_serves_several_requests(http: Http) -> None:
    reader, writer = await asyncio.open_connection(*http.address)
    body = json.dumps(LEAST).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    for _ in range(3):
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        found = await reader.readuntil(b"\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 201 ")
        length = int(found.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()
