"""Complete bodies of answers about executions, as clients see them (10 §3)."""

from __future__ import annotations

import re
from typing import Any

from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.shapes import LEAST, SUMMARY, UUID, expect
from tests.support.streams import append
from tests.support.suspension import GO, Waits

VECTOR = {
    "lifecycle_phase": "runnable",
    "ownership_state": "unowned",
    "eligibility_state": "eligible_now",
    "blocking_reason": "waiting_for_worker",
    "terminal_outcome": "none",
    "attempt_state": "pending_first_attempt",
    "public_state": "waiting",
}
INFO: dict[str, Any] = {
    "execution_id": "<execution>",
    "namespace": "default",
    "lane_id": "default",
    "execution_kind": "resize",
    "public_state": "waiting",
    "priority": 0,
    "state_vector": VECTOR,
    "created_at": "<ms text>",
    "current_attempt_index": 0,
    "flow_id": None,
    "node": None,
    "blocking_detail": "",
    "total_attempt_count": 0,
    "retry_count": 0,
    "replay_count": 0,
    "lease_reclaim_count": 0,
    "failure_reason": None,
    "failure_category": None,
    "cancellation_reason": None,
    "cancelled_by": None,
    "progress_pct": None,
    "progress_message": None,
    "payload_encoding": "",
    "result_encoding": "",
    "delay_until": None,
    "retry_at": None,
    "execution_deadline_at": None,
    "required_capabilities": [],
}
EXPLANATION = {
    "public_state": "waiting",
    "blocking_reason": "waiting_for_worker",
    "blocking_detail": "",
    "since": "<ms>",
    "retry_at": None,
    "missing_capabilities": None,
    "budgets": None,
    "quota": None,
    "unresolved_edges": None,
    "waitpoints": None,
    "lane_state": "active",
}
OUTCOME = {
    "execution_id": "<execution>",
    "public_state": "completed",
    "terminal_outcome": "success",
    "completed_at": "<ms>",
    "failure_reason": None,
    "failure_category": None,
    "cancellation_reason": None,
    "cancelled_by": None,
    "current_attempt_index": 0,
    "total_attempt_count": 1,
    "has_result": True,
}


async def test_creating_and_reading(http: Http) -> None:
    created = {"execution_id": "<execution>", "public_state": "waiting"}
    made = expect(await http.post("/v1/executions", LEAST), 201, {"Created": created})
    execution_id = made["Created"]["execution_id"]
    again = LEAST | {"execution_id": execution_id}
    repeated = {"Duplicate": {"execution_id": "<execution>"}}
    expect(await http.post("/v1/executions", again), 200, repeated)
    later = LEAST | {"delay_until": 4_000_000_000_000}
    delayed = {"Created": created | {"public_state": "delayed"}}
    later_id = expect(await http.post("/v1/executions", later), 201, delayed)
    path = f"/v1/executions/{execution_id}"
    expect(await http.get(path), 200, INFO)
    expect(await http.get(f"{path}/state"), 200, "waiting")
    expect(await http.get(f"{path}/tags"), 200, {})
    expect(await http.put(f"{path}/tags", {"app.a": "1", "app.b": ""}), 200, {"Ok": {"count": 2}})
    expect(await http.get(f"{path}/tags"), 200, {"app.a": "1", "app.b": ""})
    expect(await http.get(f"{path}/explain"), 200, EXPLANATION)
    expect(await http.get(f"{path}/history"), 200, {"events": [], "next_cursor": None})
    expect(await http.get(f"{path}/outcome"), 202, {"public_state": "waiting"})
    expect(await http.get(f"{path}/pending-waitpoints"), 200, [])
    snapshot = {
        "execution_id": "<execution>",
        "flow_id": None,
        "lane_id": "default",
        "namespace": "default",
        "execution_kind": "resize",
        "public_state": "waiting",
        "blocking_reason": "waiting_for_worker",
        "blocking_detail": None,
        "retry_at": None,
        "current_attempt": None,
        "current_lease": None,
        "current_waitpoint": None,
        "prompt": None,
        "details": None,
        "created_at": "<ms>",
        "last_mutation_at": "<ms>",
        "total_attempt_count": 0,
        "tags": {"app.a": "1", "app.b": ""},
    }
    expect(await http.get(f"{path}/describe"), 200, snapshot)
    body = {"execution_id": later_id["Created"]["execution_id"], "reason": "x"}
    await http.post(f"/v1/executions/{body['execution_id']}/cancel", body)
    listed = await http.get("/v1/executions?state=waiting")
    expect(listed, 200, {"executions": [SUMMARY], "next_cursor": None})
    first = (await http.get("/v1/executions?limit=1")).json
    assert isinstance(first["next_cursor"], str)


