"""Requests to a server: answers, errors, lost connections, events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.errors import (
    AuthError,
    ConfigError,
    ContentionError,
    EngineError,
    LimitError,
    ReplyError,
    TransportError,
    UnavailableError,
    ValidationError,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.connect import check_url
from flowfabric.engine.http import link as links
from flowfabric.engine.http.address import ServerAddress, parse_url
from flowfabric.engine.http.link import HttpLink
from tests.support.listening import listening

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def request(reader: asyncio.StreamReader) -> bytes:
    """The next request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length: "):
            return head + await reader.readexactly(int(line[16:]))
    return head


def answers(*replies: bytes) -> Script:
    """Answers the requests of all connections with these, in turn."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left:
            await request(reader)
            writer.write(left.pop(0))

    return serve


@asynccontextmanager
async def peer(script: Script, **options: Any) -> AsyncGenerator[HttpLink]:
    """A link to a server that follows a script."""
    token = options.pop("token", None)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await script(reader, writer)

    async with listening(serve) as port:
        link = HttpLink(ServerAddress(host="127.0.0.1", port=port, token=token), **options)
        try:
            yield link
        finally:
            await link.aclose()


async def refusal(reply: bytes, token: str | None = None) -> EngineError:
    """The error that an answer stands for."""
    async with peer(answers(reply), patient=False, token=token) as link:
        with pytest.raises(EngineError) as caught:
            await link.call("POST", "/v1/x", {}, op="paint")
    assert caught.value.op
    return caught.value


async def test_sends_json_with_the_token_and_decodes_the_answer() -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request(reader))
        writer.write(answer(200, b'"{fp:3}:11111111-2222-4333-8444-555555555555"'))

    async with peer(script, token="s3cret") as link:
        found = await link.call("POST", "/v1/x", {"n": 1}, answer=ExecutionId)
    assert isinstance(found, ExecutionId)
    head, body = seen[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert b"Authorization: Bearer s3cret" in head
    assert b"Content-Type: application/json" in head
    assert body == b'{"n":1}'


async def test_an_answer_without_a_body_is_none() -> None:
    async with peer(answers(b"HTTP/1.1 204 No Content\r\n\r\n")) as link:
        assert await link.call("POST", "/v1/x", answer=ExecutionId) is None


async def test_requests_one_after_the_other_share_a_connection() -> None:
    opened = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while True:
            await request(reader)
            writer.write(answer(200, b"1"))

    async with peer(script) as link:
        for _ in range(3):
            assert await link.call("GET", "/v1/x") == 1
        assert opened == 1
        await asyncio.gather(*(link.call("GET", "/v1/x") for _ in range(3)))
        assert opened == 3


async def test_no_more_connections_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_CONNECTIONS", 2)
    busy = most = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy, most
        while True:
            await request(reader)
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0)
            busy -= 1
            writer.write(answer(200, b"1"))

    async with peer(script) as link:
        await asyncio.gather(*(link.call("GET", "/v1/x") for _ in range(8)))
    assert most == 2


async def test_a_cancelled_caller_never_shifts_answers() -> None:
    held = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            slow = b"/v1/slow" in await request(reader)
            if slow:
                held.set()
                await asyncio.Event().wait()
            writer.write(answer(200, b"2"))

    async with peer(script) as link:
        assert await link.call("GET", "/v1/x") == 2
        waiting = asyncio.create_task(link.call("GET", "/v1/slow"))
        await held.wait()
        waiting.cancel()
        assert await link.call("GET", "/v1/x") == 2
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "details"),
    [
        (
            409,
            b'{"error":"x","code":"execution_not_active","details":["cancelled","2"]}',
            ContentionError,
            "execution_not_active",
            ("cancelled", "2"),
        ),
        (
            429,
            b'{"code":"resource_exhausted","details":["pool","max=4"],"retry_after_ms":60000}',
            LimitError,
            "resource_exhausted",
            ("pool", "max=4", "retry_after_ms=60000"),
        ),
        (
            422,
            b'{"error":"invalid JSON","code":"invalid_input","group":"validation","detail":"a: b"}',
            ValidationError,
            "invalid_input",
            ("a: b",),
        ),
        (
            413,
            b'{"error":"payload_too_large","code":"payload_too_large","limit_bytes":65536}',
            ValidationError,
            "payload_too_large",
            ("the server accepts requests of at most 65536 bytes",),
        ),
        (
            403,
            b'{"error":"forbidden: no","code":"forbidden","group":"auth","detail":"no"}',
            AuthError,
            "forbidden",
            ("no",),
        ),
    ],
)
async def test_an_envelope_becomes_its_typed_error(
    status: int, body: bytes, kind: type[EngineError], code: str, details: tuple[str, ...]
) -> None:
    error = await refusal(answer(status, body))
    assert type(error) is kind
    assert (error.code, error.details, error.http_status) == (
        code,
        details,
        400 if status == 413 else status,
    )
    if isinstance(error, LimitError):
        assert error.retry_after_ms == 60_000


async def test_a_refused_token_says_what_to_do() -> None:
    body = b'{"error":"missing or invalid Authorization header","code":"unauthorized"}'
    without = await refusal(answer(401, body))
    assert isinstance(without, AuthError)
    assert "set FF_API_TOKEN" in str(without)
    assert "does not accept the token" in str(await refusal(answer(401, body), token="old"))


async def test_a_missing_route_is_an_older_server() -> None:
    error = await refusal(answer(404, b'{"error":"not found"}'))
    assert isinstance(error, UnavailableError)
    assert error.op == "paint"
    assert "has the same version of FlowFabric" in str(error)


async def test_another_service_is_named() -> None:
    error = await refusal(answer(404, b"<html>"))
    assert isinstance(error, TransportError)
    assert error.kind == "protocol"
    assert "returned 404 Not Found" in str(error)
    moved = await refusal(answer(301, b"", "location: https://new.example/"))
    assert "it moved to https://new.example/" in str(moved)


@pytest.mark.parametrize(("status", "ambiguous"), [(502, True), (503, False), (504, True)])
async def test_a_proxy_that_lost_the_server(status: int, ambiguous: bool) -> None:
    error = await refusal(answer(status, b"<html>"))
    assert isinstance(error, TransportError)
    assert (error.kind, error.ambiguous) == ("transport", ambiguous)


async def test_a_fault_of_the_servers_valkey_keeps_its_kind() -> None:
    body = (
        b'{"error":"transport: gone","code":"transport","kind":"timeout","group":"availability",'
        b'"detail":"gone","ambiguous":true}'
    )
    error = await refusal(answer(500, body))
    assert isinstance(error, TransportError)
    assert (error.kind, error.ambiguous) == ("timeout", True)
    assert "gone" in error.message


async def test_an_unreadable_answer_of_a_write_is_ambiguous() -> None:
    async with peer(answers(answer(200, b"nonsense"), answer(200, b"nonsense"))) as link:
        with pytest.raises(ReplyError) as caught:
            await link.call("POST", "/v1/x", {}, answer=int)
        assert caught.value.ambiguous
        with pytest.raises(ReplyError) as caught:
            await link.call("GET", "/v1/x", answer=int)
        assert not caught.value.ambiguous


async def test_what_is_not_http_is_not_decoded() -> None:
    async with peer(answers(b"-ERR unknown command\r\n\r\n"), patient=False) as link:
        with pytest.raises(TransportError, match="not HTTP") as caught:
            await link.call("POST", "/v1/x", {})
    assert caught.value.kind == "protocol"


async def test_nothing_listens() -> None:
    async with peer(answers()) as link:
        address = link.address
    hurried = HttpLink(address, patient=False)
    with pytest.raises(TransportError, match="connection refused") as caught:
        await hurried.call("POST", "/v1/x", {})
    assert not caught.value.ambiguous
    assert "flowfabric server" in caught.value.hint
    await hurried.aclose()


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request(reader)


async def test_a_lost_answer_of_a_write_is_ambiguous_and_not_repeated() -> None:
    async with peer(closes) as link:
        with pytest.raises(TransportError) as caught:
            await link.call("POST", "/v1/x", {})
    assert (caught.value.kind, caught.value.ambiguous) == ("transport", True)


@pytest.mark.parametrize(("method", "repeatable"), [("GET", False), ("POST", True)])
async def test_a_lost_answer_of_what_may_be_repeated(method: str, repeatable: bool) -> None:
    calls = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        await request(reader)
        calls += 1
        if calls > 1:
            writer.write(answer(200, b"7"))

    async with peer(script) as link:
        assert await link.call(method, "/v1/x", repeatable=repeatable) == 7
    assert calls == 2


async def test_a_limit_has_a_retry_after() -> None:
    """A command waits for it, too: nothing was done, and the answer says for how long."""
    late = b'{"code":"resource_exhausted","detail":"too fast","retry_after_ms":1}'
    async with peer(answers(answer(429, late), answer(200, b"7")), patient=False) as link:
        assert await link.call("POST", "/v1/x", {}) == 7


async def test_a_server_that_shuts_down_is_asked_again() -> None:
    going = b'{"error":"x","code":"unavailable","detail":"requests","retryable":true}'
    async with peer(answers(answer(503, going), answer(200, b"7"))) as link:
        assert await link.call("POST", "/v1/x", {}) == 7


async def test_a_late_answer_is_ambiguous_for_writes_only() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        await reader.read()

    async with peer(script, patient=False) as link:
        for method, ambiguous in (("POST", True), ("GET", False)):
            with pytest.raises(TransportError, match="before the deadline") as caught:
                await link.call(method, "/v1/x", timeout_s=0.01)
            assert (caught.value.kind, caught.value.ambiguous) == ("timeout", ambiguous)


async def test_closing_fails_what_is_under_way() -> None:
    held = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        held.set()
        await reader.read()

    async with peer(script) as link:
        waiting = asyncio.create_task(link.call("GET", "/v1/x"))
        await held.wait()
        await link.aclose()
        with pytest.raises(TransportError):
            await waiting
        with pytest.raises(TransportError, match="the client is closed"):
            await link.call("GET", "/v1/x")


_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_events_arrive_until_the_server_ends_them() -> None:
    asked: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await request(reader))
        writer.write(_HEAD + chunk(b": heartbeat\n\nevent: state\nid: 5\nda"))
        writer.write(chunk(b'ta: {"a":1}\n\nevent: end\nid: 6\ndata: {}\n\n') + chunk(b""))
        await writer.drain()

    async with peer(script) as link, await link.events("/v1/events", after="4") as events:
        found = [(each.name, each.id, each.data) async for each in events]
        assert events.last_id == "6"
    assert b"Last-Event-ID: 4" in asked[0]
    assert found == [("state", "5", b'{"a":1}'), ("end", "6", b"{}")]


async def test_events_that_break_off_say_where_to_continue() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(_HEAD + chunk(b"event: state\nid: 5\ndata: {}\n\n"))
        await writer.drain()

    async with peer(script) as link, await link.events("/v1/events") as events:
        assert (await anext(events)).id == "5"
        with pytest.raises(TransportError) as caught:
            await anext(events)
        assert caught.value.safe_to_repeat
        assert events.last_id == "5"


async def test_refused_events_raise_their_error() -> None:
    body = b'{"error":"x","code":"cursor_expired","group":"state","detail":"9-0"}'
    async with peer(answers(answer(410, body))) as link:
        with pytest.raises(EngineError) as caught:
            await link.events("/v1/events", after="1")
    assert caught.value.code == "cursor_expired"


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://a:9090", "http://a:9090"),
        ("http://a", "http://a:80"),
        ("https://a/ff/", "https://a:443/ff"),
        ("http://[::1]:9090/v1", "http://[::1]:9090"),
    ],
)
def test_the_address_of_a_server(url: str, found: str) -> None:
    assert parse_url(url).url == found


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://me:s3cret@a", "FF_API_TOKEN"),
        ("http://:9090", "host is missing"),
        ("http:/a:9090", "host is missing; use http://host:9090"),
        ("http://a:port", "wrong"),
        ("http://a:0", "1-65535"),
        ("http://a?x=1", "cannot contain '\\?'"),
    ],
)
def test_an_address_that_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check_url(url)
    assert "s3cret" not in str(caught.value)


def test_the_token_is_never_shown() -> None:
    address = parse_url("http://a", {"FF_API_TOKEN": "s3cret"})
    assert address.token == "s3cret"
    assert "s3cret" not in repr(address)
