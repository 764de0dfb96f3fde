"""The audit log of API calls, and rotations that take longer than their request."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.server.auth import new_token, write_tokens
from tests.server.conftest import Serving
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.sdk import until
from tests.support.suspension import GO, Waits

UUID = "11111111-2222-4333-8444-555555555555"
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
