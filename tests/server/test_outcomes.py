"""Complete bodies of the less usual outcomes (10 §3)."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey import keys
from flowfabric.server.auth import new_token, write_tokens
from flowfabric.server.config import BodyLimits
from tests.server.conftest import Serving, serving
from tests.server.status_rows import RECLAIM, SIGNAL
from tests.server.test_statuses import filled
from tests.support.engine import Engine
from tests.support.flows import set_units, submitted
from tests.support.http import Http
from tests.support.shapes import LEAST, expect
from tests.support.subjects import Subjects


async def test_a_payload_over_the_limit_of_the_deployment(serve: Serving) -> None:
    over = base64.b64encode(b"x" * 1_048_577).decode()
    async with serve(limits=BodyLimits(large=4_000_000)) as http:
        answer = await http.post("/v1/executions", LEAST | {"input_payload_b64": over})
        assert answer.kind == (400, "payload_too_large")
        detail = "input_payload is 1048577 bytes long; the limit is 1048576"
        assert answer.json["detail"] == detail
        query = "namespace=default&execution_kind=x"
        raw = await http.post(
            f"/v1/executions?{query}",
            b"x" * 1_048_577,
            content_type="application/octet-stream",
        )
        assert (*raw.kind, raw.json["detail"]) == (400, "payload_too_large", detail)


async def test_another_source_of_a_cancel_is_kept(subjects: Subjects) -> None:
    facts = await subjects.make("running")
    fence = {name: facts[name] for name in ("lease_id", "lease_epoch", "attempt_id")}
    body = {"execution_id": facts["id"], "reason": "x", "source": "Billing/v2", **fence}
    path = f"/v1/executions/{facts['id']}"
    cancelled = {"execution_id": "<execution>", "public_state": "cancelled"}
    expect(await subjects.http.post(f"{path}/cancel", body), 200, {"Cancelled": cancelled})
    outcome = (await subjects.http.get(f"{path}/outcome")).json
    assert (outcome["cancellation_reason"], outcome["cancelled_by"]) == ("x", "Billing/v2")


async def test_a_skipped_member_waits_again(subjects: Subjects) -> None:
    facts = await subjects.make("skipped")
    answer = await subjects.http.post(f"/v1/executions/{facts['id']}/replay")
    expect(answer, 200, {"Replayed": {"public_state": "waiting_children", "reopened": 0}})


async def test_an_expired_lease_needs_no_revoking(subjects: Subjects) -> None:
    facts = await subjects.make("expired")
    await subjects.backend.upkeep.mark_lease_expired_if_due(facts["id"].tag, [facts["id"]])
    answer = await subjects.http.post(f"/v1/executions/{facts['id']}/revoke-lease")
    expect(answer, 200, {"AlreadySatisfied": {"reason": "already_expired"}})


async def test_what_a_worker_cannot_reclaim(subjects: Subjects) -> None:
    facts = await subjects.make("waiting")
    lane = facts["lane"]
    needs = {"routing_requirements": {"required_capabilities": ["gpu", "ssd"]}}
    execution_id = await subjects.engine.create(lane=lane, policy=needs)
    await subjects.backend.executions.cancel_execution(facts["id"])
    await subjects.engine.claim(lane=lane, capabilities=["gpu", "ssd"])
    await subjects.backend.leases.revoke_lease(execution_id)
    body = filled(RECLAIM, facts) | {"worker_capabilities": ["ssd"]}
    path = f"/v1/executions/{execution_id}/reclaim"
    refused = {"status": "not_reclaimable", "execution_id": "<execution>"}
    expect(
        await subjects.http.post(path, body), 200, refused | {"detail": "capability_mismatch: gpu"}
    )


async def test_the_cap_of_reclaims(subjects: Subjects) -> None:
    handle = await subjects.engine.running(policy={"max_reclaim_count": 0})
    await subjects.backend.leases.revoke_lease(handle.execution_id)
    body = filled(RECLAIM, {"lane": "default"})
    path = f"/v1/executions/{handle.execution_id}/reclaim"
    over = {"status": "reclaim_cap_exceeded", "execution_id": "<execution>", "reclaim_count": 0}
    expect(await subjects.http.post(path, body), 200, over)


# --- signals --------------------------------------------------------------------------------


async def test_options_of_a_signal_are_for_operators(engine: Engine, tmp_path: Path) -> None:
    signalling, one = new_token("partner", ["signal"], None)
    operating, other = new_token("ops", ["signal", "operate"], None)
    write_tokens(tmp_path / "tokens", [one, other])
    async with serving(engine, tokens_file=tmp_path / "tokens") as http:
        facts = await Subjects(engine, http).make("signalled")
        body = filled(SIGNAL, facts) | {"signal_name": "other", "max_signals_per_execution": 1}
        path = f"/v1/executions/{facts['id']}/signal"
        refused = await http.with_token(operating).post(path, body)
        assert refused.kind == (400, "signal_limit_exceeded")
        accepted = await http.with_token(signalling).post(path, body)
        assert (accepted.status, list(accepted.json)) == (200, ["Accepted"])


async def test_a_signal_keeps_every_byte(subjects: Subjects) -> None:
    every = bytes(range(256))
    for payload in (
        {"payload": list(every)},
        {"payload_b64": base64.b64encode(every).decode()},
    ):
        facts = await subjects.make("parked")
        body = filled(SIGNAL, facts) | payload | {"payload_encoding": "bin"}
        path = f"/v1/executions/{facts['id']}/signal"
        assert (await subjects.http.post(path, body)).status == 200
        claim = await subjects.engine.claim(lane=facts["lane"])
        (found,) = await subjects.backend.waitpoints.observe_signals(claim.handle)
        assert (found.payload, found.payload_encoding) == (every, "bin")


# --- flows ----------------------------------------------------------------------------------


def stop(flow_id: str, policy: str = "cancel_all") -> dict[str, str]:
    return {"flow_id": flow_id, "reason": "x", "cancellation_policy": policy}


async def test_a_flow_of_others_is_not_shown(subjects: Subjects) -> None:
    flow_id = new_uuid()
    body = {"flow_id": flow_id, "flow_kind": "secret-kind", "namespace": "theirs"}
    expect(await subjects.http.post("/v1/flows", body), 201, {"Created": {"flow_id": "<uuid>"}})
    other = await subjects.http.post("/v1/flows", body | {"flow_kind": "x", "namespace": "ours"})
    assert other.kind == (400, "invalid_input")
    assert other.json["detail"] == "namespace: the flow exists in another namespace"
    kind = await subjects.http.post("/v1/flows", body | {"flow_kind": "x"})
    assert kind.json["detail"] == "flow_kind: the flow exists with secret-kind"


async def test_an_execution_of_others_is_not_shown(subjects: Subjects) -> None:
    body = {"execution_kind": "secret", "namespace": "theirs"}
    first = await subjects.http.post("/v1/executions", body)
    body["execution_id"] = first.json["Created"]["execution_id"]
    ours = body | {"namespace": "ours"}
    other = await subjects.http.post("/v1/executions", ours)
    assert other.kind == (400, "invalid_input")
    assert other.json["detail"] == "execution_id: exists in another namespace"
    row = (await subjects.http.post("/v1/bulk/executions", [ours])).json["results"][0]
    assert (row["status"], row["detail"]) == (400, other.json["detail"])
    assert (await subjects.http.post("/v1/executions", body)).status == 200


async def test_a_cancellation_that_continues_in_the_background(http: Http, engine: Engine) -> None:
    await set_units(engine, 1)
    flow = await submitted(engine, "a b c")
    answer = await http.post(f"/v1/flows/{flow.flow_id}/cancel", stop(flow.flow_id))
    members = answer.json["CancellationScheduled"]["member_execution_ids"]
    assert sorted(members) == sorted(flow.nodes.values())
    scheduled = {"cancellation_policy": "cancel_all", "member_count": 3}
    assert (answer.status, answer.json) == (
        200,
        {"CancellationScheduled": scheduled | {"member_execution_ids": members}},
    )


@pytest.mark.corrupts
async def test_a_member_that_cannot_be_cancelled(http: Http, engine: Engine) -> None:
    flow = await submitted(engine, "a bad")
    bad = flow.nodes["bad"]
    await engine.backend.transport.call("HDEL", keys.core(flow.tag, bad), "state")
    answer = await http.post(f"/v1/flows/{flow.flow_id}/cancel?wait=1", stop(flow.flow_id))
    (found,) = answer.json.values()
    assert (answer.status, answer.json) == (
        200,
        {
            "PartiallyCancelled": {
                "cancellation_policy": "cancel_all",
                "member_execution_ids": found["member_execution_ids"],
                "failed_member_execution_ids": [bad],
            }
        },
    )
    assert sorted(found["member_execution_ids"]) == sorted(flow.nodes.values())


async def test_an_unknown_policy_is_stored_as_it_is(http: Http, engine: Engine) -> None:
    flow = await submitted(engine, "a")
    path = f"/v1/flows/{flow.flow_id}/cancel"
    for policy in ("Later!", "flow_only"):
        answer = await http.post(path, stop(flow.flow_id, policy))
        said = answer.json["Cancelled"]
        assert (answer.status, said["cancellation_policy"]) == (200, "Later!")
    assert await flow.state("a") == "waiting"


async def test_a_repeated_cancel_names_at_most_1000_members(http: Http, engine: Engine) -> None:
    flow = await submitted(engine, " ".join(f"n{n}" for n in range(1000)))
    more = {"nodes": [{"key": "more", "execution_kind": "x"}]}
    assert (await http.post(f"/v1/flows/{flow.flow_id}/extend", more)).status == 201
    path = f"/v1/flows/{flow.flow_id}/cancel"
    first = await http.post(f"{path}?wait=true", stop(flow.flow_id))
    assert len(first.json["Cancelled"]["member_execution_ids"]) == 1001
    again = await http.post(path, stop(flow.flow_id))
    assert again.json.keys() == {"Cancelled"}
    assert len(again.json["Cancelled"]["member_execution_ids"]) == 1000


async def test_members_are_listed_by_id(http: Http, engine: Engine) -> None:
    flow, other = await submitted(engine, "a b c d e"), await submitted(engine, "a b c")
    path, found, cursor = f"/v1/flows/{flow.flow_id}/members", list[str](), ""
    while True:
        page = (await http.get(f"{path}?limit=2&cursor={cursor}")).json
        found += [row["execution_id"] for row in page["members"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == sorted(flow.nodes.values())
    foreign = (await http.get(f"/v1/flows/{other.flow_id}/members?limit=1")).json["next_cursor"]
    for wrong in (foreign, "nope", flow.nodes["a"], other.nodes["a"], "%ff", foreign[:-1]):
        answer = await http.get(f"{path}?cursor={wrong}")
        assert answer.status == 400, wrong
    assert (await http.get(f"{path}?cursor={foreign}")).kind == (400, "invalid_cursor")


async def test_an_edge_whose_child_is_missing_or_in_another_partition(
    http: Http, engine: Engine, subjects: Subjects
) -> None:
    facts = await subjects.make("staged")
    path = f"/v1/flows/{facts['id']}/edges/apply"
    body = {"flow_id": facts["id"], "edge_id": facts["uuid"]}
    for field, value in (
        ("upstream_execution_id", facts["gone"]),
        ("downstream_execution_id", facts["a"]),
        ("dependency_kind", "terminal"),
        ("data_passing_ref", "x"),
    ):
        answer = await http.post(path, body | {field: value})
        assert answer.kind == (400, "invalid_dependency"), field
        assert answer.json["details"] == [facts["uuid"], field]
    bad = await http.post(path, body | {"dependency_kind": "nope"})
    kinds = "success_only, terminal, failure_only"
    assert bad.json["detail"] == f"dependency_kind: must be one of {kinds}"


# --- budgets --------------------------------------------------------------------------------


@pytest.mark.parametrize("interval_ms", [0, 60_000])
async def test_when_a_budget_is_reset_next(http: Http, interval_ms: int) -> None:
    budget_id = new_uuid()
    body: dict[str, Any] = {
        "budget_id": budget_id,
        "scope_type": "lane",
        "scope_id": "default",
        "enforcement_mode": "strict",
        "on_hard_limit": "fail",
        "on_soft_limit": "warn",
        "reset_interval_ms": interval_ms,
        "dimensions": ["tokens"],
        "hard_limits": [10],
        "soft_limits": [0],
    }
    assert (await http.post("/v1/budgets", body)).status == 201
    read = (await http.get(f"/v1/budgets/{budget_id}")).json
    answer = await http.post(f"/v1/budgets/{budget_id}/reset")
    if interval_ms:
        assert isinstance(read["next_reset_at"], str)
        expect(answer, 200, {"Reset": {"next_reset_at": "<ms>"}})
    else:
        assert read["next_reset_at"] is None
        expect(answer, 200, {"Reset": {"next_reset_at": 0}})


# --- rotation -------------------------------------------------------------------------------


@pytest.mark.corrupts
async def test_a_rotation_that_fails_somewhere(http: Http, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    await engine.backend.transport.call("DEL", keys.secrets("{fp:3}"))
    await engine.backend.transport.call("SET", keys.secrets("{fp:3}"), "x")
    body = {"new_kid": "k2", "new_secret_hex": "cd" * 32}
    answer = await http.post("/v1/admin/rotate-waitpoint-secret", body)
    counts = {"rotated": engine.backend.counts.flow - 1, "failed": [3], "in_progress": []}
    expect(answer, 200, counts | {"new_kid": "k2", "rotation_id": "<uuid>"})
    await engine.backend.transport.call("DEL", keys.secrets("{fp:3}"))
    await http.post("/v1/admin/rotate-waitpoint-secret", body)
    conflict = await http.post(
        "/v1/admin/rotate-waitpoint-secret", body | {"new_secret_hex": "ef" * 32}
    )
    assert (*conflict.kind, conflict.json["detail"]) == (409, "rotation_conflict", "k2")
