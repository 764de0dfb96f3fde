"""Complete bodies of errors, and texts that clients know (10 §5)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.server.app import failure
from flowfabric.server.problems import Problem, closing
from tests.server.conftest import serving
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.shapes import EXECUTION, UUID

NOT_FOUND = {"class": "terminal", "group": "not_found", "retryable": False}
INVALID = {"kind": "invalid_input", "code": "invalid_input", "class": "terminal"}
REFUSED = INVALID | {"group": "validation", "retryable": False}


def unknown(code: str, error: str, detail: str) -> dict[str, Any]:
    return NOT_FOUND | {"kind": code, "code": code, "error": error, "detail": detail}


ERRORS: list[tuple[str, str, Any, int, dict[str, Any]]] = [
    (
        *("GET", f"/v1/executions/{EXECUTION}", None, 404),
        unknown("execution_not_found", f"execution not found: {EXECUTION}", EXECUTION),
    ),
    (
        *("GET", f"/v1/executions/{EXECUTION}/state", None, 404),
        unknown("execution_not_found", f"execution not found: {EXECUTION}", EXECUTION),
    ),
    (
        *("GET", f"/v1/executions/{EXECUTION}/pending-waitpoints", None, 404),
        unknown("execution_not_found", "not found: execution", EXECUTION),
    ),
    (
        *("GET", f"/v1/executions/{EXECUTION}/result", None, 404),
        unknown("execution_not_found", f"execution result not found: {EXECUTION}", EXECUTION),
    ),
    (
        *("GET", f"/v1/executions/{EXECUTION}/waitpoints/{UUID}/token", None, 404),
        unknown(
            "waitpoint_token_not_found",
            "waitpoint token not found (consumed, expired, or unknown id)",
            UUID,
        ),
    ),
    (
        *("GET", f"/v1/budgets/{UUID}", None, 404),
        unknown("budget_not_found", "not found: budget", UUID),
    ),
    (
        *("POST", f"/v1/budgets/{UUID}/reset", None, 404),
        unknown("budget_not_found", f"budget_not_found: {UUID}", UUID),
    ),
    (
        *("GET", f"/v1/quotas/{UUID}", None, 404),
        unknown("quota_policy_not_found", f"quota_policy_not_found: {UUID}", UUID),
    ),
    (
        *("GET", f"/v1/flows/{UUID}", None, 404),
        unknown("flow_not_found", f"flow_not_found: {UUID}", UUID),
    ),
    (
        *("GET", "/v1/lanes/nope", None, 404),
        unknown("lane_not_found", "lane_not_found: nope", "nope"),
    ),
    (
        *("GET", f"/v1/admin/rotations/{UUID}", None, 404),
        unknown("rotation_not_found", f"rotation_not_found: {UUID}", UUID),
    ),
    (
        *("POST", "/v1/admin/scanners/nope/run", None, 404),
        unknown("scanner_not_found", "scanner_not_found: nope", "nope"),
    ),
    (
        *("POST", "/v1/executions", {"namespace": 5}, 422),
        REFUSED
        | {
            "error": "invalid JSON: Unprocessable Entity",
            "detail": "namespace: expected str, got int",
        },
    ),
    ("POST", "/v1/executions", b"", 415, {}),
    (
        *("POST", f"/v1/executions/{EXECUTION}/cancel", {"execution_id": "x", "reason": ""}, 422),
        REFUSED | {"error": "invalid JSON: Unprocessable Entity"},
    ),
    (
        "POST",
        f"/v1/executions/{EXECUTION}/cancel",
        {"execution_id": EXECUTION.replace("1", "2"), "reason": ""},
        400,
        REFUSED | {"error": "path execution_id does not match body execution_id"},
    ),
    (
        "POST",
        f"/v1/flows/{UUID}/cancel",
        {"flow_id": UUID.replace("1", "2"), "reason": "", "cancellation_policy": "cancel_all"},
        400,
        REFUSED | {"error": "path flow_id does not match body flow_id"},
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "expected"), ERRORS)
async def test_errors_have_the_envelope(
    http: Http, method: str, path: str, body: Any, status: int, expected: dict[str, Any]
) -> None:
    answer = await http.send(method, path, body, {"x-request-id": "r-7"})
    envelope = {"error", "kind", "retryable", "code", "class", "group", "request_id"}
    assert answer.status == status
    assert envelope <= answer.json.keys() <= envelope | {"detail"}
    assert answer.json == answer.json | expected | {"request_id": "r-7"}


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/executions/x", "invalid execution_id: "),
        (f"/v1/executions/{{fp:999}}:{UUID}", "invalid execution_id: "),
        ("/v1/flows/x", "invalid flow_id: "),
        ("/v1/budgets/x", "invalid budget_id: "),
        ("/v1/quotas/x", "invalid quota_policy_id: "),
        (f"/v1/executions/{EXECUTION}/waitpoints/x/token", "waitpoint_id: "),
        (f"/v1/lanes/{'a' * 65}", "invalid_input: lane_id: "),
        ("/v1/workers/a%20b/leases", "invalid_input: worker_instance_id: "),
        (f"/v1/executions/{EXECUTION}/attempts/x/stream", "invalid_input: idx: "),
        ("/v1/executions?limit=x", "invalid_input: limit: "),
        (f"/v1/executions?limit={10**23}", "invalid_input: limit: must be from 0 to "),
        ("/v1/executions?state=nope", "invalid_input: state: "),
        (f"/v1/executions/{EXECUTION}/state?wait_ms=30001", "invalid_input: wait_ms: "),
        ("/v1/executions/%ff", "invalid_input: path: "),
    ],
)
async def test_bad_ids_and_queries(http: Http, path: str, error: str) -> None:
    answer = await http.get(path)
    assert (answer.status, answer.json["kind"]) == (400, "invalid_input")
    assert answer.json["error"].startswith(error), answer.json["error"]


async def test_a_full_pool_and_a_closed_one(engine: Engine) -> None:
    async with serving(engine, max_event_streams=1) as http:
        execution_id = await engine.create()
        path = f"/v1/executions/{execution_id}/events"
        async with http.open("GET", path):
            full = await http.get(path)
    assert full.status == 429
    assert full.headers["retry-after"] == "1"
    assert full.json["error"] == (
        "too many concurrent event_streams calls (server max: 1); retry with backoff"
    )
    assert (full.json["retryable"], full.json["retry_after_ms"]) == (True, 1000)


def test_only_faults_are_logged_and_not_refusals_while_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = failure(closing("remote_claims"), "r-1", "/v1/remote/claim")
    assert (refused.status, caplog.records) == (503, [])
    failed = failure(Problem("unavailable", "ping"), "r-2", "/healthz")
    assert (failed.status, len(caplog.records)) == (503, 1)
