"""Clients that misbehave on the wire: the server stays up, bounded and available to others."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from flowfabric.server.exchange import EventStream, send_events
from flowfabric.server.listener import bind, connections_allowed
from tests.server.conftest import Serving, waiters
from tests.support.engine import Engine
from tests.support.http import Http, read_head
from tests.support.sdk import until

PATH = "/v1/executions"
UUID = "00000000-0000-4000-8000-000000000001"
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(http: Http) -> AsyncGenerator[Link]:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*http.address)
        try:
            yield reader, writer
        finally:
            writer.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed the connection, without sending anything."""
    try:
        async with asyncio.timeout(0.01):
            return await reader.read(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def test_idle_connections_make_room_for_others(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.listener.MAX_CONNECTIONS", 30)
    links: list[Link] = []
    async with serve() as http:
        for n in range(100):
            reader, writer = await asyncio.open_connection(*http.address)
            # A head that never ends does not help.
            writer.write(b"GET /livez HTTP/1.1\r\n" if n % 2 else b"")
            links.append((reader, writer))
        for _ in range(5):
            assert (await http.get("/livez")).status == 200
        closed = await asyncio.gather(*(is_closed(reader) for reader, _ in links))
        assert sum(closed) >= 70
        assert closed[:50] == [True] * 50
    for _, writer in links:
        writer.close()


async def test_busy_connections_are_not_dropped_for_new_ones(
    serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.listener.connections_allowed", lambda: 2)
    ids = [await engine.create() for _ in range(2)]
    async with serve() as http:
        paths = [f"{PATH}/{each}/state?wait_ms=20000" for each in ids]
        waiting = [asyncio.create_task(http.get(path)) for path in paths]
        await waiters(engine, 2)
        async with connected(http) as (reader, _):
            status, headers = await read_head(reader)
            assert (status, headers["retry-after"]) == (503, "1")
            refusal = msgspec.json.decode(await reader.read())
            assert (refusal["kind"], refusal["retryable"]) == ("unavailable", True)
            assert refusal["request_id"] == headers["x-request-id"]
        for each in ids:
            await engine.backend.executions.cancel_execution(each)
        answers = await asyncio.gather(*waiting)
        assert [answer.json for answer in answers] == ["cancelled", "cancelled"]
        assert (await http.get("/livez")).status == 200


def rlimit(files: int, _: int) -> tuple[int, int]:
    return files, files


async def test_as_many_connections_as_files_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = "flowfabric.server.listener.resource.getrlimit"
    for files, allowed in ((1024, 512), (100, 16), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr(limits, partial(rlimit, files))
        assert connections_allowed() == allowed


async def test_pipelined_requests_are_answered_in_order(http: Http) -> None:
    paths = ["/livez", "/nope", "/v1/lanes?limit=0", "/readyz"] * 25
    async with connected(http) as (reader, writer):
        for path in paths:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        statuses: list[int] = []
        for _ in paths:
            status, headers = await read_head(reader)
            await reader.readexactly(int(headers["content-length"]))
            statuses.append(status)
    assert statuses == [200, 404, 200, 200] * 25


async def test_pipelined_requests_wait_unread(http: Http, engine: Engine) -> None:
    """Each costs the server a hundred times its bytes once it is parsed."""
    execution_id = await engine.create()
    waiting = f"GET {PATH}/{execution_id}/state?wait_ms=20000 HTTP/1.1\r\nhost: t\r\n\r\n".encode()
    bodies = b"POST /nope HTTP/1.1\r\ncontent-length: 5\r\n\r\n12345" * 2000
    async with connected(http) as (reader, writer):
        writer.write(waiting + b"GET /livez HTTP/1.1\r\n\r\n" * 4000 + bodies)
        await writer.drain()
        await waiters(engine, 1)
        assert sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects()) < 500
        await engine.backend.executions.cancel_execution(execution_id)
        statuses: list[int] = []
        for _ in range(6001):
            status, headers = await read_head(reader)
            await reader.readexactly(int(headers["content-length"]))
            statuses.append(status)
    assert statuses == [200] * 4001 + [404] * 2000


async def test_a_client_that_leaves_with_another_request_in_line_holds_nothing(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.routes.events.TICK_S", 0.01)
    monkeypatch.setattr("flowfabric.server.sse.HEARTBEAT_S", 0.01)
    async with serve(max_event_streams=1) as http:

        async def is_free() -> bool:
            async with http.open("GET", "/v1/events", None, {}) as (_, status, _):
                return status == 200

        async with connected(http) as (reader, writer):
            writer.write(b"GET /v1/events HTTP/1.1\r\nhost: t\r\n\r\n")
            assert (await read_head(reader))[0] == 200
            writer.write(b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n")
            await reader.readuntil(b": heartbeat")
            assert not await is_free()
        await until(is_free, "a permit")


BROKEN = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a line of binary": bytes(range(256)) + b"\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a header without a name": b"GET /livez HTTP/1.1\r\n: x\r\n\r\n",
    "a negative length": b"POST /v1/executions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    "two lengths": b"POST /v1/flows HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "a length and chunks": b"POST /v1/flows HTTP/1.1\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a tunnel": b"CONNECT flowfabric:80 HTTP/1.1\r\nhost: flowfabric:80\r\n\r\n",
    "broken chunks": b"POST /v1/flows HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "a huge chunk": b"POST /v1/flows HTTP/1.1\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\nffffffffff\r\n{",
    "a long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_requests(serve: Serving, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.server.exchange.BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("flowfabric.server.listener.HEAD_TIMEOUT_S", 0.5)
    async with serve() as http:
        async with connected(http) as (reader, writer):
            writer.write(BROKEN[name])
            try:
                answer = await reader.read(4096)
            except ConnectionError:
                answer = b""
        assert not answer or answer.split()[1].startswith(b"4"), answer
        assert (await http.get("/livez")).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"policy":' * 200 + b"1" + b"}" * 200,
        b'{"namespace":"\xff\xfe"}',
        b'{"namespace":"\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"namespace":"a","namespace":',
        b"nul",
        b"{" + b'"x":1,' * 50_000 + b'"y":1',
        b'{"priority":' + b"9" * 50_000 + b"}",
    ],
)
async def test_bodies_that_are_not_json(http: Http, body: bytes) -> None:
    answer = await http.post(PATH, body, content_type="application/json")
    assert answer.status in (400, 422), answer.body
    assert answer.json["kind"] == "invalid_input"


OPEN = "/v1/callbacks/executions/{fp:7}:11111111-2222-4333-8444-555555555555/waitpoints/w"
MOST = 262_144
"""The longest body of a callback."""
HOSTILE = {
    "an unterminated string of escaped quotes": b"[" * 200 + b'"' + b'\\"' * MOST,
    "escaped line breaks": b"[" * 200 + (b'"' + b'\\"' * 9 + b"\\\n") * MOST,
    "strings of one quote and a backslash": b"[" * 200 + b'"\\' * MOST,
    "brackets that open": b"[" * MOST,
    "brackets that close at once": b"[]" * MOST,
    "strings full of brackets": b"[" + b'"[[[[",' * MOST,
    "empty strings and a surrogate": b'["\\ud83d",' + b'"",' * MOST,
    "escapes and a surrogate": b'["\\ud83d' + b"\\\\u" * MOST,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_costs_no_more_than_its_length(http: Http, name: str) -> None:
    body = HOSTILE[name][:MOST]
    headers = {"content_type": "application/json", "x_ff_waitpoint_token": "x"}
    began = time.thread_time()
    refused, alive = await asyncio.gather(http.post(OPEN, body, **headers), http.get("/livez"))
    # Milliseconds; minutes if each quote made the server read the rest again.
    assert time.thread_time() - began < 1
    assert (refused.kind, alive.status) == ((400, "invalid_input"), 200)


@pytest.mark.parametrize(
    ("depth", "inside", "status"),
    [
        (127, '"' + "[{" * 300 + '\\"[\\\\"', 422),
        (127, "{}", 422),
        (127, '{"a":[]}', 400),
        (128, '"]]]]]]\\\\", []', 400),
        (127, r'"\ud83d\ude00\\ud83d"', 422),
        (127, r'"\ud83d\ude00\\\ud83d"', 400),
        (1, r'"\ude00\ud83d"', 400),
    ],
)
async def test_nesting_is_counted_outside_of_strings(
    http: Http, depth: int, inside: str, status: int
) -> None:
    body = ("[" * depth + inside + "]" * depth).encode()
    assert (await http.post(PATH, body, content_type="application/json")).status == status


async def test_a_head_that_does_not_end_is_given_up(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.listener.HEAD_TIMEOUT_S", 0.2)
    async with serve() as http, connected(http) as (reader, writer):
        writer.write(b"GET /livez HTTP/1.1\r\nhost: t\r\nx-slow: ")
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert (await http.get("/livez")).status == 200


CHUNKED = b"HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize("trailers", [b"x: " + b"a" * 400_000, b"x: aaaa\r\n" * 50_000])
@pytest.mark.parametrize(("path", "statuses"), [(PATH, [431]), ("/nope", [404])])
async def test_trailers_of_a_body_are_bounded_like_its_head(
    http: Http, trailers: bytes, path: str, statuses: list[int]
) -> None:
    async with connected(http) as (reader, writer):
        writer.write(b"POST %s %s" % (path.encode(), CHUNKED))
        if path != PATH:
            # What is answered before the end of the body gets no second answer.
            status, headers = await read_head(reader)
            await reader.readexactly(int(headers["content-length"]))
            assert [status] == statuses
        with suppress(ConnectionError):
            for first in range(0, len(trailers), 50_000):
                writer.write(trailers[first : first + 50_000])
                await writer.drain()
                await asyncio.sleep(0)
            rest = await reader.read()
            assert [int(each[:3]) for each in rest.split(b"HTTP/1.1 ")[1:]] == (
                statuses if path == PATH else []
            )
        assert await is_closed(reader)
    assert (await http.get("/livez")).status == 200


async def test_short_trailers_are_ignored(http: Http) -> None:
    async with connected(http) as (reader, writer):
        for _ in range(3):
            writer.write(b"POST /nope %sx: y\r\n\r\n" % CHUNKED)
            status, headers = await read_head(reader)
            await reader.readexactly(int(headers["content-length"]))
            assert status == 404


async def test_a_request_that_may_upgrade_is_served_with_its_body(http: Http) -> None:
    """As Java's client and `curl --http2` send each request without TLS."""
    body = b'{"namespace":"default","execution_kind":"k"}'
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    head = b"%s HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    create = head % b"POST /v1/executions" + b"content-length: %d\r\n" % len(body)
    read = head % b"GET /livez" + upgrade + b"\r\n"
    async with connected(http) as (reader, writer):
        for parts in (
            [create + upgrade + b"\r\n" + body],
            [create + upgrade + b"\r\n", body],
            [create, upgrade + b"\r\n" + body[:9], body[9:]],
            [read + create + upgrade + b"\r\n" + body],
        ):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            statuses: list[int] = []
            while not statuses or statuses[-1] != 201:
                status, headers = await read_head(reader)
                await reader.readexactly(int(headers["content-length"]))
                statuses.append(status)
            assert statuses in ([201], [200, 201])


async def test_a_connection_whose_body_is_late_makes_room_for_others(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.exchange.BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("flowfabric.server.listener.connections_allowed", lambda: 1)
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    async with serve() as http, connected(http) as (reader, writer):
        writer.write(f"{head}content-length: 500\r\n\r\n{{".encode())
        status, headers = await read_head(reader)
        refused = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert (status, refused["detail"]) == (400, "body: did not arrive within 0.05 s")
        # The client still sends, but no request runs.
        writer.write(b" ")
        assert (await http.get("/livez")).status == 200
        assert await is_closed(reader)


@pytest.mark.parametrize(("setting", "rest"), [("BODY_TIMEOUT_S", b"{"), ("KEEP_ALIVE_S", b"{}")])
async def test_a_refused_request_whose_body_still_arrives_does_not_keep_the_connection(
    serve: Serving, monkeypatch: pytest.MonkeyPatch, setting: str, rest: bytes
) -> None:
    monkeypatch.setattr(f"flowfabric.server.listener.{setting}", 0.05)
    async with serve() as http, connected(http) as (reader, writer):
        writer.write(b"POST /nope HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n")
        status, headers = await read_head(reader)
        await reader.readexactly(int(headers["content-length"]))
        writer.write(rest)
        assert (status, await reader.read()) == (404, b"")


async def test_the_connection_of_a_refused_request_serves_the_next_one(
    serve: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{PATH}/{await engine.create()}/state?wait_ms=1500"
    monkeypatch.setattr("flowfabric.server.listener.KEEP_ALIVE_S", 1)
    monkeypatch.setattr("flowfabric.server.listener.BODY_TIMEOUT_S", 1)
    async with serve() as http, connected(http) as (reader, writer):
        writer.write(b"POST /nope HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n")
        _, headers = await read_head(reader)
        await reader.readexactly(int(headers["content-length"]))
        # In one part: no timer of the refused request ends the one that follows.
        writer.write(f"{{}}GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        status, headers = await read_head(reader)
        body = await reader.readexactly(int(headers["content-length"]))
        assert (status, body) == (200, b'"waiting"')


async def test_clients_that_leave_in_the_middle_of_a_body_hold_nothing(
    serve: Serving, engine: Engine
) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    async with serve(max_requests=2) as http:
        for _ in range(6):
            async with connected(http) as (_, writer):
                writer.write(f"{head}content-length: 500\r\n\r\n{{".encode())
                await writer.drain()
        for _ in range(20):
            # Until the server has noticed that they left.
            if (await http.post(PATH, {})).status == 422:
                break
            await asyncio.sleep(0)
        assert (await http.post(PATH, {})).status == 422


async def test_bodies_that_do_not_arrive_keep_no_request_out(serve: Serving) -> None:
    path = f"/v1/callbacks/executions/{{fp:1}}:{UUID}/waitpoints/{UUID}"
    head = f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    async with serve(max_requests=2) as http, connected(http) as first, connected(http) as second:
        for _, writer in (first, second):
            writer.write(f"{head}content-length: 2\r\n\r\n{{".encode())
            await writer.drain()
            # The server has read both when it answers this.
            assert (await http.get("/livez")).status == 200
        assert (await http.get("/v1/lanes")).status == 200
        status, headers = await read_head(first[0])
        refused = json.loads(await first[0].readexactly(int(headers["content-length"])))
        assert (status, refused["kind"]) == (429, "resource_exhausted")
        assert refused["detail"] == "the body arrived too slowly for a busy server"
        second[1].write(b"}")
        assert (await read_head(second[0]))[0] == 401


async def test_a_peer_that_vanishes_is_given_up() -> None:
    bound = bind("127.0.0.1", 0)
    try:
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
    finally:
        bound.close()


async def test_a_client_that_does_not_read_its_events_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowfabric.server.exchange.SEND_TIMEOUT_S", 0.01)
    ended, released = list[str](), list[str]()

    async def events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            ended.append("events")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def release() -> None:
        released.append("permit")

    await send_events(send, EventStream(events(), release), [])
    assert (ended, released) == (["events"], ["permit"])
