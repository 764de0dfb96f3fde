"""Complete bodies of answers about flows, budgets, lanes, workers and the server (10 §3)."""

from __future__ import annotations

from typing import Any

from flowfabric.scanners.settings import INTERVALS_S
from tests.support.engine import Engine
from tests.support.flows import submitted
from tests.support.http import Http
from tests.support.shapes import BUDGET, EXECUTION, LEAST, SUMMARY, UUID, expect, shape

INDEXES = (
    *("eligible", "delayed", "active", "suspended", "terminal", "reclaimable"),
    *("blocked_dependencies", "blocked_budget", "blocked_quota", "blocked_route"),
    *("blocked_operator", "blocked_lane"),
)
MEMBERS = (
    *("waiting", "delayed", "rate_limited", "waiting_children", "active", "suspended"),
    *("completed", "failed", "cancelled", "expired", "skipped"),
)


async def test_flows_built_step_by_step(http: Http, engine: Engine) -> None:
    flow = {"flow_id": UUID, "flow_kind": "etl", "namespace": "default"}
    expect(await http.post("/v1/flows", flow), 201, {"Created": {"flow_id": "<uuid>"}})
    expect(await http.post("/v1/flows", flow), 200, {"AlreadySatisfied": {"flow_id": "<uuid>"}})
    path, ids = f"/v1/flows/{UUID}", list[str]()
    tag = (await http.get("/v1/flows")).json["flows"][0]
    assert set(tag) == {
        *("flow_id", "flow_kind", "namespace", "status", "public_flow_state"),
        *("derived_state", "created_at", "finished_at", "held", "ended_count", "node_count"),
    }
    for n in (1, 2):
        execution = LEAST | {"flow_id": UUID}
        made = await http.post("/v1/executions", execution)
        ids.append(made.json["Created"]["execution_id"])
        body = {"flow_id": UUID, "execution_id": ids[-1]}
        member = {"execution_id": "<execution>", "node_count": n}
        expect(await http.post(f"{path}/members", body), 200, {"AlreadyMember": member})
    edge = {"flow_id": UUID, "edge_id": UUID}
    ends = {"upstream_execution_id": ids[0], "downstream_execution_id": ids[1]}
    staged = await http.post(f"{path}/edges", edge | ends)
    revision = staged.json["Staged"]["new_graph_revision"]
    made = {"edge_id": "<uuid>", "new_graph_revision": revision}
    expect(staged, 201, {"Staged": made})
    again = {"AlreadyStaged": {"edge_id": "<uuid>", "graph_revision": revision}}
    expect(await http.post(f"{path}/edges", edge | ends), 200, again)
    applied = {"Applied": {"unsatisfied_count": 1}}
    expect(await http.post(f"{path}/edges/apply", edge), 200, applied)
    expect(await http.post(f"{path}/edges/apply", edge), 200, "AlreadyApplied")
    row = {
        "edge_id": "<uuid>",
        "flow_id": "<uuid>",
        "upstream_execution_id": "<execution>",
        "downstream_execution_id": "<execution>",
        "dependency_kind": "success_only",
        "satisfaction_condition": "all_required",
        "data_passing_ref": None,
        "edge_state": "pending",
        "created_at": "<ms>",
        "created_by": "engine",
        "input_name": None,
    }
    expect(await http.get(f"{path}/edges"), 200, {"edges": [row], "next_cursor": None})
    members = (await http.get(f"{path}/members")).json["members"]
    assert [shape(each) for each in members] == [
        SUMMARY | {"public_state": each["public_state"]} for each in members
    ]
    counted = dict.fromkeys((f"members_{state}" for state in MEMBERS), 0)
    summary = {
        "flow_id": "<uuid>",
        "derived_state": "blocked",
        "total_members": 2,
        **counted,
        "members_waiting": 1,
        "members_waiting_children": 1,
        "last_summary_update_at": "<ms>",
    }
    expect(await http.get(f"{path}/summary"), 200, summary)
    found = (await http.get(path)).json
    assert shape(found["summary"]) == summary
    assert set(found) >= {
        *("flow_id", "flow_kind", "namespace", "public_flow_state", "graph_revision", "tags"),
        *("node_count", "edge_count", "created_at", "last_mutation_at", "cancelled_at"),
        *("cancel_reason", "cancellation_policy", "edge_groups", "derived_state", "finished_at"),
    }
    expect(await http.put(f"{path}/tags", {"app.a": "1"}), 200, {"Ok": {"count": 1}})
    assert (await http.delete(path)).kind == (409, "flow_not_terminal")
    body = {"flow_id": UUID, "reason": "x", "cancellation_policy": "cancel_all"}
    cancelled = {
        "cancellation_policy": "cancel_all",
        "member_execution_ids": ["<execution>", "<execution>"],
        "total_members": 2,
        "truncated": False,
        "pending_members": 0,
    }
    expect(await http.post(f"{path}/cancel?wait=true", body), 200, {"Cancelled": cancelled})
    broken = await submitted(engine, "a>b")
    await broken.end("a", "failed")
    replayed = {"Replayed": {"replayed": 1, "reopened": 1, "pending": 0}}
    expect(await http.post(f"/v1/flows/{broken.flow_id}/replay"), 200, replayed)


