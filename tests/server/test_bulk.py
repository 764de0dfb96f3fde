"""Bulk requests: each row is what the single call would have answered (10 §11.7)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flowfabric.engine.valkey import keys
from tests.server.conftest import Serving
from tests.server.status_rows import EXECUTIONS, Row
from tests.server.test_statuses import PUBLIC, filled, path_of
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.shapes import LEAST
from tests.support.subjects import Subjects

CREATE, CANCEL = "POST /v1/executions", "POST /v1/executions/{id}/cancel"
BROKEN: list[Any] = [
    7,
    None,
    {},
    LEAST | {"priority": 1.5},
    LEAST | {"tags": None},
    LEAST | {"lane_id": ""},
    LEAST | {"policy": {"nope": 1}},
    LEAST | {"policy": {"max_replay_count": -1}},
    LEAST | {"input_payload": [], "input_payload_b64": ""},
    LEAST | {"depends_on": [{}]},
    LEAST | {"namespace": ""},
    LEAST | {"tags": {"ff.x": "y"}},
    LEAST | {"execution_id": "{fp:300}:11111111-2222-4333-8444-555555555555"},
]


def row_of(status: int, body: Any) -> dict[str, Any]:
    """The row for an answer of the single route."""
    if status < 300:
        return {"status": status, "result": body}
    return {"status": status} | {key: body[key] for key in body if key != "request_id"}


_names = re.compile(r"\{fp:\d+\}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|lane-\d+")


def unnamed(row: dict[str, Any]) -> str:
    """A row without the ids and names of its subject."""
    return _names.sub("<name>", json.dumps(row))


async def test_refusals_are_those_of_the_single_call(http: Http) -> None:
    rows = (await http.post("/v1/bulk/executions", BROKEN)).json["results"]
    lines = b"\n".join(json.dumps(each).encode() for each in BROKEN)
    found = await http.post("/v1/bulk/executions", lines, content_type="application/x-ndjson")
    assert found.json["results"] == rows
    for item, row in zip(BROKEN, rows, strict=True):
        body = json.dumps(item).encode()
        single = await http.post("/v1/executions", body, content_type="application/json")
        assert row == row_of(single.status, single.json), item


@pytest.mark.parametrize("name", [CREATE, CANCEL])
async def test_every_outcome_is_that_of_the_single_call(
    http: Http, engine: Engine, name: str
) -> None:
    subjects, route = Subjects(engine, http), PUBLIC[name]
    path = "/v1/bulk/executions" if name == CREATE else "/v1/bulk/cancel"

    async def made(row: Row) -> tuple[str, Any]:
        facts = await subjects.make(row.subject)
        body = filled(row.body, facts)
        if row.repeated:
            await http.post(path_of(route, facts), body)
        return path_of(route, facts), body

    for row in EXECUTIONS[name]:
        single, body = await made(row)
        answer = await http.post(single, body)
        _, body = await made(row)
        (found,) = (await http.post(path, [body])).json["results"]
        assert unnamed(found) == unnamed(row_of(answer.status, answer.json)), row


async def test_items_may_be_as_deep_as_single_calls(http: Http) -> None:
    head = json.dumps(LEAST).encode()[:-1]
    for levels, status in ((127, 201), (128, 400)):
        item = head + b',"x":' + b"[" * levels + b"]" * levels + b"}"
        single = await http.post("/v1/executions", item, content_type="application/json")
        assert single.status == status
        lines = await http.post("/v1/bulk/executions", item, content_type="application/x-ndjson")
        assert [row["status"] for row in lines.json["results"]] == [status]
        array = await http.post(
            "/v1/bulk/executions", b"[" + item + b"]", content_type="application/json"
        )
        # A broken array fails the request.
        assert array.status == (200 if status == 201 else 400)


async def test_items_of_a_partition_run_in_order(http: Http, engine: Engine) -> None:
    items = [LEAST | {"idempotency_key": f"k{n % 250}"} for n in range(1000)]
    answer = await http.post("/v1/bulk/executions", items)
    rows = answer.json["results"]
    assert [row["status"] for row in rows] == [201] * 250 + [200] * 750
    first = [row["result"]["Created"]["execution_id"] for row in rows[:250]]
    for n, row in enumerate(rows[250:]):
        assert row["result"] == {"Duplicate": {"execution_id": first[n % 250]}}
    cancels = [{"execution_id": first[0], "reason": reason} for reason in ("one", "two")]
    assert [r["status"] for r in (await http.post("/v1/bulk/cancel", cancels)).json["results"]] == [
        *(200, 200),
    ]
    outcome = (await http.get(f"/v1/executions/{first[0]}/outcome")).json
    assert outcome["cancellation_reason"] == "one"


async def test_too_many_items_and_too_long_bodies(http: Http, serve: Serving) -> None:
    over = await http.post("/v1/bulk/executions", [LEAST] * 1001)
    assert over.kind == (400, "invalid_input")
    assert over.json["detail"] == "body: must contain at most 1000 items, got 1001"
    long = b"[" + b" " * 8_388_607 + b"]"
    answer = await http.post("/v1/bulk/executions", long, content_type="application/json")
    assert answer.kind == (413, "payload_too_large")
    assert (answer.json["limit_bytes"], answer.json["route"]) == (8_388_608, "/v1/bulk/executions")
    exact = await http.post("/v1/bulk/executions", b"[" + long[3:], content_type="application/json")
    assert (exact.status, exact.json) == (200, {"results": []})


@pytest.mark.corrupts
async def test_a_fault_in_the_middle_concerns_its_item_only(http: Http, engine: Engine) -> None:
    made = [await engine.create() for _ in range(3)]
    bad = keys.core(made[1].tag, made[1])
    await engine.backend.transport.call("HSET", bad, "state", "??????")
    items = [{"execution_id": each, "reason": "x"} for each in made]
    rows = (await http.post("/v1/bulk/cancel", items)).json["results"]
    assert [row["status"] for row in rows] == [200, 500, 200]
    assert rows[1]["kind"] == "corruption"
