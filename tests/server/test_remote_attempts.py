"""Failing, delaying, suspending, output, progress and usage over HTTP."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import pytest

from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.ids import ExecutionId, budget_id, new_uuid
from tests.support.budgets import new_budget, used
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.proxy import FaultProxy
from tests.support.suspension import SECRET

ME = {"worker_instance_id": "w-1"}


async def take(http: Http, engine: Engine, **create: Any) -> tuple[ExecutionId, str]:
    """A claimed execution and its handle."""
    execution_id = await engine.create(**create)
    answer = await http.post("/v1/remote/claim", ME)
    (claim,) = answer.json["claims"]
    assert claim["execution_id"] == execution_id
    return execution_id, claim["handle"]


async def one(http: Http, name: str, **item: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/remote/{name}", {"items": [item]})
    assert answer.status == 200, answer.body
    (row,) = answer.json["results"]
    return row


async def lost(http: Http, name: str, **item: Any) -> None:
    """The call runs, and its answer is lost."""
    with FaultProxy(http.address) as proxy:
        proxy.drop_next_reply(f"/v1/remote/{name}".encode())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await Http(proxy.address).post(f"/v1/remote/{name}", {"items": [item]})


async def state(engine: Engine, execution_id: ExecutionId) -> str:
    return (await engine.backend.reads.read_execution_state(execution_id)).value


async def test_failing_follows_the_policy(http: Http, engine: Engine) -> None:
    retry = {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1000}}
    execution_id, handle = await take(http, engine, policy={"retry_policy": retry})
    await lost(http, "fail", handle=handle, reason="no route")
    row = await one(http, "fail", handle=handle, reason="no route")
    assert row["status"] == 200
    assert row["result"]["RetryScheduled"]["next_attempt_index"] == 1
    assert await state(engine, execution_id) == "delayed"
    final, handle = await take(http, engine)
    row = await one(http, "fail", handle=handle, reason="bad", category="permanent")
    assert row == {"status": 200, "result": "TerminalFailed"}
    assert await state(engine, final) == "failed"
    info = await engine.backend.reads.read_execution_info(final)
    assert (info.failure_reason, info.failure_category) == ("bad", "permanent")
    assert (await one(http, "fail", handle=handle))["status"] == 422


async def test_delaying(http: Http, engine: Engine) -> None:
    execution_id, handle = await take(http, engine)
    both = await one(http, "delay", handle=handle, delay_ms=5, delay_until=5)
    assert (both["status"], both["code"]) == (400, "invalid_input")
    assert (await one(http, "delay", handle=handle))["status"] == 400
    await lost(http, "delay", handle=handle, delay_ms=60_000)
    row = await one(http, "delay", handle=handle, delay_ms=60_000)
    assert row["result"] == {"Delayed": {"execution_id": execution_id, "public_state": "delayed"}}
    other, handle = await take(http, engine)
    row = await one(http, "delay", handle=handle, delay_until=0)
    assert row["result"]["Delayed"]["public_state"] == "waiting"
    (claim,) = (await http.post("/v1/remote/claim", ME)).json["claims"]
    assert (claim["execution_id"], claim["kind"], claim["attempt_index"]) == (other, "resumed", 0)


async def test_suspending_until_a_signal(http: Http, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    execution_id, handle = await take(http, engine)
    item = {
        "handle": handle,
        "waitpoint_key": "approval",
        "signal_name": "approved",
        "suspension_id": new_uuid(),
        "timeout_ms": 3_600_000,
        "prompt": "Deploy?",
    }
    await lost(http, "suspend", **item)
    answer = await http.post("/v1/remote/suspend", {"items": [item]})
    assert answer.headers["cache-control"] == "no-store"
    (row,) = answer.json["results"]
    details = row["result"]["Suspended"]
    assert details["suspension_id"] == item["suspension_id"]
    (waitpoint,) = details["waitpoints"]
    assert await state(engine, execution_id) == "suspended"
    signal = {
        "execution_id": execution_id,
        "waitpoint_id": waitpoint["waitpoint_id"],
        "signal_id": new_uuid(),
        "signal_name": "approved",
        "signal_category": "approval",
        "source_type": "user",
        "source_identity": "ada",
        "target_scope": "waitpoint",
        "waitpoint_token": waitpoint["waitpoint_token"],
        "payload_b64": b64encode(b'"yes"').decode(),
    }
    sent = await http.post(f"/v1/executions/{execution_id}/signal", signal)
    assert sent.json["Accepted"]["effect"] == "resume_condition_satisfied"
    (claim,) = (await http.post("/v1/remote/claim", ME)).json["claims"]
    assert claim["resume_cause"]["trigger"] == "signal"
    (received,) = claim["signals"]
    assert (received["signal_name"], received["payload_b64"]) == ("approved", "InllcyI=")


async def test_suspending_with_a_condition(http: Http, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    execution_id, handle = await take(http, engine)
    ids = [new_uuid(), new_uuid()]
    condition = {
        "Composite": {
            "kind": "Count",
            "n": 2,
            "count_kind": "DistinctWaitpoints",
            "waitpoints": ["a", "b"],
        }
    }
    for wrong in ({}, {"waitpoint_key": "k", "condition": condition}, {"condition": {"No": 1}}):
        row = await one(http, "suspend", handle=handle, **wrong)
        assert row["status"] == 400, row
    times = {"timeout_ms": 1, "timeout_at": 1}
    row = await one(http, "suspend", handle=handle, waitpoint_key="k", **times)
    assert row["detail"].startswith("timeout_ms: ")
    bindings = [
        {"waitpoint_id": each, "waitpoint_key": key}
        for each, key in zip(ids, ("a", "b"), strict=True)
    ]
    row = await one(http, "suspend", handle=handle, condition=condition, waitpoints=bindings)
    found = row["result"]["Suspended"]["waitpoints"]
    assert [each["waitpoint_id"] for each in found] == ids
    assert await state(engine, execution_id) == "suspended"


async def test_output_is_written_once(http: Http, engine: Engine) -> None:
    execution_id, handle = await take(http, engine)
    frames = [{"text": "hé", "frame_type": "log"}, {"payload": [255], "encoding": "binary"}]
    item = {"handle": handle, "frames": frames, "seq": 2}
    await lost(http, "frames", **item)
    row = await one(http, "frames", **item)
    assert row["result"]["Appended"]["duplicate"] is True
    third = {"handle": handle, "frames": [{"payload_b64": "eA=="}], "seq": 3}
    answer = await http.post("/v1/remote/frames", {"items": [third, third]})
    first, second = (each["result"]["Appended"] for each in answer.json["results"])
    assert (first["frame_count"], first["duplicate"], second["duplicate"]) == (3, False, True)
    page = await engine.backend.streams.read_stream(execution_id, 0)
    assert [frame.payload for frame in page.frames] == ["hé".encode(), b"\xff", b"x"]
    both = [{"text": "x", "payload": [1]}]
    about = {"handle": handle, "seq": 4}
    assert (await one(http, "frames", **about, frames=both))["status"] == 400
    assert (await one(http, "frames", **about, frames=[{"no": 1}]))["status"] == 400
    unnumbered = await one(http, "frames", handle=handle, frames=[{"text": "x"}])
    assert (unnumbered["status"], unnumbered["detail"]) == (422, "seq: missing")
    live = {"mode": "best_effort", "ttl_ms": 1000, "retention_maxlen": 10, "seq": 4}
    row = await one(http, "frames", handle=handle, frames=[{"text": "x"}], **live)
    assert row["status"] == 200


async def test_frames_of_a_resumed_attempt_are_no_repeats(http: Http, engine: Engine) -> None:
    """The stream goes on, and a worker that starts to count again starts above the last one."""
    execution_id = await engine.create()
    bases: list[int] = []
    for text in ("before", "after"):
        (claim,) = (await http.post("/v1/remote/claim", ME)).json["claims"]
        assert claim["attempt_index"] == 0
        bases.append(claim["seq_base"])
        item = {"frames": [{"text": text}], "seq": claim["seq_base"] + 1}
        row = await one(http, "frames", handle=claim["handle"], **item)
        assert row["result"]["Appended"]["duplicate"] is False
        await one(http, "delay", handle=claim["handle"], delay_ms=0)
    page = await engine.backend.streams.read_stream(execution_id, 0)
    assert [frame.text for frame in page.frames] == ["before", "after"]
    assert bases == [2**32, 2 * 2**32]


async def test_a_repeated_suspension_needs_no_id(http: Http, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    execution_id, handle = await take(http, engine)
    item = {"handle": handle, "waitpoint_key": "approval", "timeout_ms": 3_600_000}
    await lost(http, "suspend", **item)
    first, second = [(await one(http, "suspend", **item))["result"] for _ in range(2)]
    assert first == second
    (waitpoint,) = first["Suspended"]["waitpoints"]
    stored = await engine.backend.waitpoints.list_pending_waitpoints(execution_id)
    assert [each.waitpoint_id for each in stored.entries] == [waitpoint["waitpoint_id"]]
    # Something else is no repeat: the lease has been released.
    other = await one(http, "suspend", **item | {"waitpoint_key": "other"})
    assert (other["status"], other["code"]) == (409, "execution_not_active")


async def test_progress(http: Http, engine: Engine) -> None:
    execution_id, handle = await take(http, engine)
    assert await one(http, "progress", handle=handle, pct=40, message="half") == {
        "status": 200,
        "result": "Ok",
    }
    assert (await one(http, "progress", handle=handle, message="more"))["status"] == 200
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.progress_pct, info.progress_message) == (40, "more")
    assert (await one(http, "progress", handle=handle, pct=101))["status"] == 400


async def test_usage_is_counted_once(http: Http, engine: Engine) -> None:
    known = budget_id("team")
    await engine.backend.budgets.create_budget(
        NewBudget(
            budget_id=known,
            scope_type="team",
            scope_id="a",
            dimensions=("tokens",),
            hard_limits=(100,),
            soft_limits=(50,),
        )
    )
    _, handle = await take(http, engine)
    item = {"handle": handle, "budget": "team", "dimensions": {"tokens": 40}, "dedup_key": "a"}
    await lost(http, "usage", **item)
    assert (await one(http, "usage", **item))["result"] == "AlreadyApplied"
    by_id = item | {"budget": known, "dedup_key": "b"}
    soft = (await one(http, "usage", **by_id))["result"]["SoftBreach"]
    assert (soft["current_usage"], soft["action"]) == (80, "warn")
    hard = (await one(http, "usage", **item | {"dedup_key": "c"}))["result"]["HardBreach"]
    assert (hard["current_usage"], hard["action"]) == (80, "fail")
    row = await one(http, "usage", **item | {"budget": "unknown"})
    assert (row["status"], row["code"]) == (404, "budget_not_found")
    for key, problem in (({}, "dedup_key: missing"), ({"dedup_key": ""}, "dedup_key: ")):
        unnamed = {name: each for name, each in item.items() if name != "dedup_key"} | key
        row = await one(http, "usage", **unnamed)
        assert row["status"] == 422, row
        assert row["detail"].startswith(problem)


async def test_usage_counts_after_the_lease_is_lost(http: Http, engine: Engine) -> None:
    """It was spent all the same (07 §3)."""
    known = await new_budget(engine.backend, {"tokens": 100})
    execution_id, handle = await take(http, engine)
    await engine.backend.leases.revoke_lease(execution_id)
    item = {"budget": known, "dimensions": {"tokens": 40}, "dedup_key": "a"}
    assert await one(http, "usage", handle=handle, **item) == {"status": 200, "result": "Ok"}
    assert await used(engine.backend.budgets, known) == {"tokens": 40}


@pytest.mark.parametrize("name", ["fail", "delay", "suspend", "frames", "progress", "usage"])
async def test_items_are_checked_one_by_one(http: Http, engine: Engine, name: str) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    _, handle = await take(http, engine)
    fields: dict[str, Any] = {
        "fail": {"reason": "no"},
        "delay": {"delay_ms": 1},
        "suspend": {"waitpoint_key": "k"},
        "frames": {"frames": [{"text": "x"}], "seq": 1},
        "progress": {"pct": 1},
        "usage": {"budget": "none", "dimensions": {"a": 1}, "dedup_key": "k"},
    }[name]
    items = [{}, {"handle": "x", **fields}, {"handle": handle, **fields}]
    rows = (await http.post(f"/v1/remote/{name}", {"items": items})).json["results"]
    assert [row["status"] for row in rows[:2]] == [422, 400]
    assert rows[2]["status"] == (404 if name == "usage" else 200)
    assert (await http.post(f"/v1/remote/{name}", {"items": []})).status == 400
    assert (await http.post(f"/v1/remote/{name}", {})).status == 422