async def test_whole_graphs(http: Http, engine: Engine) -> None:
    graph: dict[str, Any] = {
        "flow_id": UUID,
        "flow_kind": "etl",
        "namespace": "default",
        "nodes": [{"key": "a", "execution_kind": "x"}, {"key": "b", "execution_kind": "x"}],
        "edges": [{"from": "a", "to": "b"}],
        "hold": True,
    }
    nodes = {"a": "<execution>", "b": "<execution>"}
    answer = await http.post("/v1/flows/submit", graph)
    revision = answer.json["Submitted"]["graph_revision"]
    done = {"flow_id": "<uuid>", "graph_revision": revision, "nodes": nodes}
    expect(answer, 201, {"Submitted": done})
    expect(await http.post("/v1/flows/submit", graph), 200, {"AlreadySubmitted": done})
    other: dict[str, Any] = graph | {"edges": []}
    conflict = await http.post("/v1/flows/submit", other)
    assert conflict.kind == (409, "flow_submission_conflict")
    path = f"/v1/flows/{UUID}"
    more = {"nodes": [{"key": "c", "execution_kind": "x"}], "edges": [{"from": "b", "to": "c"}]}
    answer = await http.post(f"{path}/extend", more)
    extended = {
        "graph_revision": answer.json["Extended"]["graph_revision"],
        "nodes": {"c": "<execution>"},
    }
    expect(answer, 201, {"Extended": extended})
    expect(await http.post(f"{path}/extend", more), 200, {"AlreadyExtended": extended})
    expect(await http.post(f"{path}/release"), 200, {"Released": {"eligible": 1, "pending": False}})
    expect(await http.post(f"{path}/release"), 200, {"Released": {"eligible": 0, "pending": False}})
    flow = await submitted(engine, "a")
    group = f"/v1/flows/{flow.flow_id}/groups/{flow.nodes['a']}"
    policy = {"kind": "any_of", "on_satisfied": "let_run"}
    expect(await http.put(group, policy), 200, "Set")
    expect(await http.put(group, policy), 200, "AlreadySet")
    await flow.end("a")
    expect(await http.delete(f"/v1/flows/{flow.flow_id}"), 200, "Deleted")


