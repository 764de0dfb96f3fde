"""Waitpoints, tokens, signals, approvals and callbacks over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import Suspended
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.suspension import Waits, all_of_waitpoints

UNKNOWN = "{fp:7}:11111111-2222-4333-8444-555555555555"


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


def signal(parked: Suspended, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The path and the body of a signal to a suspension."""
    execution_id = parked.handle.execution_id
    body = {
        "execution_id": execution_id,
        "waitpoint_id": parked.details.waitpoint_id,
        "signal_id": new_uuid(),
        "signal_name": "go",
        "signal_category": "test",
        "source_type": "test",
        "source_identity": "me",
        "target_scope": "waitpoint",
        "waitpoint_token": parked.details.waitpoint_token.reveal(),
        **fields,
    }
    return f"/v1/executions/{execution_id}/signal", body


async def test_a_signal_resumes(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    path, body = signal(parked, payload=[123, 125], idempotency_key="k")
    accepted = await http.post(path, body)
    assert (accepted.status, accepted.json) == (
        200,
        {"Accepted": {"signal_id": body["signal_id"], "effect": "resume_condition_satisfied"}},
    )
    again = await http.post(path, body | {"signal_id": new_uuid()})
    assert again.json == {"Duplicate": {"existing_signal_id": body["signal_id"]}}
    state = await http.get(f"/v1/executions/{parked.handle.execution_id}/state")
    assert state.json == "waiting"


async def test_refused_signals(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    path, body = signal(parked)
    assert (await http.post(path, body | {"waitpoint_token": ""})).kind == (400, "missing_token")
    assert (await http.post(path, body | {"waitpoint_token": "x"})).kind == (400, "invalid_token")
    assert (await http.post(path, body | {"waitpoint_id": new_uuid()})).kind == (
        400,
        "invalid_token",
    )
    assert (await http.post(path, body | {"source_type": "operator"})).status == 400
    assert (await http.post(path, body | {"signal_name": ""})).kind == (400, "invalid_input")
    assert (await http.post(path, body | {"signal_id": "x"})).status == 422
    assert (await http.post(path, body | {"payload": [1], "payload_b64": "YQ=="})).status == 400
    missing = body | {"execution_id": UNKNOWN}
    assert (await http.post(f"/v1/executions/{UNKNOWN}/signal", missing)).kind == (
        404,
        "execution_not_found",
    )
    await waits.backend.executions.cancel_execution(parked.handle.execution_id)
    assert (await http.post(path, body)).kind == (409, "target_not_signalable")


async def test_open_waitpoints_are_listed_page_by_page_without_tokens(
    http: Http, waits: Waits
) -> None:
    parked = await waits.park(all_of_waitpoints(["a", "b", "c"]))
    path = f"/v1/executions/{parked.handle.execution_id}/pending-waitpoints"
    whole = (await http.get(path)).json
    assert {each["waitpoint_key"] for each in whole} == {"a", "b", "c"}
    for each in whole:
        assert {"waitpoint_id", "state", "required_signal_names", "token_kid"} <= each.keys()
        assert "waitpoint_token" not in each
    first = await http.get(f"{path}?limit=2")
    assert len(first.json) == 2
    target, rel = first.headers["link"].split("; ")
    assert rel == 'rel="next"'
    second = await http.get(target.strip("<>"))
    assert first.json + second.json == whole
    assert "link" not in second.headers
    missing = await http.get(f"/v1/executions/{UNKNOWN}/pending-waitpoints")
    assert missing.kind == (404, "execution_not_found")
    assert missing.json["error"] == "not found: execution"


async def test_only_authorised_callers_can_read_tokens(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    path = f"/v1/executions/{parked.handle.execution_id}/waitpoints"
    found = await http.get(f"{path}/{parked.details.waitpoint_id}/token")
    assert found.json == {"token": parked.details.waitpoint_token.reveal()}
    assert found.headers["cache-control"] == "no-store"
    for other in (
        f"{path}/{new_uuid()}/token",
        f"/v1/executions/{UNKNOWN}/waitpoints/{parked.details.waitpoint_id}/token",
    ):
        missing = await http.get(other)
        assert missing.kind == (404, "waitpoint_token_not_found")
        assert missing.headers["cache-control"] == "no-store"
        assert missing.json["error"] == (
            "waitpoint token not found (consumed, expired, or unknown id)"
        )
    bad = await http.get(f"{path}/x/token")
    assert bad.kind == (400, "invalid_input")
    assert bad.json["error"].startswith("waitpoint_id: ")


async def test_an_operator_approves_without_a_token(http: Http, waits: Waits) -> None:
    parked = await waits.park(Single("k", "approved"))
    waitpoint_id = parked.details.waitpoint_id
    path = f"/v1/executions/{parked.handle.execution_id}/waitpoints/{waitpoint_id}/approve"
    assert (await http.post(path, {})).status == 422
    lane = await http.post(path, {"signal_name": "approved", "lane_id": "other"})
    assert lane.kind == (400, "invalid_input")
    done = await http.post(path, {"signal_name": "approved", "decided_by": "ada"})
    assert done.json["Accepted"]["effect"] == "resume_condition_satisfied"
    again = await http.post(path, {"signal_name": "approved", "decided_by": "ada"})
    assert "Duplicate" in again.json
    gone = path.replace(waitpoint_id, new_uuid())
    assert (await http.post(gone, {"signal_name": "x"})).kind == (404, "waitpoint_not_found")


async def test_closing_a_waitpoint(http: Http, waits: Waits) -> None:
    handle = await waits.engine.running()
    pending = await waits.backend.waitpoints.create_waitpoint(handle, "later", 60_000)
    path = f"/v1/executions/{handle.execution_id}/waitpoints/{pending.waitpoint_id}/close"
    for _ in range(2):
        answer = await http.post(path)
        assert (answer.status, answer.json) == (200, "Closed")
    gone = path.replace(pending.waitpoint_id, new_uuid())
    assert (await http.post(gone)).kind == (404, "waitpoint_not_found")


async def test_a_callback_needs_only_the_token(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    waitpoint_id = parked.details.waitpoint_id
    path = f"/v1/callbacks/executions/{parked.handle.execution_id}/waitpoints/{waitpoint_id}"
    token = {"x_ff_waitpoint_token": parked.details.waitpoint_token.reveal()}
    none = await http.post(path, b"not json at all")
    assert (none.status, none.json["code"]) == (401, "missing_token")
    hidden = [
        await http.post(path, {"signal_name": "go"}, x_ff_waitpoint_token="k1:" + "0" * 40),
        await http.post(path.replace(waitpoint_id, new_uuid()), {"signal_name": "go"}, **token),
        await http.post(
            path.replace(parked.handle.execution_id, UNKNOWN), {"signal_name": "go"}, **token
        ),
    ]
    assert {(each.status, each.body) for each in hidden} == {
        (401, b'{"error":"invalid_token","code":"invalid_token"}')
    }
    assert (await http.post(path, {}, **token)).status == 422
    first = await http.post(path, {"signal_name": "go"}, idempotency_key="once", **token)
    assert first.json["Accepted"]["effect"] == "resume_condition_satisfied"
    again = await http.post(path, {"signal_name": "go"}, idempotency_key="once", **token)
    assert "Duplicate" in again.json
    assert "idempotency-replayed" not in again.headers


async def test_suspended_executions_are_listed(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    (row,) = (await http.get("/v1/suspended")).json["suspensions"]
    assert row["execution_id"] == parked.handle.execution_id
    assert (row["suspension_id"], row["timeout_at"]) == (parked.details.suspension_id, None)
    assert isinstance(row["suspended_at"], int)
    assert (await http.get("/v1/suspended?cursor=nope")).kind == (400, "invalid_cursor")


async def test_resuming_by_hand(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    answer = await http.post(f"/v1/executions/{parked.handle.execution_id}/resume")
    assert (answer.status, answer.json) == (200, {"Resumed": {"public_state": "waiting"}})


async def test_explain_names_the_waitpoints(http: Http, waits: Waits) -> None:
    parked = await waits.park()
    found = (await http.get(f"/v1/executions/{parked.handle.execution_id}/explain")).json
    (waitpoint,) = found["waitpoints"]
    assert waitpoint["waitpoint_id"] == parked.details.waitpoint_id
    assert waitpoint.keys() == {"waitpoint_id", "waitpoint_key", "state", "expires_at"}
