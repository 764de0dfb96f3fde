"""replay_execution: every outcome runs again under the same id."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Replayed
from flowfabric.core.ids import new_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.engine import LANE, Engine, unchanged
from tests.support.executions import DEADLINE, TERMINAL, Case, promote
from tests.support.storage import indexes, raw, record


@pytest.mark.parametrize("state", TERMINAL)
async def test_every_outcome(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    before = await engine.backend.reads.read_execution_info(case.execution_id)
    ended = await engine.backend.reads.read_attempts(case.execution_id)
    outcome = await engine.backend.executions.replay_execution(
        case.execution_id, reason="again", requested_by="me"
    )
    assert outcome == Replayed(PublicState.WAITING)
    info = await engine.backend.reads.read_execution_info(case.execution_id)
    assert info.replay_count == 1
    assert (info.retry_count, info.lease_reclaim_count) == (0, 0)
    for gone in (
        *(info.completed_at, info.failure_reason, info.failure_category),
        *(info.cancellation_reason, info.cancelled_by, info.progress_pct, info.progress_message),
    ):
        assert gone is None
    assert await engine.backend.reads.get_execution_result(case.execution_id) is None
    assert (info.created_at, info.started_at) == (before.created_at, before.started_at)
    assert await engine.backend.reads.read_attempts(case.execution_id) == ended
    snapshot = await engine.backend.reads.describe_execution(case.execution_id)
    assert snapshot is not None
    assert snapshot.current_attempt is None
    claim = await engine.claim()
    assert claim.execution_id == case.execution_id
    assert claim.attempt_type == "replay" if ended else "initial"
    assert claim.attempt_index == len(ended)
    assert claim.handle.lease_epoch == len(ended) + 1
    attempt = (await engine.backend.reads.read_attempts(case.execution_id))[-1]
    assert attempt.attempt_type == "replay"
    assert (attempt.replay_reason, attempt.replay_requested_by) == ("again", "me")
    assert attempt.previous_attempt_index == (0 if ended else None)
    assert attempt.replayed_from_attempt_index == (0 if ended else None)
    assert [each.replayed_from_attempt_index for each in ended] == [None] * len(ended)
    stored = await record(engine, case.execution_id)
    assert not any(name.startswith("pending_") for name in stored)


async def test_an_archived_success_stores_no_failure_of_another(engine: Engine) -> None:
    policy = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}}
    handle = await engine.running(policy=policy)
    execution_id = handle.execution_id
    await engine.backend.executions.fail(handle, "boom", "transient")
    await promote(engine, execution_id)
    await engine.backend.executions.complete((await engine.claim()).handle)
    await engine.backend.executions.replay_execution(execution_id)
    stored = await raw(engine, keys.attempt(execution_id.tag, execution_id, 1))
    assert stored["attempt_state"] == "ended_success"
    assert stored["retry_reason"] == "boom"
    assert not {"failure_reason", "failure_category"} & set(stored)


@pytest.mark.parametrize("policy_duration", [None, DEADLINE])
async def test_deadlines(engine: Engine, policy_duration: int | None) -> None:
    policy = policy_duration and {"timeout_policy": {"execution_deadline_ms": policy_duration}}
    absolute = None if policy else await engine.now() + 60_000
    execution_id = await engine.create(policy=policy or None, execution_deadline_at=absolute)
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.advance(1000)
    now = await engine.now()
    await engine.backend.executions.replay_execution(execution_id)
    info = await engine.backend.reads.read_execution_info(execution_id)
    held = await indexes(engine, execution_id)
    if policy_duration is None:
        assert info.execution_deadline_at is None
        assert "execution_deadline" not in held
    else:
        assert info.execution_deadline_at is not None
        assert info.execution_deadline_at >= now + policy_duration
        assert held["execution_deadline"] == info.execution_deadline_at


async def test_steps_go_unless_kept(engine: Engine) -> None:
    execution_id = await engine.create()
    key = lua_keys.steps(execution_id.tag, execution_id)
    for keep in (True, False):
        await engine.backend.transport.call("HSET", key, "step", "1")
        await engine.backend.executions.cancel_execution(execution_id)
        await engine.backend.executions.replay_execution(execution_id, keep_steps=keep)
        assert await engine.backend.transport.call("EXISTS", key) == int(keep)


async def test_what_is_kept(engine: Engine) -> None:
    execution_id = await engine.create(
        input_payload=b"in" * 50, tags={"a.b": "c"}, policy={"max_replay_count": 5}
    )
    await engine.backend.executions.cancel_execution(execution_id)
    before = await engine.dump()
    await engine.backend.executions.replay_execution(execution_id)
    after = await engine.dump()
    for name in (keys.payload, keys.tags, keys.policy):
        key = name(execution_id.tag, execution_id).encode()
        assert after[key] == before[key]


async def test_a_paused_and_cancelled_one(engine: Engine) -> None:
    handle = await engine.running()
    await engine.block(handle.execution_id)
    await engine.backend.executions.wait_children(handle)
    await engine.backend.executions.cancel_execution(handle.execution_id)
    await engine.backend.executions.replay_execution(handle.execution_id)
    stored = await record(engine, handle.execution_id)
    assert not {"paused", "suspended_at", "attempt_timeout_remaining_ms"} & set(stored)
    assert list(await indexes(engine, handle.execution_id)) == [f"lane:{LANE}:eligible"]


# --- repeats ------------------------------------------------------------------------------------


async def _request(engine: Engine, execution_id: Any, request: str) -> Any:
    args = (execution_id, "", "", "", "0", request)
    reply = await engine.backend.calls.fcall(
        "ff_replay", execution_id.tag, args, op="replay_execution"
    )
    return reply[2]


async def test_the_same_request_is_carried_out_once(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    request = new_uuid()
    assert await _request(engine, execution_id, request) == b"waiting"
    assert await unchanged(engine, lambda: _request(engine, execution_id, request)) == b"waiting"
    # Even when the new run has ended before the repeat arrives.
    await engine.backend.executions.complete((await engine.claim()).handle)
    assert await unchanged(engine, lambda: _request(engine, execution_id, request)) == b"waiting"
    assert await _request(engine, execution_id, new_uuid()) == b"waiting"
    assert (await engine.backend.reads.read_execution_info(execution_id)).replay_count == 2


async def test_a_repeat_that_was_overtaken_has_no_effect(engine: Engine) -> None:
    """Its reply was lost, and others acted before it was sent again."""
    execution_id = await engine.create()

    async def request(function: str, *args: Any) -> list[Any]:
        return await engine.backend.calls.fcall(
            function, execution_id.tag, (execution_id, *args), op="t"
        )

    first = await request("ff_change_priority", 5, "a")
    await request("ff_change_priority", 9, "b")
    assert await request("ff_change_priority", 5, "a") == first
    assert (await engine.backend.reads.read_execution_info(execution_id)).priority == 9
    for name in ("c", "d"):
        await engine.backend.executions.cancel_execution(execution_id)
        await request("ff_replay", "", "", "", "0", name)
    await engine.backend.executions.cancel_execution(execution_id)
    await request("ff_replay", "", "", "", "0", "c")
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.replay_count, info.public_state.value) == (2, "cancelled")


@pytest.mark.corrupts
async def test_an_unreadable_policy(engine: Engine) -> None:
    execution_id = await engine.create(policy={"max_replay_count": 5})
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.transport.call("SET", keys.policy(execution_id.tag, execution_id), "{")
    answer = await unchanged(
        engine, lambda: engine.backend.executions.replay_execution(execution_id)
    )
    assert answer.code == "corruption"
