"""Creating executions: shapes, statuses, and what is refused how."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.engine import Engine
from tests.support.http import Http

PATH = "/v1/executions"
LEAST = {"namespace": "default", "execution_kind": "resize"}


async def test_a_new_execution_is_created_from_two_fields(http: Http, engine: Engine) -> None:
    made = await http.post(PATH, LEAST)
    assert made.status == 201
    assert made.headers["content-type"] == "application/json"
    execution_id = made.json["Created"]["execution_id"]
    assert made.json == {"Created": {"execution_id": execution_id, "public_state": "waiting"}}
    info = await engine.backend.reads.read_execution_info(ExecutionId(execution_id))
    assert (info.lane_id, info.execution_kind, info.priority) == ("default", "resize", 0)


async def test_every_field_of_a_reference_client_is_taken(http: Http, engine: Engine) -> None:
    execution_id = ExecutionId.solo("fast", engine.backend.counts)
    body = {
        "execution_id": execution_id,
        "partition_id": execution_id.partition,
        "namespace": "acme",
        "lane_id": "fast",
        "execution_kind": "resize",
        "input_payload": [0, 127, 255],
        "payload_encoding": "bin",
        "priority": 99_999,
        "creator_identity": "ada",
        "idempotency_key": "k",
        "tags": {"app.team": "blue"},
        "policy": {"retry_policy": {"max_retries": 2}},
        "delay_until": await engine.backend.meta.server_time_ms() + 60_000,
        "execution_deadline_at": None,
        "now": "ignored",
        "unknown": {"nested": [1]},
    }
    made = await http.post(PATH, body)
    assert made.json == {"Created": {"execution_id": execution_id, "public_state": "delayed"}}
    context = await engine.backend.reads.read_execution_context(execution_id)
    assert (context.input_payload, context.payload_encoding) == (b"\x00\x7f\xff", "bin")
    assert context.tags == {"app.team": "blue"}
    info = (await http.get(f"{PATH}/{execution_id}")).json
    assert (info["priority"], info["namespace"], info["lane_id"]) == (9000, "acme", "fast")
    again = await http.post(PATH, body | {"execution_id": None, "partition_id": None})
    assert (again.status, again.json) == (200, {"Duplicate": {"execution_id": execution_id}})


async def test_base64_and_raw_uploads_keep_every_byte(http: Http, engine: Engine) -> None:
    every = bytes(range(256))
    encoded = LEAST | {"input_payload_b64": base64.b64encode(every).decode()}
    first = (await http.post(PATH, encoded)).json["Created"]["execution_id"]
    query = "namespace=default&execution_kind=resize&priority=7&tags=%7B%22a.b%22%3A%22c%22%7D"
    raw = await http.post(
        f"{PATH}?{query}", every, content_type="application/octet-stream; charset=binary"
    )
    assert raw.status == 201
    for each in (first, raw.json["Created"]["execution_id"]):
        context = await engine.backend.reads.read_execution_context(ExecutionId(each))
        assert context.input_payload == every
    assert context.tags == {"a.b": "c"}


async def test_the_policy_gives_the_priority(http: Http) -> None:
    made = await http.post(PATH, LEAST | {"policy": {"priority": 12}})
    found = await http.get(f"{PATH}/{made.json['Created']['execution_id']}")
    assert found.json["priority"] == 12


async def test_an_execution_joins_its_flow(http: Http, engine: Engine) -> None:
    flow_id = new_uuid()
    await engine.backend.flows.create_flow(flow_id, "etl")
    first = await http.post(PATH, LEAST | {"flow_id": flow_id})
    upstream = first.json["Created"]["execution_id"]
    second = await http.post(
        PATH, LEAST | {"flow_id": flow_id, "depends_on": [{"upstream": upstream}]}
    )
    assert second.json["Created"]["public_state"] == "waiting_children"


UNDECODABLE: list[tuple[Any, str]] = [
    ({}, "namespace: missing"),
    ({"namespace": "x"}, "execution_kind: missing"),
    ([], "body: expected object, got array"),
    (LEAST | {"priority": 5.0}, "priority: expected int | null, got float"),
    (LEAST | {"priority": 2**31}, "priority: expected int <= 2147483647"),
    (LEAST | {"partition_id": -1}, "partition_id: expected int >= 0"),
    (LEAST | {"tags": None}, "tags: expected object, got null"),
    (LEAST | {"tags": {"a": 1}}, "tags[*]: expected str, got int"),
    (LEAST | {"input_payload": [1, 256]}, "input_payload[1]: expected int <= 255"),
    (LEAST | {"input_payload_b64": "YQ"}, "input_payload_b64: invalid base64 encoded string"),
    (LEAST | {"lane_id": ""}, "lane_id: must be 1 to 64 printable ASCII characters"),
    (LEAST | {"flow_id": "X"}, "flow_id: must be a UUID"),
    (LEAST | {"depends_on": [{}]}, "depends_on[0].upstream: missing"),
]


@pytest.mark.parametrize(("body", "detail"), UNDECODABLE, ids=[each for _, each in UNDECODABLE])
async def test_what_does_not_decode_is_422(http: Http, body: Any, detail: str) -> None:
    answer = await http.post(PATH, body)
    request_id = answer.headers["x-request-id"]
    assert (answer.status, answer.json) == (
        422,
        {
            "error": "invalid JSON: Unprocessable Entity",
            "kind": "invalid_input",
            "retryable": False,
            "code": "invalid_input",
            "class": "terminal",
            "group": "validation",
            "detail": detail,
            "request_id": request_id,
        },
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("7-11111111-2222-4333-8444-555555555555", "must have its canonical form"),
        ("{fp:7}:x", "InvalidUuid"),
        ("{fp:07}:11111111-2222-4333-8444-555555555555", "InvalidPartitionIndex"),
    ],
)
async def test_a_body_takes_only_canonical_ids(http: Http, text: str, reason: str) -> None:
    answer = await http.post(PATH, LEAST | {"execution_id": text})
    assert answer.kind == (422, "invalid_input")
    assert answer.json["detail"].startswith(f"execution_id: {reason}")


POLICIES: list[tuple[Any, int, str]] = [
    ({"max_replay_count": -1}, 422, "policy.max_replay_count: must be from 0 to 4294967295"),
    ("x", 422, "policy: expected object"),
    ({"nope": 1}, 400, "policy.nope: unknown field"),
    (
        {"retry_policy": {"backoff": {"type": "exponential", "multiplier": 0}}},
        400,
        "policy.retry_policy.backoff.multiplier: must be finite and greater than 0",
    ),
    (
        {"fallback_policy": {"tiers": [{}]}},
        422,
        "policy.fallback_policy.tiers[0].provider: missing",
    ),
    (
        {"routing_requirements": {"required_capabilities": ["gpu", None]}},
        422,
        "policy.routing_requirements.required_capabilities[1]: must be text",
    ),
    (
        {"routing_requirements": {"required_capabilities": "gpu"}},
        422,
        "policy.routing_requirements.required_capabilities: must be an array",
    ),
]


@pytest.mark.parametrize(("policy", "status", "detail"), POLICIES)
async def test_a_bad_policy_has_its_own_kind(
    http: Http, policy: Any, status: int, detail: str
) -> None:
    answer = await http.post(PATH, LEAST | {"policy": policy})
    assert answer.kind == (status, "invalid_policy_json")
    assert answer.json["detail"] == detail


RULES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"execution_id": "{fp:300}:11111111-2222-4333-8444-555555555555"},
        "invalid_input",
        "execution_id",
    ),
    ({"partition_id": 9999}, "invalid_input", "partition_id"),
    ({"namespace": ""}, "invalid_input", "namespace"),
    ({"execution_kind": ""}, "invalid_input", "execution_kind"),
    ({"tags": {"ff.x": "y"}}, "invalid_tag_key", "ff.x"),
    ({"input_payload": [1], "input_payload_b64": "YQ=="}, "invalid_input", "input_payload_b64"),
    (
        {"depends_on": [{"upstream": "{fp:1}:11111111-2222-4333-8444-555555555555", "x": 1}]},
        "invalid_input",
        "depends_on[0].x: unknown field",
    ),
    (
        {"policy": {"routing_requirements": {"required_capabilities": [""]}}},
        "invalid_capabilities",
        "",
    ),
]


@pytest.mark.parametrize(
    ("change", "code", "names"), RULES, ids=[str(each[0])[:40] for each in RULES]
)
async def test_what_a_rule_refuses_is_400(
    http: Http, change: dict[str, Any], code: str, names: str
) -> None:
    answer = await http.post(PATH, LEAST | change)
    assert answer.kind == (400, code)
    assert answer.json["error"] == f"{code}: {answer.json['detail']}"
    assert names in answer.json["detail"]


BROKEN = {
    "syntax": b'{"namespace":',
    "trailing": b"{} x",
    "empty": b"",
    "not UTF-8": b'{"namespace":"a","execution_kind":"b","x":"\xff"}',
    "lone surrogate": b'{"namespace":"a","execution_kind":"b","x":"\\ud800 "}',
    "lone low surrogate": b'{"namespace":"a","execution_kind":"b","x":"\\udc00"}',
    "nesting": b'{"x":' + b"[" * 128 + b"]" * 128 + b"}",
    "nesting before types": b'{"namespace":1,"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "syntax after a wrong type": b'{"namespace":1,"x":tru}',
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_not_json_is_400(http: Http, body: bytes) -> None:
    answer = await http.post(PATH, body, content_type="application/json")
    assert answer.kind == (400, "invalid_input")
    assert answer.json["error"] == "invalid JSON: Bad Request"


async def test_deep_but_allowed_nesting_and_brackets_in_text_pass(http: Http) -> None:
    deep = b"[" * 127 + b"]" * 127
    head = json.dumps(LEAST).encode()[:-1]
    text = json.dumps("[{" * 500).encode()
    answer = await http.post(
        PATH, head + b',"x":' + deep + b',"y":' + text + b"}", content_type="application/json"
    )
    assert answer.status == 201


@pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonx", "application/xml"])
async def test_another_content_type_is_415(http: Http, kind: str) -> None:
    answer = await http.post(PATH, b"{}", content_type=kind)
    assert answer.kind == (415, "invalid_input")
    assert answer.json["error"] == "invalid JSON: Unsupported Media Type"
    assert answer.json["detail"] == "content-type: must be application/json"


async def test_json_content_types_with_suffix_or_parameters_are_taken(http: Http) -> None:
    body = json.dumps(LEAST).encode()
    for kind in ("application/json; charset=utf-8", "Application/vnd.acme+JSON"):
        assert (await http.post(PATH, body, content_type=kind)).status == 201


async def test_raw_uploads_say_what_is_wrong_with_their_parameters(http: Http) -> None:
    raw = {"content_type": "application/octet-stream"}
    for query, detail in (
        ("", "namespace: missing"),
        ("namespace=a&execution_kind=b&priority=x", "priority: "),
        ("namespace=a&execution_kind=b&tags=nope", "tags: must be JSON"),
        ("namespace=a&execution_kind=b&lane_id=", "lane_id: must be 1 to 64"),
    ):
        answer = await http.post(f"{PATH}?{query}", b"x", **raw)
        assert answer.kind == (400, "invalid_input"), query
        assert answer.json["detail"].startswith(detail), query


async def test_a_lane_that_takes_no_work_is_a_conflict(http: Http, engine: Engine) -> None:
    await engine.backend.lanes.set_lane_state("full", "disabled")
    answer = await http.post(PATH, LEAST | {"lane_id": "full"})
    assert answer.kind == (409, "lane_not_accepting")
    assert (answer.json["group"], answer.json["class"]) == ("state", "terminal")
