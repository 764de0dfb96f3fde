"""The OpenAPI document describes every route, and its schemas are those that validate."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pytest

from flowfabric.core.policy import ExecutionPolicy
from flowfabric.server.openapi import document, page
from flowfabric.server.routes.executions import CreateExecution
from flowfabric.server.routes.table import all_routes
from tests.server.conftest import Serving
from tests.support.http import Http


def refs(value: Any) -> set[str]:
    """Every schema that the document refers to."""
    if isinstance(value, dict):
        found: set[str] = set()
        for name, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            found |= {each} if name == "$ref" else refs(each)
        return found
    if isinstance(value, list):
        return {ref for each in value for ref in refs(each)}  # pyright: ignore[reportUnknownVariableType]
    return set()


def parts(made: dict[str, Any], value: Any) -> set[str]:
    """The names of the schemas that a part of the document is made of."""
    found: set[str] = set()
    todo = [value]
    while todo:
        for ref in refs(todo.pop()) - found:
            kind, name = ref.split("/")[2:]
            found.add(ref)
            todo.append(made["components"][kind][name])
    return {ref.rpartition("/")[2] for ref in found if "/schemas/" in ref}


def test_every_route_is_described_once() -> None:
    made = document(all_routes())
    described = {
        (method.upper(), path) for path, methods in made["paths"].items() for method in methods
    }
    public = [route for route in all_routes() if not route.internal]
    assert described == {(route.method, route.template) for route in public}
    names = [each["operationId"] for path in made["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)


def test_every_route_has_a_summary_answers_and_its_parameters() -> None:
    for path, methods in document(all_routes())["paths"].items():
        for operation in methods.values():
            assert operation["summary"].endswith((".", "…")) or operation["description"]
            assert operation["responses"].keys() > {"default"}, path
            named = {
                each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"
            }
            assert named == set(re.findall(r"\{(\w+)\}", path))


def test_every_reference_resolves() -> None:
    made = document(all_routes())
    kinds = ("schemas", "responses")
    known = {f"#/components/{kind}/{name}" for kind in kinds for name in made["components"][kind]}
    assert refs(made) <= known


def test_the_body_of_create_is_the_struct_that_validates() -> None:
    made = document(all_routes())
    body = made["paths"]["/v1/executions"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    schema = made["components"]["schemas"][name]
    assert schema["required"] == ["namespace", "execution_kind"]
    assert schema["properties"]["priority"]["anyOf"][0]["minimum"] == -(2**31)


def test_answers_promise_each_field_that_is_always_there() -> None:
    made = document(all_routes())
    schemas = made["components"]["schemas"]
    asked = {
        name
        for path in made["paths"].values()
        for each in path.values()
        for name in parts(made, each.get("requestBody", {}))
    }
    answered = {
        name
        for path in made["paths"].values()
        for each in path.values()
        for name in parts(made, each["responses"])
    }
    assert not asked & answered
    assert {"CreateExecution", "ExecutionPolicy"} <= asked
    optional = {
        name: set(schemas[name]["properties"]) - set(schemas[name]["required"])
        for name in answered
        if "properties" in schemas[name]
    }
    assert {name: fields for name, fields in optional.items() if fields} == {
        "ExecutionAnswer": {"started_at", "completed_at"},
        "FramePage": {"closed_at", "closed_reason", "truncated"},
        "ReclaimAnswer": {
            *("partition_key", "grant_key", "expires_at_ms", "lane_id"),
            *("detail", "reclaim_count"),
        },
        "RemoteCompleted": {"claims", "draining", "unknown_tasks", "waited_ms", "claim_error"},
        "Error": {
            *("detail", "details", "ambiguous", "retry_after_ms", "limit_bytes", "route"),
            *("rotation_id", "status", "failing"),
        },
    }
    refusals = made["components"]["responses"]
    assert refs(refusals["401"]) == {"#/components/schemas/Unauthorized"}
    assert refs(refusals["409"]) == {"#/components/schemas/Error"}


UUID = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
DOCUMENT = document(all_routes())


def parameters(method: str, path: str) -> dict[tuple[str, str], Any]:
    operation = DOCUMENT["paths"][path][method]
    return {(each["in"], each["name"]): each for each in operation.get("parameters", ())}


def test_headers_that_callers_send() -> None:
    callback = "/v1/callbacks/executions/{id}/waitpoints/{waitpoint_id}"
    found = parameters("post", callback)
    assert found["header", "X-FF-Waitpoint-Token"]["required"] is True
    assert ("header", "Idempotency-Key") in found
    for path, methods in DOCUMENT["paths"].items():
        for method in methods:
            names = {name for place, name in parameters(method, path) if place == "header"}
            assert ("Idempotency-Key" in names) is (method in ("post", "put")), path
            assert ("Last-Event-ID" in names) is path.endswith("/events"), path


def test_other_forms_of_a_body() -> None:
    paths = DOCUMENT["paths"]
    forms = {
        path: set(paths[path]["post"]["requestBody"]["content"]) - {"application/json"}
        for path in ("/v1/executions", "/v1/bulk/executions", "/v1/bulk/cancel", "/v1/flows")
    }
    assert list(forms.values()) == [
        {"application/octet-stream"},
        *({"application/x-ndjson"}, {"application/x-ndjson"}),
        set(),
    ]
    raw = parameters("post", "/v1/executions")
    fields = set(CreateExecution.__struct_fields__) - {"input_payload", "input_payload_b64"}
    assert {name for place, name in raw if place == "query"} == fields
    assert "application/json" in raw["query", "policy"]["content"]


def test_the_policy_is_the_struct_that_validates() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    (policy,) = (
        each["$ref"]
        for each in schemas["CreateExecution"]["properties"]["policy"]["anyOf"]
        if "$ref" in each
    )
    found = schemas[policy.rpartition("/")[2]]["properties"]
    assert set(found) == set(ExecutionPolicy.__struct_fields__)
    assert found["max_replay_count"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**32 - 1,
        "default": 10,
    }


@pytest.mark.parametrize(
    ("schema", "field", "words"),
    [
        ("ReclaimAnswer", "status", {"granted", "not_reclaimable", "reclaim_cap_exceeded"}),
        ("RotationState", "status", {"running", "done", "failed"}),
        ("FlowSummary", "derived_state", {"open", "running", "blocked", "completed", "failed"}),
    ],
)
def test_known_words_of_answers_are_listed(schema: str, field: str, words: set[str]) -> None:
    assert set(DOCUMENT["components"]["schemas"][schema]["properties"][field]["enum"]) == words


async def test_known_words_are_listed_and_others_are_refused(http: Http) -> None:
    schemas = DOCUMENT["components"]["schemas"]

    def listed(schema: str, field: str) -> list[str]:
        found = schemas[schema]["properties"][field]
        (words,) = (each["enum"] for each in found.get("anyOf", [found]) if "enum" in each)
        return words

    kinds = ["success_only", "terminal", "failure_only"]
    for schema, field in (("EdgeBody", "kind"), ("DependsOn", "kind")):
        assert listed(schema, field) == kinds
    for schema in ("StageEdge", "ApplyEdge"):
        assert listed(schema, "dependency_kind") == kinds
    assert listed("JoinBody", "kind") == ["all_of", "any_of", "quorum"]
    assert listed("JoinBody", "on_satisfied") == ["cancel_remaining", "let_run"]
    assert listed("BlockRequest", "reason") == ["paused_by_operator"]
    assert "escalate" in listed("SuspendItem", "timeout_behavior")
    for field, path in (("state", "state"), ("placement", "config")):
        schema = "LaneState" if field == "state" else "LaneConfig"
        for word in listed(schema, field):
            assert (await http.put(f"/v1/lanes/mails/{path}", {field: word})).status == 200
        answer = await http.put(f"/v1/lanes/mails/{path}", {field: "another"})
        assert answer.kind == (400, "invalid_input")
    policy = schemas["CancelFlow"]["properties"]["cancellation_policy"]
    assert policy["description"].endswith("other text means `flow_only`.")


@pytest.mark.parametrize(
    ("noun", "given", "fits"),
    [
        ("/v1/executions/{id}", "{fp:7}:11111111-2222-4333-8444-555555555555", True),
        ("/v1/executions/{id}", "7-11111111-2222-4333-8444-555555555555", True),
        ("/v1/executions/{id}", "11111111-2222-4333-8444-555555555555", False),
        ("/v1/flows/{id}", "11111111-2222-4333-8444-555555555555", True),
        ("/v1/flows/{id}", "nope", False),
        ("/v1/budgets/{id}", "nope", False),
        ("/v1/quotas/{id}", "nope", False),
        ("/v1/admin/rotations/{id}", "nope", False),
        ("/v1/lanes/{lane}", "a b", True),
        ("/v1/lanes/{lane}", "a" * 65, False),
    ],
)
async def test_patterns_of_ids_are_those_that_the_server_checks(
    http: Http, noun: str, given: str, *, fits: bool
) -> None:
    (schema,) = (
        each["schema"] for (place, _), each in parameters("get", noun).items() if place == "path"
    )
    pattern = UUID if schema.get("format") == "uuid" else schema["pattern"]
    assert (re.search(pattern, given) is not None) is fits
    found = await http.get(re.sub(r"\{\w+\}", lambda _: quote(given, safe=""), noun))
    assert (found.status == 400) is not fits


def test_the_page_shows_every_path() -> None:
    shown = page(document(all_routes()))
    for route in all_routes():
        assert (route.template in shown) is not route.internal
    assert "<script" not in shown


async def test_both_are_served(http: Http, serve: Serving) -> None:
    found = await http.get("/openapi.json")
    assert (found.status, found.json["openapi"]) == (200, "3.1.0")
    shown = await http.get("/docs")
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    async with serve(api_token="t") as closed:
        assert (await closed.get("/openapi.json")).status == 401
        assert (await closed.with_token("t").get("/openapi.json")).status == 200
