"""Attempt output over HTTP: frames, tails, summaries, and the order of refusals."""

from __future__ import annotations

import asyncio
import base64

import pytest

from flowfabric.core.contracts.streams import Frame
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.streams import append

UNKNOWN = "{fp:7}:11111111-2222-4333-8444-555555555555"


async def test_frames_are_read_until_the_stream_is_closed(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    path = f"/v1/executions/{handle.execution_id}/attempts/0/stream"
    empty = (await http.get(path)).json
    assert (empty.keys(), empty["frames"]) == ({"frames", "count", "next_cursor"}, [])
    await append(engine, handle, "one")
    await append(engine, handle, b"\xff\x00")
    found = (await http.get(path)).json
    assert found["count"] == 2
    assert not {"closed_at", "closed_reason", "truncated"} & found.keys()
    first, second = (frame["fields"] for frame in found["frames"])
    assert (first["payload"], first["encoding"], first["frame_type"]) == ("one", "utf8", "event")
    assert (base64.b64decode(second["payload"]), second["encoding"]) == (b"\xff\x00", "base64")
    assert all(isinstance(value, str) for value in first.values())
    after = found["frames"][0]["id"]
    tail = (await http.get(f"{path}/tail?after={after}")).json
    assert [frame["id"] for frame in tail["frames"]] == [found["frames"][1]["id"]]
    await engine.backend.executions.complete(handle)
    closed = (await http.get(f"{path}/tail?after={found['next_cursor']}&block_ms=30000")).json
    assert (closed["frames"], closed["closed_reason"]) == ([], "attempt_success")
    assert isinstance(closed["closed_at"], int)


async def test_a_tail_waits_for_the_next_frame(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    path = f"/v1/executions/{handle.execution_id}/attempts/0/stream/tail?block_ms=30000"
    waiting = asyncio.ensure_future(http.get(path))
    await until(lambda: engine.backend.stream_pool.held == 1, "a waiting tail")
    await append(engine, handle, "late")
    found = (await waiting).json
    assert [frame["fields"]["payload"] for frame in found["frames"]] == ["late"]


async def test_every_byte_survives(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    every = bytes(range(256))
    await engine.backend.streams.append_frame(handle, Frame(payload=every))
    path = f"/v1/executions/{handle.execution_id}/attempts/0/stream"
    (frame,) = (await http.get(path)).json["frames"]
    assert base64.b64decode(frame["fields"]["payload"]) == every


async def test_an_unknown_stream_is_open_and_empty(http: Http) -> None:
    for route in ("stream", "stream/tail"):
        found = await http.get(f"/v1/executions/{UNKNOWN}/attempts/0/{route}")
        assert (found.status, found.json["frames"], found.json["count"]) == (200, [], 0)


@pytest.mark.parametrize(
    ("route", "names"),
    [
        ("stream?from=-", "from"),
        ("stream?to=abc", "to"),
        ("stream?limit=0", "limit"),
        ("stream?limit=1001", "limit"),
        ("stream?limit=x", "limit"),
        ("stream?visibility=nope", "visibility"),
        ("stream/tail?after=start", "after"),
        ("stream/tail?after=", "after"),
        ("stream/tail?block_ms=30001", "block_ms"),
        # In this order: cursor syntax, block_ms, limit, cursor not concrete.
        ("stream/tail?after=abc&block_ms=30001&limit=0", "after"),
        ("stream/tail?after=start&block_ms=30001&limit=0", "block_ms"),
        ("stream/tail?after=start&limit=0", "limit"),
    ],
)
async def test_refusals(http: Http, route: str, names: str) -> None:
    for execution_id in (UNKNOWN, "x"):
        answer = await http.get(f"/v1/executions/{execution_id}/attempts/0/{route}")
        assert answer.kind == (400, "invalid_input")
        assert answer.json["error"].startswith(f"invalid_input: {names}: ")


@pytest.mark.parametrize("index", ["-1", "x", "4294967296", "1.0"])
async def test_a_bad_attempt_is_400(http: Http, index: str) -> None:
    answer = await http.get(f"/v1/executions/{UNKNOWN}/attempts/{index}/stream")
    assert answer.kind == (400, "invalid_input")


async def test_a_full_pool_is_429_and_a_closed_one_503(serve: Serving, engine: Engine) -> None:
    pool = engine.backend.stream_pool
    async with serve() as http:
        read = f"/v1/executions/{UNKNOWN}/attempts/0/stream"
        path = f"{read}/tail?block_ms=10"
        # Reads keep a quarter for themselves, which tails cannot take.
        pool.held = pool.ceiling
        assert (await http.get(read)).status == 200
        assert (await http.get(path)).status == 429
        pool.held = pool.ceiling + pool.ceiling // 4
        for answer in (await http.get(read), await http.get(path)):
            assert answer.kind == (429, "resource_exhausted")
            assert answer.json["retry_after_ms"] > 0
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json["error"] == (
                f"too many concurrent stream_ops calls (server max: {pool.ceiling}); "
                "retry with backoff"
            )
        pool.held = 0
        pool.closed = True
        answer = await http.get(path)
        pool.closed = False
        assert answer.kind == (503, "unavailable")
        assert answer.json["retryable"] is True
        assert "retry-after" in answer.headers


async def test_the_summary_of_an_attempt(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    path = f"/v1/executions/{handle.execution_id}/attempts/0/summary"
    assert (await http.get(path)).kind == (404, "summary_not_found")
    await append(engine, handle, '{"done": 3, "list": []}', mode="summary")
    found = (await http.get(path)).json
    assert found["document"] == {"done": 3, "list": []}
    assert (found["version"], found["patch_kind"]) == (1, "json-merge-patch")