async def test_results_and_outcomes(http: Http, engine: Engine) -> None:
    done, failed = await engine.running(), await engine.running()
    await engine.backend.executions.complete(done, b"\x00\xff")
    await engine.backend.executions.fail(failed, "boom", "permanent")
    path = f"/v1/executions/{done.execution_id}"
    result = await http.get(f"{path}/result")
    assert (result.status, result.body) == (200, b"\x00\xff")
    assert result.headers["content-type"] == "application/octet-stream"
    assert result.headers["x-ff-public-state"] == "completed"
    expect(await http.get(f"{path}/outcome"), 200, OUTCOME)
    ended = {"public_state": "failed", "terminal_outcome": "failed", "has_result": False}
    reason = {"failure_reason": "boom", "failure_category": "permanent"}
    answer = await http.get(f"/v1/executions/{failed.execution_id}/outcome")
    expect(answer, 200, OUTCOME | ended | reason)


async def test_changes_of_an_execution(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}"
    changed = {"execution_id": "<execution>", "old_priority": 0, "new_priority": 5}
    expect(await http.put(f"{path}/priority", {"new_priority": 5}), 200, {"Changed": changed})
    blocked = {"execution_id": "<execution>", "reason": "paused_by_operator"}
    expect(await http.post(f"{path}/block"), 200, {"Blocked": blocked})
    expect(await http.post(f"{path}/unblock"), 200, "Unblocked")
    satisfied = {"AlreadySatisfied": {"reason": "no_active_lease"}}
    expect(await http.post(f"{path}/revoke-lease"), 200, satisfied)
    await engine.claim()
    revoked = {"Revoked": {"lease_id": "<uuid>", "lease_epoch": "1"}}
    expect(await http.post(f"{path}/revoke-lease"), 200, revoked)
    satisfied = {"AlreadySatisfied": {"reason": "already_revoked"}}
    expect(await http.post(f"{path}/revoke-lease"), 200, satisfied)
    body = {"execution_id": execution_id, "reason": "enough"}
    cancelled = {"execution_id": "<execution>", "public_state": "cancelled"}
    expect(await http.post(f"{path}/cancel", body), 200, {"Cancelled": cancelled})
    replayed = await http.post(f"{path}/replay")
    expect(replayed, 200, {"Replayed": {"public_state": "waiting", "reopened": 0}})
    kinds = [event["type"] for event in (await http.get(f"{path}/history")).json["events"]]
    assert kinds == ["revoked", "replayed"]


async def test_claims_and_reclaims(http: Http, engine: Engine) -> None:
    claim = {"lane_id": "default", "worker_instance_id": "w-1", "grant_ttl_ms": 1000}
    empty = await http.post("/v1/workers/w/claim", claim)
    assert (empty.status, empty.body) == (204, b"")
    assert "content-length" not in empty.headers
    execution_id = await engine.create()
    grant = {
        "execution_id": "<execution>",
        "partition_key": f"{{fp:{execution_id.partition}}}",
        "expires_at_ms": "<ms>",
    }
    granted = await http.post("/v1/workers/w/claim", claim)
    expect(granted, 200, grant | {"grant_key": granted.json["grant_key"]})
    handle = await engine.running(lane="other")
    path = f"/v1/executions/{handle.execution_id}"
    body = {**claim, "worker_id": "w", "lane_id": "other"}
    refused = {"status": "not_reclaimable", "execution_id": "<execution>"}
    detail = {"detail": "execution_not_reclaimable"}
    expect(await http.post(f"{path}/reclaim", body), 200, refused | detail)
    await http.post(f"{path}/revoke-lease")
    taken = await http.post(f"{path}/reclaim", body)
    tag = {"partition_key": handle.execution_id.tag, "expires_at_ms": "<ms>"}
    whole = {"status": "granted", "execution_id": "<execution>", "lane_id": "other"} | tag
    expect(taken, 200, whole | {"grant_key": taken.json["grant_key"]})
    assert (await http.post(f"{path}/reclaim", body)).kind == (409, "grant_already_exists")


