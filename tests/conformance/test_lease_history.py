"""What remains of leases: the feed, the short history, the index by worker (03 §14, 12 §11)."""

from __future__ import annotations

from typing import Any

from tests.support.engine import TTL, Engine, refused
from tests.support.leases import event_types, mark, paused, reclaim, running

RETRY: dict[str, Any] = {
    "max_reclaim_count": 1000,
    "retry_policy": {"max_retries": 50, "backoff": {"type": "fixed", "delay_ms": 5}},
}


async def test_the_feed_tells_the_life_of_an_execution_in_order(engine: Engine) -> None:
    handle = await running(engine, policy=RETRY)
    execution_id = handle.execution_id
    await engine.backend.executions.delay(handle, 1)
    resumed = (await engine.claim()).handle
    await engine.backend.executions.fail(resumed, "boom", "transient")
    await engine.advance(10)
    await engine.backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    retried = (await engine.claim()).handle
    await engine.advance(TTL + 1)
    await mark(engine, [execution_id])
    reclaimed = (await reclaim(engine, execution_id)).handle
    await engine.backend.leases.revoke_lease(execution_id, reason="ops")
    again = (await reclaim(engine, execution_id)).handle
    await engine.backend.executions.complete(again, b"r")
    await engine.backend.executions.replay_execution(execution_id, requested_by="me")
    events = await engine.events(execution_id)
    assert [(event.type, event.get("reason")) for event in events] == [
        ("acquired", None),
        ("released", "worker_delay"),
        ("acquired", "claim_resumed"),
        ("released", "failed_retry_scheduled"),
        ("acquired", None),
        ("expired", None),
        ("reclaimed", None),
        ("revoked", "ops"),
        ("reclaimed", None),
        ("completion", "completed"),
        ("replayed", None),
    ]
    epochs = [event.get("lease_epoch") or event.get("new_lease_epoch") for event in events]
    assert epochs == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, None]
    assert (events[6].get("old_lease_epoch"), events[8].get("old_lease_epoch")) == (3, 4)
    completion = events[9]
    assert completion.get("lease_id") == again.lease_id
    assert completion.get("worker_instance_id") == "v-1"
    assert completion.get("result_ref") is True
    times = [event.at for event in events]
    assert times == sorted(times)
    assert {retried.attempt_index, reclaimed.attempt_index} == {1, 2}

    history = await engine.backend.reads.read_execution_history(execution_id)
    assert [event.type for event in history] == [
        "released",
        "expired",
        "reclaimed",
        "revoked",
        "reclaimed",
        "replayed",
    ]
    unusual = [event for event in events if event.event_id in {e.event_id for e in history}]
    assert history == unusual


async def test_a_pause_is_not_unusual(engine: Engine) -> None:
    handle = await paused(engine)
    assert await engine.backend.reads.read_execution_history(handle.execution_id) == []


async def test_history_keeps_the_newest_32(engine: Engine) -> None:
    handle = await running(engine, policy=RETRY)
    execution_id = handle.execution_id
    for _ in range(20):
        await engine.backend.leases.revoke_lease(execution_id)
        await reclaim(engine, execution_id)
    history = await engine.backend.reads.read_execution_history(execution_id)
    assert [event.type for event in history] == ["revoked", "reclaimed"] * 16
    assert history[-1].get("new_lease_epoch") == 21
    assert history[-1].event_id == (await engine.events(execution_id))[-1].event_id


async def test_history_reads_a_delay_of_any_size(engine: Engine) -> None:
    policy = {
        "retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 2**53 - 1}}
    }
    handle = await running(engine, policy=policy)
    outcome = await engine.backend.executions.fail(handle, "boom", "transient")
    assert outcome.kind == "retry_scheduled"
    (event,) = await engine.backend.reads.read_execution_history(handle.execution_id)
    (told,) = [e for e in await engine.events(handle.execution_id) if e.type == "released"]
    assert event == told
    assert event.get("delay_until") == outcome.delay_until


async def test_history_of_an_unknown_execution(engine: Engine) -> None:
    await refused(
        engine.backend.reads.read_execution_history(engine.new_id()), "execution_not_found"
    )


async def test_refusals_and_repeats_append_nothing(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    for _ in range(2):
        await engine.backend.executions.complete(handle)
        await refused(engine.backend.executions.fail(handle, "r", "c"), "execution_not_active")
        await refused(engine.backend.leases.renew(handle), "execution_not_active")
    assert await event_types(engine, handle.execution_id) == ["acquired", "completion"]