async def test_budgets(http: Http) -> None:
    expect(await http.post("/v1/budgets", BUDGET), 201, {"Created": {"budget_id": "<uuid>"}})
    exists = {"AlreadySatisfied": {"budget_id": "<uuid>"}}
    expect(await http.post("/v1/budgets", BUDGET), 200, exists)
    differs = {"AlreadySatisfied": {"budget_id": "<uuid>", "differs": True}}
    expect(await http.post("/v1/budgets", BUDGET | {"hard_limits": [11]}), 200, differs)
    path = f"/v1/budgets/{UUID}"
    usage = f"{path}/usage"
    first = {"dimensions": {"tokens": 4}, "dedup_key": "once"}
    expect(await http.post(usage, first), 200, "Ok")
    expect(await http.post(usage, first), 200, "AlreadyApplied")
    soft = {"dimension": "tokens", "current_usage": 6, "soft_limit": 5}
    expect(await http.post(usage, {"dimensions": {"tokens": 2}}), 200, {"SoftBreach": soft})
    hard = {"dimension": "tokens", "current_usage": 6, "hard_limit": 10}
    expect(await http.post(usage, {"dimensions": {"tokens": 9}}), 200, {"HardBreach": hard})
    status: dict[str, Any] = {
        "budget_id": "<uuid>",
        "scope_type": "lane",
        "scope_id": "default",
        "enforcement_mode": "strict",
        "on_hard_limit": "fail",
        "on_soft_limit": "warn",
        "reset_interval_ms": 0,
        "dedup_ttl_ms": 86_400_000,
        "usage": {"tokens": 6},
        "reserved": {},
        "hard_limits": {"tokens": 10},
        "soft_limits": {"tokens": 5},
        "breach_count": 1,
        "soft_breach_count": 1,
        "last_breach_at": "<ms text>",
        "last_breach_dim": "tokens",
        "breached_at": None,
        "reset_count": 0,
        "last_reset_at": None,
        "next_reset_at": None,
        "created_at": "<ms text>",
    }
    expect(await http.get(path), 200, status)
    listed = await http.get("/v1/budgets?scope_type=lane")
    expect(listed, 200, {"budgets": [status], "next_cursor": None})
    expect(await http.post(f"{path}/reset"), 200, {"Reset": {"next_reset_at": 0}})
    expect(await http.put(path, {"hard_limits": {"tokens": 20}}), 200, "Updated")
    expect(await http.delete(path), 200, "Deleted")


async def test_quotas(http: Http) -> None:
    quota = {"quota_policy_id": UUID, "window_seconds": 60, "max_requests_per_window": 5}
    made = {"quota_policy_id": "<uuid>"}
    body = quota | {"max_concurrent": 1}
    expect(await http.post("/v1/quotas", body), 201, {"Created": made})
    expect(await http.post("/v1/quotas", body), 200, {"AlreadySatisfied": made})
    other = await http.post("/v1/quotas", body | {"max_concurrent": 2})
    expect(other, 200, {"AlreadySatisfied": made | {"differs": True}})
    status = {
        "quota_policy_id": "<uuid>",
        "window_seconds": 60,
        "max_requests_per_window": 5,
        "max_concurrent": 1,
        "jitter_ms": 0,
        "window_count": 0,
        "slots_held": 0,
        "oldest_entry_at": None,
        "retry_after_ms": 0,
        "created_at": "<ms>",
        "name": "",
    }
    expect(await http.get(f"/v1/quotas/{UUID}"), 200, status)
    expect(await http.get("/v1/quotas"), 200, {"quotas": [status], "next_cursor": None})
    expect(await http.put(f"/v1/quotas/{UUID}", {"jitter_ms": 5}), 200, "Updated")


async def test_lanes_and_workers(http: Http, engine: Engine) -> None:
    handle = await engine.running()
    lane: dict[str, Any] = {
        "lane_id": "default",
        "state": "active",
        "reason": "",
        "changed_at": None,
        "placement": "pinned",
        "shards": 256,
        "priority_weight_ms": 10**12,
        "reclaim_grace_ms": 0,
        "emit_renewals": False,
        "counts": dict.fromkeys(INDEXES, 0) | {"active": 1},
    }
    expect(await http.get("/v1/lanes/default"), 200, lane)
    state = {"state": "paused", "reason": "x"}
    expect(await http.put("/v1/lanes/default/state", state), 200, {"Set": {"previous": "active"}})
    expect(await http.put("/v1/lanes/default/config", {"reclaim_grace_ms": 5}), 200, "Set")
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"], capabilities=["gpu"]
    )
    worker = {
        "worker_id": "w",
        "worker_instance_id": "w-1",
        "namespace": "default",
        "namespaces": [],
        "lanes": ["default"],
        "capabilities": ["gpu"],
        "tasks": [],
        "takes_other_tasks": True,
        "last_heartbeat_ms": "<ms>",
        "liveness_ttl_ms": 60_000,
        "registered_at_ms": "<ms>",
        "draining": False,
    }
    expect(await http.get("/v1/workers"), 200, {"workers": [worker], "next_cursor": None})
    lease = {
        "execution_id": "<execution>",
        "lease_id": "<uuid>",
        "lease_epoch": 1,
        "expires_at_ms": "<ms>",
    }
    expect(await http.get("/v1/workers/w-1/leases"), 200, {"leases": [lease], "next_cursor": None})
    await engine.advance(handle.lease_ttl_ms + 1000)
    expired = lease | {"worker_instance_id": "w-1", "attempt_index": 0}
    expect(await http.get("/v1/leases/expired"), 200, {"leases": [expired], "next_cursor": None})
    none = "/v1/workers/nobody"
    expect(await http.post(f"{none}/drain"), 200, "NotRegistered")
    expect(await http.post(f"{none}/dead"), 200, "NotRegistered")