async def test_streams(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"one")
    path = f"/v1/executions/{handle.execution_id}/attempts/0/stream"
    page = (await http.get(path)).json
    (frame,) = page["frames"]
    assert set(page) == {"frames", "count", "next_cursor"}
    assert (page["count"], page["next_cursor"]) == (1, frame["id"])
    assert (frame["fields"]["frame_type"], frame["fields"]["payload"]) == ("event", "one")
    await engine.backend.executions.complete(handle)
    closed = {"closed_at": "<ms>", "closed_reason": "attempt_success"}
    tail = await http.get(f"{path}/tail?after={frame['id']}")
    expect(tail, 200, {"frames": [], "count": 0, "next_cursor": frame["id"]} | closed)


async def test_waitpoints_and_signals(http: Http, engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(GO)
    execution_id, details = parked.handle.execution_id, parked.details
    path = f"/v1/executions/{execution_id}"
    entry = {
        "waitpoint_id": "<uuid>",
        "waitpoint_key": details.waitpoint_key,
        "state": "active",
        "required_signal_names": ["go"],
        "created_at": "<ms>",
        "execution_id": "<execution>",
        "token_kid": "k1",
        "activated_at": "<ms>",
        "expires_at": None,
        "prompt": None,
        "details": None,
    }
    pending = await http.get(f"{path}/pending-waitpoints")
    fingerprint = {"token_fingerprint": pending.json[0]["token_fingerprint"]}
    expect(pending, 200, [entry | fingerprint])
    assert re.fullmatch("[0-9a-f]{16}", fingerprint["token_fingerprint"])
    token = await http.get(f"{path}/waitpoints/{details.waitpoint_id}/token")
    assert re.fullmatch("k1:[0-9a-f]{40}", token.json["token"])
    assert (set(token.json), token.headers["cache-control"]) == ({"token"}, "no-store")
    suspended = {
        "execution_id": "<execution>",
        "suspension_id": "<uuid>",
        "suspended_at": "<ms>",
        "timeout_at": None,
        "reason": "waiting_for_signal",
        "requested_by": "worker",
        "lane_id": "default",
        "prompt": None,
        "details": None,
    }
    listed = await http.get("/v1/suspended")
    expect(listed, 200, {"suspensions": [suspended], "next_cursor": None})
    signal = {
        "execution_id": execution_id,
        "waitpoint_id": details.waitpoint_id,
        "signal_id": UUID,
        "signal_name": "other",
        "signal_category": "test",
        "source_type": "test",
        "source_identity": "me",
        "target_scope": "waitpoint",
        "waitpoint_token": token.json["token"],
        "idempotency_key": "once",
    }
    accepted = (await http.post(f"{path}/signal", signal)).json
    assert set(accepted["Accepted"]) == {"signal_id", "effect"}
    again = await http.post(f"{path}/signal", signal)
    expect(again, 200, {"Duplicate": {"existing_signal_id": "<uuid>"}})
    wait = f"{path}/waitpoints/{details.waitpoint_id}"
    approved = (await http.post(f"{wait}/approve", {"signal_name": "go"})).json
    assert approved["Accepted"]["effect"] == "resume_condition_satisfied"
    gone = await http.get(f"{wait}/token")
    assert (gone.status, gone.headers["cache-control"]) == (404, "no-store")
    other = await waits.park(GO)
    path = f"/v1/executions/{other.handle.execution_id}"
    expect(await http.post(f"{path}/resume"), 200, {"Resumed": {"public_state": "waiting"}})
    third = await waits.park(GO)
    path = f"/v1/executions/{third.handle.execution_id}"
    close = f"{path}/waitpoints/{third.details.waitpoint_id}/close"
    for _ in range(2):
        expect(await http.post(close), 200, "Closed")
    expect(await http.get(f"{path}/pending-waitpoints"), 200, [])
    assert (await http.get(f"{path}/state")).json == "suspended"
