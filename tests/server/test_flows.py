"""Flows over HTTP: step by step, as whole graphs, and cancelling them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId, new_uuid
from tests.server.conftest import waiters
from tests.support.engine import Engine
from tests.support.http import Http

ABSENT = "99999999-2222-4333-8444-555555555555"


def graph(**changes: Any) -> dict[str, Any]:
    node = {"execution_kind": "job"}
    return {
        "flow_kind": "etl",
        "namespace": "default",
        "nodes": [{"key": key, **node} for key in "abc"],
        "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "c", "input_name": "in"}],
        **changes,
    }


async def test_a_flow_step_by_step(http: Http, engine: Engine) -> None:
    flow_id = new_uuid()
    header = {"flow_id": flow_id, "flow_kind": "etl", "namespace": "default"}
    created = await http.post("/v1/flows", header)
    assert (created.status, created.json) == (201, {"Created": {"flow_id": flow_id}})
    again = await http.post("/v1/flows", header)
    assert (again.status, again.json) == (200, {"AlreadySatisfied": {"flow_id": flow_id}})
    members: list[str] = []
    for number in (1, 2):
        made = ExecutionId.deterministic_for_flow(flow_id, new_uuid(), engine.backend.counts)
        await engine.create(execution_id=made)
        body = {"flow_id": flow_id, "execution_id": made}
        added = await http.post(f"/v1/flows/{flow_id}/members", body)
        assert (added.status, added.json) == (
            201,
            {"Added": {"execution_id": made, "new_node_count": number}},
        )
        members.append(made)
    repeat = await http.post(
        f"/v1/flows/{flow_id}/members", {"flow_id": flow_id, "execution_id": members[0]}
    )
    assert (repeat.status, repeat.json) == (
        200,
        {"AlreadyMember": {"execution_id": members[0], "node_count": 2}},
    )
    edge = {
        "flow_id": flow_id,
        "edge_id": new_uuid(),
        "upstream_execution_id": members[0],
        "downstream_execution_id": members[1],
    }
    staged = await http.post(f"/v1/flows/{flow_id}/edges", edge)
    assert staged.status == 201
    revision = staged.json["Staged"]["new_graph_revision"]
    twice = await http.post(f"/v1/flows/{flow_id}/edges", edge)
    assert (twice.status, twice.json) == (
        200,
        {"AlreadyStaged": {"edge_id": edge["edge_id"], "graph_revision": revision}},
    )
    stale = edge | {"edge_id": new_uuid(), "expected_graph_revision": 0}
    answer = await http.post(f"/v1/flows/{flow_id}/edges", stale)
    assert answer.kind == (409, "stale_graph_revision")
    assert answer.json["retryable"] is True
    body = {"flow_id": flow_id, "edge_id": edge["edge_id"]}
    applied = await http.post(f"/v1/flows/{flow_id}/edges/apply", body)
    assert (applied.status, applied.json) == (200, {"Applied": {"unsatisfied_count": 1}})
    done = await http.post(f"/v1/flows/{flow_id}/edges/apply", body)
    assert (done.status, done.json) == (200, "AlreadyApplied")
    (listed,) = (await http.get(f"/v1/flows/{flow_id}/edges")).json["edges"]
    assert listed["edge_id"] == edge["edge_id"]
    assert (listed["satisfaction_condition"], listed["created_by"]) == ("all_required", "engine")


async def test_a_whole_graph_is_submitted_once(http: Http) -> None:
    flow_id = new_uuid()
    first = await http.post("/v1/flows/submit", graph(flow_id=flow_id))
    assert first.status == 201
    nodes = first.json["Submitted"]["nodes"]
    assert nodes.keys() == {"a", "b", "c"}
    again = await http.post("/v1/flows/submit", graph(flow_id=flow_id))
    assert (again.status, again.json) == (200, {"AlreadySubmitted": first.json["Submitted"]})
    other = await http.post("/v1/flows/submit", graph(flow_id=flow_id, flow_kind="other"))
    assert other.kind == (409, "flow_submission_conflict")
    minted = await http.post("/v1/flows/submit", graph())
    assert minted.json["Submitted"]["flow_id"] != flow_id
    snapshot = (await http.get(f"/v1/flows/{flow_id}")).json
    assert (snapshot["node_count"], snapshot["edge_count"]) == (3, 2)
    assert snapshot["summary"]["total_members"] == 3
    assert snapshot["summary"]["members_waiting_children"] == 2
    members = (await http.get(f"/v1/flows/{flow_id}/members?limit=2")).json
    assert [row["execution_id"] for row in members["members"]] == sorted(nodes.values())[:2]
    rest = await http.get(f"/v1/flows/{flow_id}/members?limit=2&cursor={members['next_cursor']}")
    assert [row["execution_id"] for row in rest.json["members"]] == sorted(nodes.values())[2:]
    assert rest.json["next_cursor"] is None


BAD_GRAPHS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"nodes": [{"key": "a"}]}, 422, "invalid_input", "nodes[0].execution_kind: missing"),
    ({"nodes": None}, 422, "invalid_input", "nodes: "),
    ({"nodes": []}, 400, "invalid_input", "nodes: "),
    (
        {"nodes": [{"key": "a", "execution_kind": "x", "oops": 1}], "edges": []},
        400,
        "invalid_input",
        "nodes[0].oops: unknown field",
    ),
    ({"edges": [{"from": "a", "to": "b", "kind": "nope"}]}, 400, "invalid_input", "edges.kind"),
    ({"edges": [{"from": "a", "to": "a"}]}, 409, "self_referencing_edge", ""),
    (
        {"edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]},
        409,
        "cycle_detected",
        "",
    ),
    (
        {"groups": [{"node": "b", "policy": {"kind": "quorum"}}]},
        400,
        "invalid_input",
        "groups[0].policy.k: ",
    ),
    (
        {"groups": [{"node": "zz", "policy": {"kind": "all_of"}}]},
        400,
        "invalid_input",
        "groups[0].node: ",
    ),
    (
        {"nodes": [{"key": "a", "execution_kind": "x", "namespace": "other"}], "edges": []},
        400,
        "invalid_input",
        "nodes[0].namespace: ",
    ),
    (
        {
            "nodes": [{"key": "a", "execution_kind": "x", "policy": {"max_replay_count": -1}}],
            "edges": [],
        },
        422,
        "invalid_policy_json",
        "nodes[0].policy.max_replay_count: ",
    ),
]


@pytest.mark.parametrize(("change", "status", "code", "detail"), BAD_GRAPHS)
async def test_bad_graphs(
    http: Http, change: dict[str, Any], status: int, code: str, detail: str
) -> None:
    answer = await http.post("/v1/flows/submit", graph(**change))
    assert answer.kind == (status, code)
    assert answer.json.get("detail", "").startswith(detail)


async def test_a_held_flow_is_extended_and_released(http: Http) -> None:
    made = await http.post("/v1/flows/submit", graph(hold=True))
    flow_id = made.json["Submitted"]["flow_id"]
    more = {
        "nodes": [{"key": "d", "execution_kind": "job"}],
        "edges": [{"from": "c", "to": "d"}],
        "groups": [{"node": "d", "policy": {"kind": "any_of", "on_satisfied": "let_run"}}],
    }
    path = f"/v1/flows/{flow_id}/extend"
    extended = await http.post(path, more)
    assert extended.status == 201
    assert extended.json["Extended"]["nodes"].keys() == {"d"}
    again = await http.post(path, more)
    assert (again.status, again.json) == (200, {"AlreadyExtended": extended.json["Extended"]})
    assert (await http.post(path, {})).kind == (400, "invalid_input")
    released = await http.post(f"/v1/flows/{flow_id}/release")
    assert released.json == {"Released": {"eligible": 1, "pending": False}}
    assert (await http.post(f"/v1/flows/{flow_id}/release")).json == {
        "Released": {"eligible": 0, "pending": False}
    }


async def test_group_policies(http: Http) -> None:
    made = (await http.post("/v1/flows/submit", graph(edges=[]))).json["Submitted"]
    path = f"/v1/flows/{made['flow_id']}/groups/{made['nodes']['b']}"
    policy = {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"}
    assert (await http.put(path, policy)).json == "Set"
    assert (await http.put(path, policy)).json == "AlreadySet"
    for wrong in ({"kind": "quorum"}, {"kind": "any_of"}, {"kind": "nope"}):
        assert (await http.put(path, wrong)).kind == (400, "invalid_input")
    assert (await http.put(path, {})).status == 422


async def test_cancelling_a_flow(http: Http) -> None:
    made = (await http.post("/v1/flows/submit", graph())).json["Submitted"]
    flow_id = made["flow_id"]
    body = {"flow_id": flow_id, "reason": "stop", "cancellation_policy": "cancel_all"}
    answer = await http.post(f"/v1/flows/{flow_id}/cancel?wait=true", body)
    assert answer.status == 200
    done = answer.json["Cancelled"]
    assert done["cancellation_policy"] == "cancel_all"
    assert sorted(done["member_execution_ids"]) == sorted(made["nodes"].values())
    other = await http.post(
        f"/v1/flows/{flow_id}/cancel", body | {"cancellation_policy": "flow_only"}
    )
    assert other.json["Cancelled"]["cancellation_policy"] == "cancel_all"
    for query in ("wait_timeout_ms=0", "wait_timeout_ms=300001", "wait_timeout_ms=x"):
        bad = await http.post(f"/v1/flows/{flow_id}/cancel?{query}", body)
        assert bad.kind == (400, "invalid_input")
    new = {"nodes": [{"key": "d", "execution_kind": "job"}]}
    extend = await http.post(f"/v1/flows/{flow_id}/extend", new)
    assert extend.kind == (409, "flow_already_terminal")


async def test_waiting_for_a_flow(http: Http, engine: Engine) -> None:
    made = (await http.post("/v1/flows/submit", graph(nodes=graph()["nodes"][:1], edges=[]))).json
    flow_id, nodes = made["Submitted"]["flow_id"], made["Submitted"]["nodes"]
    path = f"/v1/flows/{flow_id}/summary"
    assert (await http.get(f"{path}?wait_ms=20")).json["derived_state"] == "open"
    waiting = asyncio.ensure_future(http.get(f"{path}?wait_ms=30000"))
    await waiters(engine, 1)
    await engine.backend.executions.cancel_execution(ExecutionId(nodes["a"]))
    found = (await waiting).json
    assert (found["derived_state"], found["members_cancelled"]) == ("failed", 1)


async def test_flows_are_listed_filtered_tagged_and_deleted(http: Http) -> None:
    made = (await http.post("/v1/flows/submit", graph(tags={"app.a": "1"}))).json["Submitted"]
    await http.post("/v1/flows/submit", graph(namespace="acme"))
    flow_id = made["flow_id"]
    rows = (await http.get("/v1/flows")).json["flows"]
    assert len(rows) == 2
    assert {"flow_id", "flow_kind", "namespace", "status", "created_at"} <= rows[0].keys()
    for query in ("tag=app.a:1", "namespace=default&status=active"):
        (row,) = (await http.get(f"/v1/flows?{query}")).json["flows"]
        assert row["flow_id"] == flow_id
    both = await http.get("/v1/flows?tag=app.a:2&tag=app.a:1")
    assert both.json == {"flows": [], "next_cursor": None}
    assert (await http.get("/v1/flows?status=nope")).kind == (400, "invalid_input")
    tagged = await http.put(f"/v1/flows/{flow_id}/tags", {"app.b": "2"})
    assert tagged.json == {"Ok": {"count": 1}}
    assert (await http.get(f"/v1/flows/{flow_id}")).json["tags"] == {"app.a": "1", "app.b": "2"}
    path = f"/v1/flows/{flow_id}"
    assert (await http.delete(path)).kind == (409, "flow_not_terminal")
    body = {"flow_id": flow_id, "reason": "", "cancellation_policy": "cancel_all"}
    await http.post(f"{path}/cancel?wait=1", body)
    assert (await http.delete(path)).json == "Deleted"
    assert (await http.get(path)).kind == (404, "flow_not_found")


async def test_failed_members_are_replayed(http: Http, engine: Engine) -> None:
    made = (await http.post("/v1/flows/submit", graph())).json["Submitted"]
    execution_id = ExecutionId(made["nodes"]["a"])
    claims = await engine.backend.claims.claim_many(engine.want(), execution_id.tag, 1)
    await engine.backend.executions.fail(claims.claims[0].handle, "broken", "permanent")
    answer = await http.post(f"/v1/flows/{made['flow_id']}/replay")
    assert answer.json == {"Replayed": {"replayed": 1, "reopened": 2, "pending": 0}}


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("GET", "", None),
        ("GET", "/summary", None),
        ("GET", "/members", None),
        ("GET", "/edges", None),
        ("DELETE", "", None),
        ("POST", "/release", None),
        ("POST", "/replay", None),
        ("PUT", "/tags", {"app.a": "b"}),
        (
            "POST",
            "/cancel",
            {"flow_id": ABSENT, "reason": "", "cancellation_policy": "flow_only"},
        ),
        ("POST", "/extend", {"nodes": [{"key": "a", "execution_kind": "x"}]}),
    ],
)
async def test_an_unknown_or_malformed_flow(http: Http, method: str, route: str, body: Any) -> None:
    answer = await http.send(method, f"/v1/flows/{ABSENT}{route}", body)
    assert answer.kind == (404, "flow_not_found")
    assert answer.json["detail"] == ABSENT
    bad = await http.send(method, f"/v1/flows/X{route}", body)
    assert bad.kind == (400, "invalid_input")
    assert bad.json["error"].startswith("invalid flow_id: ")
