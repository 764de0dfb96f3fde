"""`Idempotency-Key`: what is stored, for how long, and for whom (10 §11.9)."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from flowfabric.engine.valkey import keys
from flowfabric.server.auth import new_token, write_tokens
from tests.server.conftest import Serving, serving
from tests.server.status_rows import CLAIM
from tests.server.test_faults import cut_off
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.server import TestServer
from tests.support.shapes import LEAST
from tests.support.subjects import Subjects

PATH = "/v1/executions"


def name_of(key: str, token_id: str) -> str:
    """The key of a stored answer to `POST /v1/executions`."""
    scope = f"POST\n{PATH}\n{token_id}\n{key}"
    return f"ff:http:idem:{hashlib.sha256(scope.encode()).hexdigest()}"


async def ttl_ms(engine: Engine, name: str) -> int:
    return cast("int", await engine.backend.transport.call("PTTL", name))


async def names(engine: Engine) -> set[str]:
    found = cast("list[bytes]", await engine.backend.transport.call("KEYS", "ff:http:*"))
    return {name.decode() for name in found}


async def test_an_answer_is_kept_for_a_day(http: Http, engine: Engine) -> None:
    first = await http.post(PATH, LEAST, idempotency_key="k")
    (name,) = await names(engine)
    assert name.startswith("ff:http:idem:")
    assert len(name) == len("ff:http:idem:") + 64
    assert 86_400_000 - 60_000 < await ttl_ms(engine, name) <= 86_400_000
    again = await http.post(PATH, LEAST, idempotency_key="k")
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["content-type"] == first.headers["content-type"] == "application/json"
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_marker_lasts_a_minute_and_is_renewed(
    http: Http, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.server.idempotency._RENEW_S", 0.01)
    path = "/v1/workers/w/claim?wait_ms=30000"
    body = CLAIM | {"lane_id": "idle"}
    waiting = asyncio.ensure_future(http.post(path, body, idempotency_key="k"))

    async def marked() -> bool:
        return bool(await names(engine))

    await until(marked, "the marker")
    (name,) = await names(engine)
    assert 0 < await ttl_ms(engine, name) <= 60_000
    busy = await http.post(path, body, idempotency_key="k")
    assert busy.kind == (409, "idempotency_in_progress")
    assert (busy.json["retryable"], busy.json["class"]) == (True, "retryable")
    # As if it were about to run out: the running call renews it.
    await engine.backend.transport.call("PEXPIRE", name, 5000)

    async def renewed() -> bool:
        return await ttl_ms(engine, name) > 50_000

    await until(renewed, "a renewed marker")
    execution_id = await engine.create(lane="idle")
    granted = await waiting
    assert (granted.status, granted.json["execution_id"]) == (200, execution_id)
    again = await http.post(path, body, idempotency_key="k")
    assert (again.body, again.headers["idempotency-replayed"]) == (granted.body, "true")


async def test_a_key_belongs_to_its_token(engine: Engine, tmp_path: Path) -> None:
    made = [new_token(name, ["submit"], None) for name in ("one", "two")]
    write_tokens(tmp_path / "tokens", [stored for _, stored in made])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        ids: set[str] = set()
        for token, _ in made:
            for replayed in (None, "true"):
                answer = await http.with_token(token).post(PATH, LEAST, idempotency_key="k")
                assert answer.headers.get("idempotency-replayed") == replayed
                ids.add(answer.json["Created"]["execution_id"])
        assert len(ids) == 2
    assert await names(engine) == {name_of("k", "one"), name_of("k", "two")}


async def test_of_two_calls_at_once_one_runs(http: Http) -> None:
    answers = await asyncio.gather(*(http.post(PATH, LEAST, idempotency_key="k") for _ in range(8)))
    created = {answer.body for answer in answers if answer.status == 201}
    assert len(created) == 1
    others = [answer for answer in answers if answer.status != 201]
    assert all(answer.kind == (409, "idempotency_in_progress") for answer in others)
    assert len((await http.get(PATH)).json["executions"]) == 1


async def test_an_answer_without_a_body_is_repeated(http: Http, engine: Engine) -> None:
    body: dict[str, Any] = CLAIM | {"lane_id": "empty"}
    first = await http.post("/v1/workers/w/claim", body, idempotency_key="k")
    await engine.create(lane="empty")
    again = await http.post("/v1/workers/w/claim", body, idempotency_key="k")
    assert (first.status, again.status, again.body) == (204, 204, b"")
    assert again.headers["idempotency-replayed"] == "true"
    assert (await http.post("/v1/workers/w/claim", body, idempotency_key="l")).status == 200


@pytest.mark.corrupts
async def test_a_fault_is_not_stored(http: Http, engine: Engine) -> None:
    facts = await Subjects(engine, http).make("waiting")
    core = keys.core(facts["id"].tag, facts["id"])
    state = await engine.backend.transport.call("HGET", core, "state")
    await engine.backend.transport.call("HSET", core, "state", "??????")
    path = f"{PATH}/{facts['id']}/priority"
    failed = await http.put(path, {"new_priority": 5}, idempotency_key="k")
    assert failed.status == 500
    assert await names(engine) == set()
    await engine.backend.transport.call("HSET", core, "state", cast("bytes", state))
    done = await http.put(path, {"new_priority": 5}, idempotency_key="k")
    assert (done.status, "idempotency-replayed" in done.headers) == (200, False)


async def test_without_valkey_a_key_fails_the_call(engine: Engine, valkey: TestServer) -> None:
    async with cut_off(valkey) as http:
        answer = await http.post(PATH, LEAST, idempotency_key="k")
        assert (answer.status, answer.json["code"]) == (500, "transport")


async def test_a_marker_of_a_crashed_server_ends(serve: Serving, engine: Engine) -> None:
    async with serve() as http:
        await http.post(PATH, LEAST, idempotency_key="k")
        (name,) = await names(engine)
        raw = cast("bytes", await engine.backend.transport.call("GET", name))
        digest, owner, _ = msgspec.msgpack.decode(raw)
        marker = msgspec.msgpack.encode([digest, owner, None])
        await engine.backend.transport.call("SET", name, marker, "PX", 60_000)
        busy = await http.post(PATH, LEAST, idempotency_key="k")
        assert busy.kind == (409, "idempotency_in_progress")
        await engine.backend.transport.call("DEL", name)
        assert (await http.post(PATH, LEAST, idempotency_key="k")).status == 201


async def test_what_only_reads_stores_no_answer(http: Http, engine: Engine) -> None:
    """A token that may only read must not be able to fill the store."""
    for _ in range(2):
        page = await http.post("/v1/engine/listings/list_executions", {}, idempotency_key="k")
        assert (page.status, page.json["executions"]) == (200, [])
    assert await names(engine) == set()