async def test_draining_and_removing_a_worker(http: Http, engine: Engine) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"]
    )
    expect(await http.post("/v1/workers/w-1/drain"), 200, {"Draining": {"leases": 0}})
    expect(await http.post("/v1/workers/w-1/dead"), 200, "Marked")


async def test_administration(http: Http, engine: Engine) -> None:
    await engine.backend.secrets.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    body = {"new_kid": "k2", "new_secret_hex": "cd" * 32}
    done: dict[str, Any] = {
        "rotated": 256,
        "failed": [],
        "new_kid": "k2",
        "in_progress": [],
        "rotation_id": "<uuid>",
    }
    rotated = expect(await http.post("/v1/admin/rotate-waitpoint-secret", body), 200, done)
    state: dict[str, Any] = {**done, "status": "done", "started_at": "<ms>", "finished_at": "<ms>"}
    path = f"/v1/admin/rotations/{rotated['rotation_id']}"
    expect(await http.get(path), 200, state)
    kids = {"current_kid": "k2", "verifying": [{"kid": "k1", "expires_at_ms": "<ms>"}]}
    expect(await http.get("/v1/admin/waitpoint-kids"), 200, kids)
    scanners = (await http.get("/v1/admin/scanners")).json
    assert scanners["next_cursor"] is None
    assert [each["name"] for each in scanners["scanners"]] == list(INTERVALS_S)
    assert set(scanners["scanners"][0]) == {
        *("name", "enabled", "interval_ms", "last_cycle_at", "last_duration_ms"),
        *("processed", "errors", "restarts"),
    }
    ran = await http.post("/v1/admin/scanners/lease_expiry/run", {"partition": 7})
    expect(ran, 200, {"Ran": {"processed": 0, "errors": 0}})
    able = (await http.get("/v1/capabilities")).json
    assert set(able) == {"identity", "supports"}
    assert set(able["identity"]) == {"family", "version", "stage"}
    assert set(able["identity"]["version"]) == {"major", "minor", "patch"}
    assert {type(each) for each in able["supports"].values()} == {bool}


async def test_bulk_rows_are_the_single_answers(http: Http) -> None:
    items = [LEAST, {"namespace": "default"}, LEAST | {"priority": "high"}]
    rows = (await http.post("/v1/bulk/executions", items)).json["results"]
    created = {"Created": {"execution_id": "<execution>", "public_state": "waiting"}}
    problem = {
        "status": 422,
        "error": "invalid JSON: Unprocessable Entity",
        "kind": "invalid_input",
        "retryable": False,
        "code": "invalid_input",
        "class": "terminal",
        "group": "validation",
        "detail": "execution_kind: missing",
    }
    assert shape(rows[0]) == {"status": 201, "result": created}
    assert rows[1] == problem
    assert rows[2] == problem | {"detail": "priority: expected int | null, got str"}
    made = rows[0]["result"]["Created"]["execution_id"]
    body = [{"execution_id": made, "reason": "x"}, {"execution_id": EXECUTION, "reason": "x"}]
    rows = (await http.post("/v1/bulk/cancel", body)).json["results"]
    cancelled = {"Cancelled": {"execution_id": "<execution>", "public_state": "cancelled"}}
    assert shape(rows[0]) == {"status": 200, "result": cancelled}
    assert (rows[1]["status"], rows[1]["error"]) == (404, f"execution_not_found: {EXECUTION}")
