"""Creating executions with raw payloads: the other fields are query parameters (10 §11.5)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.server.config import BodyLimits
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.http import Http, Response
from tests.support.shapes import LEAST

RAW = {"content_type": "application/octet-stream"}


async def upload(http: Http, fields: Mapping[str, Any], body: bytes = b"x") -> Response:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in {**LEAST, **fields}.items()
    }
    return await http.post(f"/v1/executions?{urlencode(texts)}", body, **RAW)


async def test_every_field_is_taken(http: Http, engine: Engine) -> None:
    fields = {
        "lane_id": "fast",
        "priority": "-5",
        "payload_encoding": "bin",
        "tags": {"app.a": "1"},
        "policy": {"retry_policy": {"max_retries": 2}},
        "delay_until": 4_000_000_000_000,
        "now": "whenever",
        "unheard_of": "x",
        "input_payload": "[1]",
    }
    made = await upload(http, fields, b"\x00")
    assert (made.status, made.json["Created"]["public_state"]) == (201, "delayed")
    execution_id = ExecutionId(made.json["Created"]["execution_id"])
    context = await engine.backend.reads.read_execution_context(execution_id)
    assert (context.input_payload, context.payload_encoding) == (b"\x00", "bin")
    assert context.tags == {"app.a": "1"}
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.lane_id, info.priority) == ("fast", 0)


@pytest.mark.parametrize("field", ["priority", "partition_id", "delay_until"])
@pytest.mark.parametrize("text", ["5.0", "1e3", "null", "", "x", "+5", "\u0665", "5 "])
async def test_numbers_are_whole_numbers(http: Http, field: str, text: str) -> None:
    answer = await upload(http, {field: text})
    assert answer.kind == (400, "invalid_input")
    assert answer.json["detail"] == f"{field}: must be a whole number, got {text!r}"


async def test_numbers_stay_within_their_types(http: Http) -> None:
    for field, text in (
        ("priority", str(2**31)),
        ("partition_id", "-1"),
        ("partition_id", "65536"),
    ):
        answer = await upload(http, {field: text})
        assert answer.kind == (400, "invalid_input"), text
        assert answer.json["detail"].startswith(f"{field}: expected int "), text


POLICIES: list[tuple[Any, str, str]] = [
    ("nope", "invalid_input", "policy: must be JSON"),
    ({"nope": 1}, "invalid_policy_json", "policy.nope: unknown field"),
    (5, "invalid_policy_json", "policy: expected object"),
    (
        {"max_replay_count": -1},
        "invalid_policy_json",
        "policy.max_replay_count: must be from 0 to 4294967295",
    ),
    (
        {"retry_policy": {"backoff": {"type": "exponential", "multiplier": 0}}},
        "invalid_policy_json",
        "policy.retry_policy.backoff.multiplier: must be finite and greater than 0",
    ),
]


@pytest.mark.parametrize(("policy", "code", "detail"), POLICIES)
async def test_a_bad_policy_is_400(http: Http, policy: Any, code: str, detail: str) -> None:
    """A query value that does not decode breaks a rule (10 §2.5)."""
    answer = await upload(http, {"policy": policy})
    assert answer.kind == (400, code)
    assert (answer.json["error"], answer.json["detail"]) == (f"{code}: {detail}", detail)


async def test_ids_and_lists_that_do_not_decode_are_400(http: Http) -> None:
    tried: list[tuple[str, Any, str]] = [
        ("flow_id", "x", "flow_id: must be a UUID"),
        ("execution_id", "x", "execution_id: MissingTag: 'x'"),
        ("tags", [1], "tags: expected object, got array"),
        ("depends_on", [{}], "depends_on[0].upstream: missing"),
    ]
    for field, value, problem in tried:
        answer = await upload(http, {field: value})
        assert answer.kind == (400, "invalid_input"), field
        assert answer.json["detail"] == problem


async def test_payloads_over_their_limits(serve: Serving, engine: Engine) -> None:
    async with serve(limits=BodyLimits(large=100)) as http:
        over = await upload(http, {}, b"x" * 101)
        assert over.kind == (413, "payload_too_large")
        assert (over.json["limit_bytes"], over.json["route"]) == (100, "/v1/executions")
        assert (await upload(http, {}, b"x" * 100)).status == 201
