"""The audit log of API calls, and rotations that take longer than their request."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.contracts.suspension import Rotation
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.notes import ValkeyNotes
from flowfabric.engine.valkey.secrets import ValkeySecrets
from flowfabric.server.auth import new_token, write_tokens
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.shapes import BUDGET, UUID
from tests.support.suspension import GO, Waits

ROTATE = {"new_kid": "k2", "new_secret_hex": "cd" * 32}


def recorded(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.name.startswith("flowfabric.audit")]


async def test_operator_calls_are_logged_with_the_id_of_the_token(
    serve: Serving, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    token, stored = new_token("oncall", ["admin"], None)
    write_tokens(tmp_path / "tokens", [stored])
    waits = await Waits.open(engine)
    parked = await waits.park(GO)
    running, waiting = await engine.running(), await engine.create()
    budget = NewBudget(
        budget_id=UUID,
        scope_type="lane",
        scope_id="default",
        enforcement_mode="strict",
        on_hard_limit="fail",
        on_soft_limit="warn",
        reset_interval_ms=0,
        dimensions=("tokens",),
        hard_limits=(10,),
        soft_limits=(5,),
    )
    await engine.backend.budgets.create_budget(budget)
    caplog.clear()
    one, path = parked.handle.execution_id, "/v1/executions"
    async with serve(tokens_file=tmp_path / "tokens") as http:
        by = http.with_token(token)
        cancel = {"execution_id": waiting, "reason": "x"}
        for answer in (
            await by.post(f"{path}/{waiting}/cancel", cancel),
            await by.post(f"{path}/{waiting}/replay"),
            await by.post(f"{path}/{running.execution_id}/revoke-lease"),
            await by.get(f"{path}/{one}/waitpoints/{parked.details.waitpoint_id}/token"),
            await by.post(f"/v1/budgets/{UUID}/reset"),
            await by.post("/v1/admin/rotate-waitpoint-secret", ROTATE),
        ):
            assert answer.status == 200, answer.body
        refused = await by.post(f"{path}/{waiting}/replay")
        assert refused.status == 409
    found = [(vars(each).get("op"), vars(each).get("caller")) for each in recorded(caplog)]
    told = {op for op, caller in found if caller == "oncall"}
    assert {
        *("cancel_execution", "replay_execution", "revoke_lease", "read_waitpoint_token"),
        *("reset_budget", "rotate_waitpoint_hmac_secret_all"),
    } <= told, found
    assert "cd" * 32 not in caplog.text
    assert str(parked.details.waitpoint_token.reveal()) not in caplog.text


async def test_a_rotation_that_changed_nothing_is_not_ok(
    http: Http, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    caplog.set_level(logging.INFO)
    other = ROTATE | {"new_secret_hex": "ef" * 32}
    for body, status in ((ROTATE, 200), (other, 409)):
        assert (await http.post("/v1/admin/rotate-waitpoint-secret", body)).status == status
    done = [each for each in map(vars, recorded(caplog)) if "op" in each]
    counts = [(each["code"], each["rotated"], each["failed_count"]) for each in done]
    every = engine.backend.counts.flow
    assert counts == [("ok", every, 0), ("rotation_incomplete", 0, every)]


FLOW = "22222222-2222-4333-8444-555555555555"
SPENDER = ExecutionId("{fp:3}:33333333-2222-4333-8444-555555555555")
SPENT = {"budget_id": UUID, "execution_id": SPENDER, "deltas": {"tokens": 2}}
CANCEL = {"reason": "late", "cancellation_policy": "cancel_all"}
ENGINE = "/v1/engine/budgets"

# Method, path, body, status; operation, result, and what the record says about the target.
OPERATOR_CALLS: list[tuple[str, str, Any, int, str, str, dict[str, Any]]] = [
    ("POST", f"/v1/flows/{FLOW}/release", None, 200, "release_flow", "ok", {"flow_id": FLOW}),
    (
        "DELETE",
        f"/v1/flows/{FLOW}",
        None,
        409,
        "delete_flow",
        "flow_not_terminal",
        {"flow_id": FLOW},
    ),
    (
        *("POST", f"/v1/flows/{FLOW}/replay", {"failed_only": False}, 200, "replay_flow", "ok"),
        {"flow_id": FLOW, "failed_only": False},
    ),
    (
        *("POST", f"/v1/flows/{FLOW}/cancel", CANCEL | {"flow_id": FLOW}, 200),
        *("cancel_flow", "ok", CANCEL | {"flow_id": FLOW}),
    ),
    (
        *("POST", f"/v1/flows/{FLOW}/replay", None, 409),
        *("replay_flow", "flow_already_terminal", {"flow_id": FLOW, "failed_only": True}),
    ),
    ("DELETE", f"/v1/flows/{FLOW}", None, 200, "delete_flow", "ok", {"flow_id": FLOW}),
    (
        *("POST", f"/v1/flows/{FLOW}/cancel", CANCEL | {"flow_id": FLOW}, 404),
        *("cancel_flow", "flow_not_found", CANCEL | {"flow_id": FLOW}),
    ),
    (
        *("POST", "/v1/workers/w-1/dead", {"reason": "lost", "revoke_leases": True}, 200),
        *("mark_worker_dead", "ok"),
        {"worker_instance_id": "w-1", "reason": "lost", "revoke_leases": True},
    ),
    (
        *("POST", "/v1/workers/w-1/dead", None, 200, "mark_worker_dead", "ok"),
        {"worker_instance_id": "w-1", "revoke_leases": False},
    ),
    (
        *("POST", "/v1/budgets", BUDGET, 201, "create_budget", "ok"),
        BUDGET | {"dimensions": ("tokens",), "hard_limits": (10,), "soft_limits": (5,)},
    ),
    (
        *("PUT", f"/v1/budgets/{UUID}", {"hard_limits": {"tokens": 20}}, 200),
        *("update_budget_limits", "ok", {"budget_id": UUID, "hard_limits": {"tokens": 20}}),
    ),
    (
        *("POST", f"/v1/budgets/{UUID}/usage", {"dimensions": {"tokens": 1}}, 200),
        *("report_usage_admin", "ok", {"budget_id": UUID, "dimensions": {"tokens": 1}}),
    ),
    (
        *("POST", f"{ENGINE}/record_spend", SPENT, 200, "record_spend", "ok"),
        {"budget_id": UUID, "execution_id": SPENDER, "deltas": {"tokens": 2}},
    ),
    (
        *("POST", f"{ENGINE}/release_budget", {"budget_id": UUID, "execution_id": SPENDER}, 200),
        *("release_budget", "ok", {"budget_id": UUID, "execution_id": SPENDER}),
    ),
]


async def test_every_operator_call_names_its_token_target_and_result(
    serve: Serving, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, stored = new_token("oncall", ["admin"], None)
    write_tokens(tmp_path / "tokens", [stored])
    await engine.backend.flows.create_flow(FLOW, "nightly")
    await engine.create(execution_id=SPENDER)
    async with serve(tokens_file=tmp_path / "tokens") as http:
        by = http.with_token(token)
        for method, path, body, status, op, code, target in OPERATOR_CALLS:
            caplog.clear()
            caplog.set_level(logging.INFO)
            answer = await by.send(method, path, body)
            assert answer.status == status, (path, answer.body)
            (told,) = [each for each in map(vars, recorded(caplog)) if "op" in each]
            assert (told["op"], told["code"], told["caller"]) == (op, code, "oncall")
            assert {name: told.get(name) for name in target} == target, op


async def test_the_goodbye_of_a_worker_is_not_the_call_of_an_operator(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await engine.backend.workers.mark_worker_dead("w-1", "default", "shutdown")
    assert recorded(caplog) == []


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b"{", 400, ""),
        (b'{"new_kid":7}', 422, "new_kid: expected str, got int"),
    ],
)
async def test_a_body_that_cannot_be_read_is_logged_at_debug(
    http: Http, caplog: pytest.LogCaptureFixture, body: bytes, status: int, detail: str
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric.server")
    path, kind = "/v1/admin/rotate-waitpoint-secret", {"content-type": "application/json"}
    assert (await http.send("POST", path, body, kind)).status == status
    (told,) = [each for each in map(vars, caplog.records) if each.get("action") == "body_rejected"]
    assert (told["levelname"], told["kind"]) == ("DEBUG", "invalid_input")
    assert (told["detail"], told["context"]) == (detail, path)


async def test_each_rotated_partition_is_logged_at_debug(
    http: Http, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    caplog.set_level(logging.DEBUG, "flowfabric")
    assert (await http.post("/v1/admin/rotate-waitpoint-secret", ROTATE)).status == 200
    told = [
        each for each in map(vars, caplog.records) if each.get("action") == "waitpoint_hmac_rotated"
    ]
    assert {each["levelname"] for each in told} == {"DEBUG"}
    assert {each["new_kid"] for each in told} == {"k2"}
    assert sorted(each["partition"] for each in told) == [*range(engine.backend.counts.flow)]
    assert not any(vars(each) in told for each in recorded(caplog))


async def test_a_rotation_outlives_its_request(
    http: Http,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    monkeypatch.setattr("flowfabric.server.routes.admin.ROTATION_TIMEOUT_S", 0.0)
    late = await http.post("/v1/admin/rotate-waitpoint-secret", ROTATE)
    assert late.kind == (504, "timeout")
    assert late.json["error"].startswith("rotation exceeded 0s server-side timeout; retry is safe")
    path = f"/v1/admin/rotations/{late.json['rotation_id']}"

    async def done() -> bool:
        return (await http.get(path)).json.get("status") == "done"

    await until(done, "the end of the rotation")
    state = (await http.get(path)).json
    assert (state["rotated"], state["failed"]) == (engine.backend.counts.flow, [])
    told = [vars(each) for each in recorded(caplog)]
    (timeout,) = [each for each in told if each["levelname"] == "ERROR"]
    assert timeout["action"] == "waitpoint_hmac_rotation_timeout_http_504"
    assert (timeout["new_kid"], timeout["timeout_s"]) == ("k2", 0.0)


@pytest.mark.corrupts
async def test_a_running_rotation_shows_its_counts(
    http: Http, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, everything = engine.backend, engine.backend.counts.flow
    await backend.secrets.seed_at_boot("ab" * 32)
    await backend.transport.call("DEL", keys.secrets("{fp:3}"))
    await backend.transport.call("SET", keys.secrets("{fp:3}"), "x")
    release, rotate = asyncio.Event(), ValkeySecrets._rotate
    stored: list[bytes] = []
    put = ValkeyNotes.put_note

    async def held(self: ValkeySecrets, partition: int, *args: Any) -> Rotation:
        if partition == 7:
            await release.wait()
        return await rotate(self, partition, *args)

    async def noted(self: ValkeyNotes, name: str, value: bytes, ttl_ms: int) -> None:
        stored.append(value)
        await put(self, name, value, ttl_ms)

    monkeypatch.setattr(ValkeySecrets, "_rotate", held)
    monkeypatch.setattr(ValkeyNotes, "put_note", noted)
    monkeypatch.setattr("flowfabric.server.routes.admin.ROTATION_TIMEOUT_S", 0.0)
    late = await http.post("/v1/admin/rotate-waitpoint-secret", ROTATE)
    path = f"/v1/admin/rotations/{late.json['rotation_id']}"

    async def seen(*counts: object) -> bool:
        state = (await http.get(path)).json
        fields = ("status", "rotated", "failed", "in_progress")
        return tuple(state.get(field) for field in fields) == counts

    await until(lambda: seen("running", everything - 2, [3], [7]), "all partitions but one")
    release.set()
    await until(lambda: seen("done", everything - 1, [3], []), "the end of the rotation")
    assert len(stored) < 10, "states are not stored once per partition"


async def test_one_rotation_at_a_time(
    http: Http, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.backend.secrets.seed_at_boot("ab" * 32)
    monkeypatch.setattr("flowfabric.server.routes.admin.ROTATION_TIMEOUT_S", 0.0)
    await engine.backend.transport.call("CLIENT", "PAUSE", 300, "WRITE")
    first = await http.post("/v1/admin/rotate-waitpoint-secret", ROTATE)
    assert first.status == 504
    second = await http.post("/v1/admin/rotate-waitpoint-secret", ROTATE)
    assert second.kind == (429, "resource_exhausted")
    assert "admin_rotate" in second.json["error"]
    await engine.backend.transport.call("CLIENT", "UNPAUSE")
