"""`flowfabric show`: what it tells in each situation, and how it finds the execution."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flowfabric.core.contracts.steps import StepError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from tests.support.command import Cli
from tests.support.engine import Engine

RETRY = {"retry_policy": {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 3_600_000}}}


def named(uuid: str, lane: str = "default") -> ExecutionId:
    return ExecutionId.deterministic_solo(lane, uuid, PartitionCounts())


async def shown(cli: Cli, execution_id: str, *more: str) -> str:
    done = await cli("show", execution_id, *more)
    assert (done.code, done.err) == (0, "")
    return done.out


async def as_json(cli: Cli, execution_id: str, *more: str) -> dict[str, Any]:
    done = await cli("show", execution_id, "--json", *more)
    assert (done.code, done.err) == (0, "")
    (detail,) = done.objects
    return detail


async def test_a_finished_execution_in_full(cli: Cli, engine: Engine) -> None:
    handle = await engine.running(
        execution_kind="resize",
        input_payload=b'["cat.png"]',
        payload_encoding="json",
        tags={"app.team": "images"},
        policy=RETRY,
        priority=3,
    )
    await engine.backend.executions.complete(handle, b'"cat-small.png"', "json")
    out = await shown(cli, handle.execution_id)
    first, second, *_ = out.splitlines()
    assert first == "resize  completed"
    assert second == handle.execution_id.compact
    for pattern in (
        r"lane +default",
        r"priority +3",
        r"lifecycle +terminal",
        r"outcome +success",
        r"1 +initial +ended_success +w-1 +20",
        r"app\.team +images",
        r'"max_retries": 2',
        r"Payload \(11 bytes, json\)\n  \[\"cat\.png\"\]\n",
        r"Result \(15 bytes, json\)\n  \"cat-small\.png\"\n",
    ):
        assert re.search(pattern, out), pattern
    assert "Why it is not running" not in out
    detail = await as_json(cli, handle.execution_id)
    assert detail["execution"]["state"] == "completed"
    assert detail["tags"] == {"app.team": "images"}
    assert detail["policy"]["retry_policy"]["max_retries"] == 2
    assert detail["policy"]["max_replay_count"] == 10
    assert "delay_until" not in detail["policy"]
    assert "Policy (without defaults; --full shows all)" in out
    assert "max_replay_count" not in out
    assert '"max_replay_count": 10' in await shown(cli, handle.execution_id, "--full")
    assert [a["attempt_state"] for a in detail["attempts"]] == ["ended_success"]
    assert detail["result"] == {
        "size": 15,
        "encoding": "json",
        "form": "text",
        "preview": '"cat-small.png"',
        "truncated": False,
    }
    assert detail["why_not_running"] is None


async def test_a_failed_attempt_waits_for_its_retry(cli: Cli, engine: Engine) -> None:
    handle = await engine.running(policy=RETRY)
    await engine.backend.executions.fail(handle, "ValueError: no\nmore lines", "handler_error")
    out = await shown(cli, handle.execution_id)
    assert re.search(
        r"Why it is not running: the last attempt failed \(ValueError: no\); .* \(in (59m|1h)", out
    )
    assert re.search(r"1 +initial +ended_failure +.*ValueError: no \(handler_error\)\n", out)
    assert re.search(r"released +failed_retry_scheduled, worker w-1, until", out)
    assert "Failure\n  ValueError: no\n  more lines\n" in out


async def test_why_it_waits_for_a_worker(cli: Cli, engine: Engine) -> None:
    needs = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    waiting = await engine.create(lane="video", policy=needs)
    out = await shown(cli, waiting)
    assert 'no live worker serves lane "video" and offers gpu' in out
    assert "--capabilities gpu" in out
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-9", lanes=["video"], capabilities=["gpu"]
    )
    detail = await as_json(cli, waiting)
    assert detail["workers_of_lane"] == ["w-9"]
    assert (
        detail["summary"]
        == '1 live worker serves lane "video"; it starts as soon as this worker is free'
    )
    await engine.backend.lanes.set_lane_state("video", "paused")
    assert 'lane "video" is paused' in await shown(cli, waiting)


async def test_which_capability_keeps_it_waiting(cli: Cli, engine: Engine) -> None:
    needs = {"routing_requirements": {"required_capabilities": ["cuda", "gpu"]}}
    waiting = await engine.create(lane="video", policy=needs)
    for instance, offers in (("w-1", []), ("w-2", ["gpu"])):
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["video"], capabilities=offers
        )
    detail = await as_json(cli, waiting)
    assert detail["summary"] == (
        '2 live workers serve lane "video", but the closest match lacks cuda (w-2). '
        "Start one with `flowfabric worker module:app --lanes video --capabilities cuda,gpu`"
    )
    assert detail["why_not_running"]["missing_capabilities"] == ["cuda"]


async def test_a_running_one_and_a_lost_one(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    out = await shown(cli, handle.execution_id)
    assert re.search(r"worker +w-1\n +lease +epoch 1, for another [12]?[0-9]", out)
    assert "Why it is not running" not in out
    await engine.backend.leases.revoke_lease(handle.execution_id, reason="test")
    assert "the lease of w-1 was revoked" in await shown(cli, handle.execution_id)


async def test_binary_and_long_payloads_are_shortened(cli: Cli, engine: Engine) -> None:
    binary = await engine.create(input_payload=b"\xff\x00" * 500)
    out = await shown(cli, binary)
    assert "Payload (1,000 bytes, binary, shortened; --full shows all)" in out
    assert "  ff00 ff00" in out
    assert len(max(out.splitlines(), key=len)) < 200
    assert (await as_json(cli, binary, "--full"))["payload"]["preview"].count("ff00") == 500
    text = "é" * 1000
    long = await engine.create(input_payload=text.encode())
    detail = await as_json(cli, long)
    assert detail["payload"]["truncated"] is True
    assert detail["payload"]["preview"] == text[:400]
    assert text in await shown(cli, long, "--full")


async def test_an_id_may_be_shortened_while_it_is_unique(cli: Cli, engine: Engine) -> None:
    one = named("aaaa1111-0000-4000-8000-000000000001")
    two = named("aaaa2222-0000-4000-8000-000000000002", "mails")
    await engine.create(execution_id=one, execution_kind="first")
    await engine.create(execution_id=two, execution_kind="second", lane="mails")
    index = one.partition
    for text in (one, one.compact, one.uuid, "AAAA1", f"{index}-AAAA1", f"{index}-aaaa1111…"):
        assert (await shown(cli, text)).splitlines()[1] == one.compact
    done = await cli("show", "aaaa")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ambiguous_id: more than one id starts with 'aaaa':")
    assert f"\n  {one.compact}  first  waiting\n" in done.err
    assert f"\n  {two.compact}  second  waiting\n" in done.err
    found = await cli("show", "aaaa", "--json")
    assert found.error["code"] == "ambiguous_id"
    assert set(found.error["details"]) == {one, two}


async def test_a_namespace_narrows_the_search(cli: Cli, engine: Engine) -> None:
    one = named("aaaa1111-0000-4000-8000-000000000001")
    two = named("aaaa2222-0000-4000-8000-000000000002")
    await engine.create(execution_id=one, namespace="a")
    await engine.create(execution_id=two, namespace="b")
    assert (await shown(cli, "aaaa", "--namespace", "b")).splitlines()[1] == two.compact
    refused = await cli("show", one, "--namespace", "b")
    assert refused.code == 1
    assert refused.err.startswith("error: execution_not_found: no execution in namespace b has ")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("deadbeef", 1, "execution_not_found: no execution has an id that starts with"),
        ("11111111-2222-4333-8444-555555555555", 1, "execution_not_found: no execution has the id"),
        (
            "{fp:1}:11111111-2222-4333-8444-555555555555",
            1,
            "execution_not_found: no execution has the id '1-1111",
        ),
        (
            "{fp:999}:11111111-2222-4333-8444-555555555555",
            2,
            "invalid_input: execution_id: partition",
        ),
        ("{fp:1}:1111", 2, "invalid_input: execution_id: InvalidUuid: '{fp:1}:1111' (a UUID has"),
        ("abc", 2, "invalid_input: execution_id: 'abc' is too short"),
        ("not-an-id", 2, "invalid_input: execution_id: 'not-an-id' is neither an execution id nor"),
        ("42-1111", 1, "execution_not_found: no execution has an id that starts with '42-1111'"),
        ("999-1111", 2, "invalid_input: partition: must be a whole number from 0 to 255"),
    ],
)
async def test_ids_that_lead_nowhere(cli: Cli, text: str, code: int, said: str) -> None:
    done = await cli("show", text)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"error: {said}")
    assert "\nhint: " in done.err


async def test_explain_answers_in_a_sentence_and_names_the_way_out(
    cli: Cli, engine: Engine
) -> None:
    waiting = await engine.create(lane="video")
    done = await cli("explain", waiting.compact)
    command = "flowfabric worker module:app --lanes video"
    assert done.code == 0
    assert f'It is waiting: no live worker serves lane "video". Start one with `{command}`.' in (
        done.lines
    )
    assert done.lines[-1].strip() == command
    found: Any = json.loads((await cli("explain", waiting.compact, "--json")).lines[0])
    assert found["next_steps"] == [command]
    assert found["why"]["blocking_reason"] == "waiting_for_worker"


async def test_recorded_steps(cli: Cli, engine: Engine) -> None:
    handle, child = await engine.running(), engine.new_id()
    record, eid = engine.backend.steps.record_step, handle.execution_id
    assert "Steps" not in await shown(cli, eid)
    assert (await as_json(cli, eid))["steps"] == []
    await record(eid, handle, "fetch", result=b'{"rows": 12}', codec="json", took_ms=1500)
    await record(
        eid, handle, "send", status="failed", error=StepError("refused\nmore", "transient")
    )
    await record(eid, handle, "nap", kind="timer", status="pending", fire_in_ms=1000)
    await record(eid, handle, "sub", kind="child", status="pending", child_execution_id=child)
    await record(eid, handle, "blob", result=b"\xff" * 600)
    text = await shown(cli, eid)
    section = text[text.index("Steps") : text.index("Attempts")]
    lines = [line.split() for line in section.splitlines() if line.strip()]
    found = {line[1]: line for line in lines[2:]}
    assert found["fetch"][2:5] == ["step", "done", "1"]
    assert found["fetch"][-3:] == ["s", '{"rows":', "12}"]
    assert found["send"][-2:] == ["refused", "(transient)"]
    assert "due" in found["nap"]
    assert found["sub"][-1] == child.compact
    assert found["blob"][-1] == "…"
    detail = await as_json(cli, eid)
    assert detail["more_steps"] is False
    first, failed, *_, blob = detail["steps"]
    assert (first["step_key"], first["result"]["preview"]) == ("fetch", '{"rows": 12}')
    assert failed["error"] == {"reason": "refused\nmore", "category": "transient"}
    assert (blob["result"]["size"], blob["result"]["truncated"]) == (600, True)
    assert (await as_json(cli, eid, "--full"))["steps"][-1]["result"]["truncated"] is False


async def test_many_steps_are_cut_unless_all_are_asked_for(cli: Cli, engine: Engine) -> None:
    handle = await engine.running()
    for n in range(51):
        await engine.backend.steps.record_step(handle.execution_id, handle, f"k{n}")
    assert "Steps (the first ones; --full shows all)" in await shown(cli, handle.execution_id)
    detail = await as_json(cli, handle.execution_id)
    assert (len(detail["steps"]), detail["more_steps"]) == (50, True)
    detail = await as_json(cli, handle.execution_id, "--full")
    assert (len(detail["steps"]), detail["more_steps"]) == (51, False)
