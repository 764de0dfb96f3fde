"""What remains of leases: the feed, the short history, the index by worker (03 §14, 12 §11)."""

from __future__ import annotations

from typing import Any

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.engine.mutation import mutated, private_engine, private_server
from tests.engine.probes import (
    event_types,
    lapsed,
    mark,
    paused,
    placed,
    reclaim,
    refused,
    running,
)
from tests.support.engine import TTL, Engine

__all__ = ["private_engine", "private_server"]

RETRY: dict[str, Any] = {
    "max_reclaim_count": 1000,
    "retry_policy": {"max_retries": 50, "backoff": {"type": "fixed", "delay_ms": 5}},
}


async def leased_by(engine: Engine, execution_id: ExecutionId) -> set[str]:
    return {name for name in await placed(engine, execution_id) if name.startswith("worker:")}


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


async def test_a_further_field_in_front_hides_no_release(private_engine: Engine) -> None:
    engine = private_engine
    code = mutated("lib/60_events.lua", "'w', rec.worker, ...)", "'w', rec.worker, 'x', '1', ...)")
    await engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)
    handle = await running(engine, policy=RETRY)
    await engine.backend.executions.fail(handle, "boom", "transient")
    (event,) = await engine.backend.reads.read_execution_history(handle.execution_id)
    assert (event.type, event.get("reason")) == ("released", "failed_retry_scheduled")
    assert event.get("x") == "1"


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
        "execution_not_found", engine.backend.reads.read_execution_history(engine.new_id())
    )


async def test_refusals_and_repeats_append_nothing(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    for _ in range(2):
        await engine.backend.executions.complete(handle)
        await refused("execution_not_active", engine.backend.executions.fail(handle, "r", "c"))
        await refused("execution_not_active", engine.backend.leases.renew(handle))
    assert await event_types(engine, handle.execution_id) == ["acquired", "completion"]


async def test_the_worker_index_follows_the_recorded_owner(engine: Engine) -> None:
    handle = await running(engine)
    execution_id = handle.execution_id
    assert await leased_by(engine, execution_id) == {"worker:w-1:leases"}
    await engine.advance(TTL + 1)
    await mark(engine, [execution_id])
    # The set still says who lost it.
    assert await leased_by(engine, execution_id) == {"worker:w-1:leases"}
    await reclaim(engine, execution_id)
    assert await leased_by(engine, execution_id) == {"worker:v-1:leases"}
    await engine.backend.leases.revoke_lease(execution_id)
    assert await leased_by(engine, execution_id) == set()
    claim = await engine.claim(worker="u", instance="u-1")
    assert await leased_by(engine, execution_id) == {"worker:u-1:leases"}
    await engine.backend.executions.delay(claim.handle, 1)
    assert await leased_by(engine, execution_id) == set()
    claim = await engine.claim(worker="u", instance="u-2")
    assert await leased_by(engine, execution_id) == {"worker:u-2:leases"}
    # Ended by somebody else: the recorded owner's entry goes.
    await engine.backend.executions.cancel_execution(execution_id)
    assert await leased_by(engine, execution_id) == set()


async def test_a_lost_execution_that_ends_leaves_its_losers_index(engine: Engine) -> None:
    handle = await lapsed(engine)
    await engine.backend.executions.cancel_execution(handle.execution_id)
    assert await leased_by(engine, handle.execution_id) == set()
    index = keys.worker_leases(handle.execution_id.tag, "w-1")
    assert await engine.backend.transport.call("EXISTS", index) == 0
