"""Claims through the server, lanes, workers, leases, budgets, quotas, bulk and admin routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from flowfabric.core.ids import new_uuid
from flowfabric.server.schemas import RotationState
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until

UNKNOWN = "{fp:7}:11111111-2222-4333-8444-555555555555"
CLAIM = {"lane_id": "default", "worker_instance_id": "w-1", "grant_ttl_ms": 5000}
LEAST = {"namespace": "default", "execution_kind": "resize"}


async def test_a_worker_claims_through_the_server(http: Http, engine: Engine) -> None:
    empty = await http.post("/v1/workers/w/claim", CLAIM)
    assert (empty.status, empty.body) == (204, b"")
    execution_id = await engine.create()
    grant = await http.post("/v1/workers/w/claim", CLAIM)
    assert grant.status == 200
    assert grant.json.keys() == {"execution_id", "partition_key", "grant_key", "expires_at_ms"}
    assert (grant.json["execution_id"], grant.json["partition_key"]) == (
        execution_id,
        execution_id.tag,
    )
    assert (await http.post("/v1/workers/w/claim", CLAIM)).status == 204


async def test_a_claim_waits_for_work(http: Http, engine: Engine) -> None:
    waiting = asyncio.ensure_future(http.post("/v1/workers/w/claim?wait_ms=30000", CLAIM))

    async def listens() -> bool:
        return (await engine.backend.meta.usage()).blocked > 0

    await until(listens, "a claim that waits")
    execution_id = await engine.create()
    assert (await waiting).json["execution_id"] == execution_id
    assert (await http.post("/v1/workers/w/claim?wait_ms=20", CLAIM)).status == 204


@pytest.mark.parametrize(
    ("worker", "change", "code", "names"),
    [
        ("a%20b", {"lane_id": "", "grant_ttl_ms": 0}, "invalid_input", "worker_id"),
        ("w", {"worker_instance_id": "", "lane_id": ""}, "invalid_input", "worker_instance_id"),
        ("w", {"lane_id": "", "grant_ttl_ms": 0}, "invalid_input", "lane_id"),
        ("w", {"grant_ttl_ms": 0, "capabilities": [""]}, "invalid_input", "grant_ttl_ms"),
        ("w", {"grant_ttl_ms": 60001}, "invalid_input", "grant_ttl_ms"),
        ("w", {"capabilities": ["a,b"]}, "invalid_capabilities", "worker:"),
    ],
)
async def test_claims_are_checked_in_order(
    http: Http, worker: str, change: dict[str, Any], code: str, names: str
) -> None:
    answer = await http.post(f"/v1/workers/{worker}/claim", CLAIM | change)
    assert answer.kind == (400, code)
    assert answer.json["detail"].startswith(names)


async def test_reclaiming(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    body = CLAIM | {"worker_id": "w"}
    path = f"/v1/executions/{handle.execution_id}/reclaim"
    refused = (await http.post(path, body)).json
    assert (refused["status"], refused["detail"]) == (
        "not_reclaimable",
        "execution_not_reclaimable",
    )
    await engine.backend.leases.revoke_lease(handle.execution_id)
    granted = (await http.post(path, body)).json
    assert granted["status"] == "granted"
    assert granted.keys() == {
        *("status", "execution_id", "partition_key", "grant_key", "expires_at_ms", "lane_id"),
    }
    assert (await http.post(path, body)).kind == (409, "grant_already_exists")
    missing = await http.post(f"/v1/executions/{UNKNOWN}/reclaim", body)
    assert missing.kind == (404, "execution_not_found")
    # As for claims, all of the request is checked first.
    for change, names in (
        ({"worker_id": "a b", "lane_id": ""}, "worker_id"),
        ({"worker_instance_id": "", "lane_id": ""}, "worker_instance_id"),
        ({"lane_id": "", "grant_ttl_ms": 0}, "lane_id"),
        ({"grant_ttl_ms": 0, "worker_capabilities": ["a,b"]}, "grant_ttl_ms"),
        ({"worker_capabilities": ["a,b"]}, "worker:"),
    ):
        answer = await http.post(f"/v1/executions/{UNKNOWN}/reclaim", body | change)
        assert answer.status == 400
        assert answer.json["detail"].startswith(names)


async def test_blocking_by_an_operator(http: Http, engine: Engine) -> None:
    execution_id = await engine.create()
    path = f"/v1/executions/{execution_id}"
    wrong = await http.post(f"{path}/block", {"reason": "waiting_for_budget"})
    assert wrong.kind == (400, "invalid_blocking_reason")
    blocked = await http.post(f"{path}/block", {"reason_detail": "maintenance"})
    assert blocked.json == {
        "Blocked": {"execution_id": execution_id, "reason": "paused_by_operator"}
    }
    assert (await http.post(f"{path}/block")).kind == (409, "execution_not_eligible")
    assert (await http.post(f"{path}/unblock")).json == "Unblocked"
    assert (await http.post(f"{path}/unblock")).kind == (409, "execution_not_eligible")


async def test_lanes(http: Http) -> None:
    await http.post("/v1/executions", LEAST | {"lane_id": "a/b"})
    listed = (await http.get("/v1/lanes?limit=1")).json
    rest = (await http.get(f"/v1/lanes?cursor={listed['next_cursor']}")).json
    assert sorted(listed["lanes"] + rest["lanes"]) == ["a/b", "default"]
    assert rest["next_cursor"] is None
    found = (await http.get("/v1/lanes/a%2Fb")).json
    assert (found["lane_id"], found["state"], found["counts"]["eligible"]) == ("a/b", "active", 1)
    paused = await http.put("/v1/lanes/a%2Fb/state", {"state": "paused", "reason": "why"})
    assert paused.json == {"Set": {"previous": "active"}}
    assert (await http.get("/v1/lanes/a%2Fb")).json["reason"] == "why"
    assert (await http.put("/v1/lanes/x/state", {"state": "nope"})).kind == (400, "invalid_input")
    assert (await http.put("/v1/lanes/x/state", {})).status == 422
    assert (await http.put("/v1/lanes/default/config", {"reclaim_grace_ms": 5})).json == "Set"
    assert (await http.put("/v1/lanes/default/config", {})).kind == (400, "invalid_input")
    assert (await http.get("/v1/lanes/unused")).kind == (404, "lane_not_found")
    assert (await http.get("/v1/lanes/%00")).kind == (400, "invalid_input")


async def test_workers_of_all_namespaces_in_pages(http: Http, engine: Engine) -> None:
    """Workers of several namespaces may have the same instance id."""
    places = [("other", "a"), *(("same", each) for each in ("a", "b", "c")), ("z", "b")]
    for instance, namespace in places:
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["default"], namespace=namespace
        )
    found: list[tuple[str, str]] = []
    cursor = ""
    while cursor is not None:
        page = (await http.get(f"/v1/workers?limit=2&cursor={cursor}")).json
        found += [(row["worker_instance_id"], row["namespace"]) for row in page["workers"]]
        cursor = page["next_cursor"]
    assert found == places
    assert (await http.get("/v1/workers?cursor=!")).kind == (400, "invalid_cursor")
    plain = await engine.backend.workers.list_workers(None, after="same")
    assert [entry.worker_instance_id for entry in plain] == ["z"]


async def test_workers_and_expired_leases(http: Http, engine: Engine) -> None:
    for instance in ("w-1", "w-2"):
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["default"], capabilities=["gpu"]
        )
    first = (await http.get("/v1/workers?limit=1")).json
    assert [row["worker_instance_id"] for row in first["workers"]] == ["w-1"]
    row = first["workers"][0]
    assert (row["worker_id"], row["namespace"], row["lanes"]) == ("w", "default", ["default"])
    assert row["capabilities"] == ["gpu"]
    second = (await http.get(f"/v1/workers?cursor={first['next_cursor']}")).json
    assert [each["worker_instance_id"] for each in second["workers"]] == ["w-2"]
    assert (await http.get("/v1/workers?namespace=other")).json["workers"] == []
    handles = [await engine.running() for _ in range(2)]
    assert (await http.get("/v1/leases/expired")).json == {"leases": [], "next_cursor": None}
    await engine.advance(60_000)
    page = (await http.get("/v1/leases/expired?limit=1")).json
    rest = (await http.get(f"/v1/leases/expired?cursor={page['next_cursor']}")).json
    found = {each["execution_id"] for each in page["leases"] + rest["leases"]}
    assert found == {handle.execution_id for handle in handles}
    assert (await http.get("/v1/leases/expired?cursor=!")).kind == (400, "invalid_cursor")


async def test_draining_and_removing_a_worker(http: Http, engine: Engine) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"]
    )
    handle = await engine.running()
    leases = (await http.get("/v1/workers/w-1/leases")).json
    (row,) = leases["leases"]
    assert (row["execution_id"], row["lease_id"]) == (handle.execution_id, handle.lease_id)
    assert row.keys() == {"execution_id", "lease_id", "lease_epoch", "expires_at_ms"}
    assert leases["next_cursor"] is None
    assert (await http.get("/v1/workers/nobody/leases")).json["leases"] == []
    drained = await http.post("/v1/workers/w-1/drain", {"timeout_ms": 60_000})
    assert drained.json == {"Draining": {"leases": 1}}
    assert (await http.get("/v1/workers")).json["workers"][0]["draining"] is True
    assert (await http.post("/v1/workers/nobody/drain")).json == "NotRegistered"
    dead = await http.post("/v1/workers/w-1/dead", {"reason": "gone", "revoke_leases": True})
    assert dead.json == "Marked"
    assert (await http.get("/v1/workers/w-1/leases")).json["leases"] == []
    assert (await http.post("/v1/workers/w-1/dead")).json == "NotRegistered"
    assert (await http.post("/v1/workers/a%20b/dead")).kind == (400, "invalid_input")


async def test_budgets(http: Http) -> None:
    budget_id = new_uuid()
    body = {
        "budget_id": budget_id,
        "scope_type": "team",
        "scope_id": "blue",
        "enforcement_mode": "strict",
        "on_hard_limit": "fail",
        "on_soft_limit": "warn",
        "reset_interval_ms": 0,
        "dimensions": ["tokens"],
        "hard_limits": [100],
        "soft_limits": [50],
    }
    created = await http.post("/v1/budgets", body)
    assert (created.status, created.json) == (201, {"Created": {"budget_id": budget_id}})
    again = await http.post("/v1/budgets", body)
    assert (again.status, again.json) == (200, {"AlreadySatisfied": {"budget_id": budget_id}})
    assert (await http.post("/v1/budgets", body | {"hard_limits": []})).status == 400
    path = f"/v1/budgets/{budget_id}"
    use = f"{path}/usage"
    assert (await http.post(use, {"dimensions": {"tokens": 10}, "dedup_key": "a"})).json == "Ok"
    repeat = await http.post(use, {"dimensions": {"tokens": 10}, "dedup_key": "a"})
    assert repeat.json == "AlreadyApplied"
    soft = await http.post(use, {"dimensions": {"tokens": 50}})
    assert soft.json == {
        "SoftBreach": {"dimension": "tokens", "current_usage": 60, "soft_limit": 50}
    }
    hard = await http.post(use, {"dimensions": {"tokens": 50}})
    assert hard.json == {
        "HardBreach": {"dimension": "tokens", "current_usage": 60, "hard_limit": 100}
    }
    status = (await http.get(path)).json
    assert (status["usage"], status["hard_limits"]) == ({"tokens": 60}, {"tokens": 100})
    assert isinstance(status["created_at"], str)
    assert (await http.get("/v1/budgets?scope_id=blue")).json["budgets"][0] == status
    assert (await http.put(path, {"hard_limits": {"tokens": 500}})).json == "Updated"
    assert (await http.put(path, {})).kind == (400, "invalid_input")
    assert (await http.put(path, {"dedup_ttl_ms": 5000})).json == "Updated"
    assert (await http.get(path)).json["dedup_ttl_ms"] == 5000
    for ttl in (0, 7 * 86_400_000 + 1):
        wrong = {"dedup_ttl_ms": ttl}
        assert (await http.put(path, wrong)).kind == (400, "invalid_input")
        other = body | wrong | {"budget_id": new_uuid()}
        assert (await http.post("/v1/budgets", other)).kind == (400, "invalid_input")
    other = body | {"budget_id": new_uuid(), "dedup_ttl_ms": 7000}
    assert (await http.post("/v1/budgets", other)).status == 201
    kept = (await http.get(f"/v1/budgets/{other['budget_id']}")).json
    assert kept["dedup_ttl_ms"] == 7000
    assert (await http.post(f"{path}/reset")).json == {"Reset": {"next_reset_at": 0}}
    assert (await http.delete(path)).json == "Deleted"
    missing = await http.get(path)
    assert missing.kind == (404, "budget_not_found")
    assert missing.json["error"] == "not found: budget"
    for method, route, sent in (
        ("POST", "/usage", {"dimensions": {"tokens": 1}}),
        ("POST", "/reset", None),
        ("PUT", "", {"reset_interval_ms": 5}),
        ("DELETE", "", None),
    ):
        assert (await http.send(method, path + route, sent)).kind == (404, "budget_not_found")
    assert (await http.get("/v1/budgets/x")).json["error"].startswith("invalid budget_id: ")


async def test_quotas(http: Http) -> None:
    policy_id = new_uuid()
    body = {
        "quota_policy_id": policy_id,
        "window_seconds": 60,
        "max_requests_per_window": 10,
        "max_concurrent": 2,
    }
    created = await http.post("/v1/quotas", body)
    assert (created.status, created.json) == (201, {"Created": {"quota_policy_id": policy_id}})
    again = await http.post("/v1/quotas", body)
    assert (again.status, again.json) == (
        200,
        {"AlreadySatisfied": {"quota_policy_id": policy_id}},
    )
    big = await http.post("/v1/quotas", body | {"max_concurrent": 2**53})
    assert big.kind == (400, "invalid_quota_spec")
    found = (await http.get(f"/v1/quotas/{policy_id}")).json
    assert found.keys() >= {
        *("quota_policy_id", "window_seconds", "max_requests_per_window", "max_concurrent"),
        *("jitter_ms", "window_count", "slots_held", "oldest_entry_at", "retry_after_ms"),
        "created_at",
    }
    assert (await http.get("/v1/quotas")).json["quotas"] == [found]
    assert (await http.put(f"/v1/quotas/{policy_id}", {"max_concurrent": 5})).json == "Updated"
    assert (await http.put(f"/v1/quotas/{policy_id}", {})).kind == (400, "invalid_input")
    missing = await http.get(f"/v1/quotas/{new_uuid()}")
    assert missing.kind == (404, "quota_policy_not_found")


async def test_bulk_create_answers_row_by_row(http: Http, engine: Engine) -> None:
    items: list[Any] = [
        LEAST,
        LEAST | {"idempotency_key": "k"},
        LEAST | {"idempotency_key": "k"},
        {"namespace": "default"},
        LEAST | {"namespace": ""},
        7,
    ]
    answer = await http.post("/v1/bulk/executions", items)
    assert answer.status == 200
    rows = answer.json["results"]
    assert [row["status"] for row in rows] == [201, 201, 200, 422, 400, 422]
    made = rows[1]["result"]["Created"]["execution_id"]
    assert rows[2]["result"] == {"Duplicate": {"execution_id": made}}
    assert rows[3]["detail"] == "execution_kind: missing"
    assert (rows[4]["kind"], rows[4]["retryable"]) == ("invalid_input", False)
    lines = b"\n\n".join(json.dumps(each).encode() for each in items[:1]) + b"\n{oops\n"
    found = await http.post("/v1/bulk/executions", lines, content_type="application/x-ndjson")
    assert [row["status"] for row in found.json["results"]] == [201, 400]
    broken = await http.post("/v1/bulk/executions", b"[{]", content_type="application/json")
    assert broken.status == 400
    assert (await http.post("/v1/bulk/executions", {})).status == 422
    assert (await http.post("/v1/bulk/executions", b"[]", content_type="text/csv")).status == 415
    assert (await http.post("/v1/bulk/executions", [1] * 1001)).kind == (400, "invalid_input")


async def test_bulk_cancel_answers_row_by_row(http: Http, engine: Engine) -> None:
    made = [await engine.create() for _ in range(2)]
    items = [{"execution_id": each, "reason": "x"} for each in (*made, UNKNOWN)]
    items.append({"execution_id": made[0], "reason": "x", "source": "flow_cascade"})
    rows = (await http.post("/v1/bulk/cancel", items)).json["results"]
    assert [row["status"] for row in rows] == [200, 200, 404, 400]
    assert rows[0]["result"]["Cancelled"]["public_state"] == "cancelled"
    assert rows[2]["kind"] == "execution_not_found"


async def test_rotating_the_secret(http: Http, serve: Serving, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    body = {"new_kid": "k2", "new_secret_hex": "cd" * 32}
    answer = await http.post("/v1/admin/rotate-waitpoint-secret", body)
    assert answer.status == 200
    rotation_id = answer.json["rotation_id"]
    assert answer.json == {
        "rotated": engine.backend.counts.flow,
        "failed": [],
        "new_kid": "k2",
        "in_progress": [],
        "rotation_id": rotation_id,
    }
    state = (await http.get(f"/v1/admin/rotations/{rotation_id}")).json
    assert (state["status"], state["rotated"]) == ("done", engine.backend.counts.flow)
    assert state["finished_at"] >= state["started_at"]
    kids = (await http.get("/v1/admin/waitpoint-kids")).json
    assert kids["current_kid"] == "k2"
    assert [each["kid"] for each in kids["verifying"]] == ["k1"]
    again = await http.post("/v1/admin/rotate-waitpoint-secret", body)
    assert again.json["rotated"] == engine.backend.counts.flow
    conflict = await http.post(
        "/v1/admin/rotate-waitpoint-secret", body | {"new_secret_hex": "ef" * 32}
    )
    assert conflict.kind == (409, "rotation_conflict")
    for change, code in (
        ({"new_kid": ""}, "invalid_kid"),
        ({"new_secret_hex": "zz"}, "invalid_secret_hex"),
    ):
        bad = await http.post("/v1/admin/rotate-waitpoint-secret", body | change)
        assert bad.kind == (400, code)
    missing = await http.get(f"/v1/admin/rotations/{new_uuid()}")
    assert missing.kind == (404, "rotation_not_found")


async def test_a_rotation_whose_process_died_has_failed(http: Http, engine: Engine) -> None:
    rotation_id, notes = new_uuid(), engine.backend.notes
    state = RotationState(
        rotation_id=rotation_id,
        new_kid="k2",
        status="running",
        rotated=0,
        failed=[],
        in_progress=[],
        started_at=1,
        finished_at=None,
    )
    await notes.put_note(f"rotation:{rotation_id}", msgspec.json.encode(state), 60_000)
    await notes.put_note(f"rotation:{rotation_id}:alive", b"1", 60_000)
    path = f"/v1/admin/rotations/{rotation_id}"
    assert (await http.get(path)).json == msgspec.to_builtins(state)
    await notes.drop_note(f"rotation:{rotation_id}:alive")
    assert (await http.get(path)).json == msgspec.to_builtins(state) | {"status": "failed"}


async def test_scanners_and_capabilities(http: Http) -> None:
    rows = (await http.get("/v1/admin/scanners")).json["scanners"]
    names = {row["name"] for row in rows}
    assert {"lease_expiry", "retention_trimmer"} <= names
    assert rows[0].keys() == {
        *("name", "enabled", "interval_ms", "last_cycle_at", "last_duration_ms"),
        *("processed", "errors", "restarts"),
    }
    ran = await http.post("/v1/admin/scanners/lease_expiry/run", {"partition": 3})
    assert ran.json == {"Ran": {"processed": 0, "errors": 0}}
    assert (await http.post("/v1/admin/scanners/nope/run")).kind == (404, "scanner_not_found")
    bad = await http.post("/v1/admin/scanners/lease_expiry/run", {"partition": 999})
    assert bad.kind == (400, "invalid_input")
    found = (await http.get("/v1/capabilities")).json
    assert found["identity"]["family"] == "valkey"
    assert found["supports"]["claim_for_worker"] is True
