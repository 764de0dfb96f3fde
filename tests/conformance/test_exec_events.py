"""The event feed and the short history: one entry per transition, with its fields."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.api.events import Event
from tests.support.engine import TTL, Engine, refused
from tests.support.executions import BACKOFF, TERMINAL, Case, expire_deadline, mark, promote


def lease(case_handle: Any) -> dict[str, Any]:
    return {
        "lease_id": case_handle.lease_id,
        "lease_epoch": case_handle.lease_epoch,
        "attempt_id": case_handle.attempt_id,
        "attempt_index": case_handle.attempt_index,
        "worker_id": "w",
        "worker_instance_id": "w-1",
    }


async def last(engine: Engine, case: Case) -> Event:
    return (await engine.events(case.execution_id))[-1]


@pytest.mark.parametrize("state", TERMINAL)
async def test_completion(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    completions = [e for e in await engine.events(case.execution_id) if e.type == "completion"]
    assert len(completions) == 1
    (event,) = completions
    info = await engine.backend.reads.read_execution_info(case.execution_id)
    assert event.at == pytest.approx(int(info.completed_at or 0), abs=1000)
    expected: dict[str, dict[str, Any]] = {
        "completed": {"outcome": "success", "reason": "completed", "result_ref": True},
        "failed": {
            "outcome": "failed",
            "reason": "failed_terminal",
            "failure_category": "permanent",
        },
        "cancelled": {
            "outcome": "cancelled",
            "reason": "cancelled",
            "source": "operator_override",
        },
        "expired": {
            "outcome": "expired",
            "reason": "expired:attempt_timeout",
            "failure_category": "timeout",
        },
        "cancelled_early": {
            "outcome": "cancelled",
            "reason": "cancelled",
            "source": "operator_override",
        },
        "expired_early": {
            "outcome": "expired",
            "reason": "expired:execution_deadline",
            "failure_category": "timeout",
        },
    }
    held = {} if case.handle is None else lease(case.handle)
    assert event.fields == {**expected[state], **held}


async def test_common_fields(engine: Engine) -> None:
    execution_id = await engine.create(lane="x", namespace="tenant", execution_kind="mail")
    before = await engine.now()
    await engine.backend.executions.cancel_execution(execution_id)
    (event,) = await engine.events(execution_id)
    assert (event.execution_id, event.namespace) == (execution_id, "tenant")
    assert (event.lane_id, event.execution_kind) == ("x", "mail")
    assert before <= event.at <= await engine.now()
    assert event.event_id.startswith(f"fp:{execution_id.partition}/")


async def test_a_whole_life_in_order(engine: Engine) -> None:
    case = await Case.make(engine, "retry_waiting")
    backend, execution_id = engine.backend, case.execution_id
    first = case.held
    await case.claim()
    second = case.held
    until = await engine.now() + 500
    await backend.executions.delay(second, until)
    await engine.advance(500)
    await promote(engine, execution_id)
    await case.claim()
    third = case.held
    await engine.advance(TTL)
    await mark(engine, execution_id)
    await case.claim()
    fourth = case.held
    await backend.leases.revoke_lease(execution_id, reason="why")
    await case.claim()
    await engine.block(execution_id)
    await backend.executions.wait_children(case.held)
    await backend.executions.cancel_execution(execution_id, "enough")
    await backend.executions.replay_execution(execution_id, requested_by="me")
    await backend.executions.change_priority(execution_id, 3)
    found = await engine.events(execution_id)
    assert [event.type for event in found] == [
        *("acquired", "released"),
        *("acquired", "released"),
        *("acquired", "expired"),
        *("reclaimed", "revoked"),
        *("reclaimed", "released"),
        *("completion", "replayed", "priority_changed"),
    ]
    assert found[0].fields == {**lease(first), "attempt_type": "initial"}
    assert found[1].fields == {
        **lease(first),
        "reason": "failed_retry_scheduled",
        "delay_until": found[1].get("delay_until"),
    }
    assert found[1].get("delay_until") == pytest.approx(found[1].at + BACKOFF, abs=50)
    assert found[2].fields == {**lease(second), "attempt_type": "retry"}
    assert found[3].fields == {**lease(second), "reason": "worker_delay", "delay_until": until}
    assert found[4].fields == {
        **lease(third),
        "attempt_type": "retry",
        "reason": "claim_resumed",
    }
    assert found[5].fields == lease(third)
    assert found[6].fields == {
        "old_lease_epoch": third.lease_epoch,
        "new_lease_id": fourth.lease_id,
        "new_lease_epoch": third.lease_epoch + 1,
        "new_attempt_id": fourth.attempt_id,
        "new_attempt_index": 2,
        "worker_id": "w",
        "worker_instance_id": "w-1",
    }
    assert found[7].fields == {**lease(fourth), "reason": "why", "revoked_by": "operator"}
    assert found[9].get("reason") == "waiting_children"
    # Cancelled while parked: no lease ended, so none is named.
    assert found[10].get("lease_id") is None
    assert found[10].get("attempt_id") == case.held.attempt_id
    assert found[11].fields == {"branch": "normal", "replay_count": 1, "requested_by": "me"}
    assert found[12].fields == {"old_priority": 0, "new_priority": 3}
    history = await backend.reads.read_execution_history(execution_id)
    unusual = {"expired", "revoked", "reclaimed", "replayed"}
    assert history == [
        event
        for event in found
        if event.type in unusual or event.get("reason") == "failed_retry_scheduled"
    ]


async def test_what_is_no_event(engine: Engine) -> None:
    execution_id = await engine.create(delay_until=await engine.now() + 100)
    await engine.advance(100)
    await promote(engine, execution_id)
    await engine.backend.executions.set_execution_tag(execution_id, "a.b", "c")
    handle = (await engine.claim()).handle
    await engine.backend.leases.renew(handle)
    await engine.backend.executions.progress(handle, 5)
    await engine.backend.executions.wait_children(handle)
    assert [event.type for event in await engine.events(execution_id)] == ["acquired"]
    assert await engine.backend.reads.read_execution_history(execution_id) == []


async def test_refused_calls_append_nothing(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    before = await engine.events(handle.execution_id)
    await engine.backend.executions.complete(handle)
    await refused(
        engine.backend.executions.cancel_execution(handle.execution_id), "execution_not_active"
    )
    await refused(engine.backend.executions.fail(handle, "x", "y"), "execution_not_active")
    assert await expire_deadline(engine, handle.execution_id) == "already_terminal"
    assert await engine.events(handle.execution_id) == before


async def test_history_keeps_the_newest_32(engine: Engine) -> None:
    execution_id = await engine.create(policy={"max_replay_count": 100})
    for _ in range(40):
        await engine.backend.executions.cancel_execution(execution_id)
        await engine.backend.executions.replay_execution(execution_id)
    history = await engine.backend.reads.read_execution_history(execution_id)
    assert [event.get("replay_count") for event in history] == list(range(9, 41))
    assert history == [e for e in await engine.events(execution_id) if e.type == "replayed"][8:]


@pytest.mark.parametrize("states", [("completed", "cancelled", "failed")])
async def test_each_run_completes_once(engine: Engine, states: tuple[str, ...]) -> None:
    execution_id = await engine.create()
    for n, state in enumerate(states):
        handle = (await engine.claim()).handle
        if state == "completed":
            await engine.backend.executions.complete(handle)
        elif state == "failed":
            await engine.backend.executions.fail(handle, "x", "permanent")
        else:
            await engine.backend.executions.cancel(handle)
        completions = [e for e in await engine.events(execution_id) if e.type == "completion"]
        assert len(completions) == n + 1
        assert completions[-1].get("attempt_index") == n
        await engine.backend.executions.replay_execution(execution_id)


async def test_a_worker_as_source(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.cancel(handle, "x")
    event = (await engine.events(handle.execution_id))[-1]
    assert event.get("source") == "worker"


async def test_entry_order_is_commit_order(engine: Engine) -> None:
    first, second = await engine.create(), await engine.create()
    await engine.claim_all(2)
    await engine.backend.executions.cancel_execution(second)
    await engine.backend.executions.cancel_execution(first)
    one = (await engine.events(first))[-1]
    two = (await engine.events(second))[-1]
    assert _position(two) < _position(one)


def _position(event: Event) -> tuple[int, int]:
    ms, _, sequence = event.event_id.partition("/")[2].partition("-")
    return int(ms), int(sequence)


async def test_a_completion_carries_the_tags(engine: Engine) -> None:
    tags = {"Any Key": 'ü\x00"', "app.a": ""}
    handle = await engine.running(tags=tags)
    await engine.backend.executions.set_execution_tag(handle.execution_id, "app.late", "1")
    await engine.backend.executions.complete(handle)
    acquired, completed = await engine.events(handle.execution_id)
    assert completed.tags == tags | {"app.late": "1"}
    assert acquired.tags is None
    # Of an execution that never ran, too.
    waiting = await engine.create(tags=tags)
    await engine.backend.executions.cancel_execution(waiting)
    (cancelled,) = await engine.events(waiting)
    assert (cancelled.tags, cancelled.get("source")) == (tags, "operator_override")
    # Many would fill the feed.
    handle = await engine.running(tags={"app.long": "x" * 4096})
    await engine.backend.executions.complete(handle)
    assert (await engine.events(handle.execution_id))[-1].tags is None
