"""Changing executions: cancel, priority, replay, revoke, resume."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from tests.support.engine import Engine
from tests.support.http import Http, Response

UNKNOWN = ExecutionId("{fp:7}:11111111-2222-4333-8444-555555555555")


async def cancel(http: Http, execution_id: ExecutionId, **fields: Any) -> Response:
    body = {"execution_id": execution_id, "reason": "no longer needed", **fields}
    return await http.post(f"/v1/executions/{execution_id}/cancel", body)


async def test_cancelling_and_cancelling_again(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    done = {"Cancelled": {"execution_id": execution_id, "public_state": "cancelled"}}
    for _ in range(2):
        answer = await cancel(http, execution_id)
        assert (answer.status, answer.json) == (200, done)
    info = (await http.get(f"/v1/executions/{execution_id}")).json
    assert info["cancellation_reason"] == "no longer needed"


async def test_what_cannot_be_cancelled(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    assert (await cancel(http, handle.execution_id)).kind == (409, "execution_not_active")
    assert (await cancel(http, UNKNOWN)).kind == (404, "execution_not_found")


@pytest.mark.parametrize("source", ["flow_cascade", "system_timeout"])
async def test_sources_of_the_engine_are_refused_before_any_lookup(http: Http, source: str) -> None:
    assert (await cancel(http, UNKNOWN, source=source)).kind == (400, "invalid_input")


async def test_a_holder_of_the_lease_must_prove_it(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    execution_id = handle.execution_id
    answer = await cancel(http, execution_id, source="lease_holder")
    assert answer.kind == (400, "fence_required")
    wrong = {"lease_id": handle.lease_id, "lease_epoch": 9, "attempt_id": handle.attempt_id}
    answer = await cancel(http, execution_id, source="lease_holder", **wrong)
    assert answer.kind == (409, "stale_lease")
    right = wrong | {"lease_epoch": 1}
    assert (await cancel(http, execution_id, source="lease_holder", **right)).status == 200


async def test_the_id_of_the_body_must_be_that_of_the_path(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    body = {"execution_id": UNKNOWN, "reason": ""}
    answer = await http.post(f"/v1/executions/{execution_id}/cancel", body)
    assert answer.kind == (400, "invalid_input")
    assert answer.json["error"] == "path execution_id does not match body execution_id"
    # The body is decoded before the path is looked at.
    assert (await http.post("/v1/executions/x/cancel", {})).status == 422
    assert (await http.post("/v1/executions/x/cancel", body)).status == 400


async def test_a_new_priority(http: Http, engine: Engine) -> None:
    execution_id = await engine.create(priority=1)
    path = f"/v1/executions/{execution_id}/priority"
    changed = await http.put(path, {"new_priority": 99999})
    assert changed.json == {
        "Changed": {"execution_id": execution_id, "old_priority": 1, "new_priority": 9000}
    }
    assert (await http.put(path, {})).status == 422
    await engine.claim()
    assert (await http.put(path, {"new_priority": 1})).kind == (409, "execution_not_eligible")
    missing = await http.put(f"/v1/executions/{UNKNOWN}/priority", {"new_priority": 1})
    assert missing.kind == (404, "execution_not_found")


async def test_replay_takes_no_body_or_options(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}/replay"
    assert (await http.post(path)).kind == (409, "execution_not_terminal")
    await cancel(http, execution_id)
    assert (await http.post(path)).json["Replayed"]["public_state"] == "waiting"
    await cancel(http, execution_id)
    again = await http.post(path, {"reason": "again", "expected_replay_count": 1})
    assert again.json["Replayed"]["public_state"] == "waiting"
    assert (await http.post(path, b"{}", content_type="text/plain")).status == 415
    assert (await http.post(path, {"strict": "yes"})).status == 422


async def test_revoking_a_lease(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}/revoke-lease"
    idle = await http.post(path, b"ignored")
    assert (idle.status, idle.json) == (200, {"AlreadySatisfied": {"reason": "no_active_lease"}})
    handle = (await engine.claim()).handle
    revoked = await http.post(path)
    assert revoked.json == {"Revoked": {"lease_id": handle.lease_id, "lease_epoch": "1"}}
    assert (await http.post(path)).json == {"AlreadySatisfied": {"reason": "already_revoked"}}
    missing = await http.post(f"/v1/executions/{UNKNOWN}/revoke-lease")
    assert missing.kind == (404, "execution_not_found")


async def test_only_suspended_executions_resume(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    answer = await http.post(f"/v1/executions/{execution_id}/resume")
    assert answer.kind == (409, "execution_not_suspended")
    assert answer.json["class"] == "informational"
