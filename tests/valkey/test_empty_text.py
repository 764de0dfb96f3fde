"""No empty text is stored: an absent field says the same, and takes no room (01, conventions).

After every test of this folder the whole keyspace is searched for empty fields.
"""

from __future__ import annotations

from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.executions import BACKOFF, POLICY, promote
from tests.support.leases import WORKER, reclaim
from tests.support.storage import record


async def test_a_failure_without_words_leaves_nothing_of_the_one_before(engine: Engine) -> None:
    backend = engine.backend
    first = await engine.running(policy=POLICY)
    execution_id = first.execution_id
    await backend.executions.fail(first, "boom", "transient")
    await engine.advance(BACKOFF)
    assert await promote(engine, execution_id) == "promoted"
    await backend.executions.fail((await engine.claim()).handle, "", "")
    assert "failure_reason" not in await record(engine, execution_id)
    info = await backend.reads.read_execution_info(execution_id)
    assert (info.failure_reason, info.failure_category) == (None, None)
    await engine.advance(BACKOFF)
    assert await promote(engine, execution_id) == "promoted"
    third = (await engine.claim()).handle
    attempts = await backend.reads.read_attempts(execution_id)
    assert [attempt.failure_reason for attempt in attempts] == ["boom", None, None]
    assert [attempt.failure_category for attempt in attempts] == ["transient", None, None]
    assert [attempt.retry_reason for attempt in attempts] == [None, "boom", None]
    await backend.executions.fail(third, "broken", "permanent")
    assert (await backend.reads.read_execution_info(execution_id)).failure_reason == "broken"


async def test_a_final_failure_without_words(engine: Engine) -> None:
    backend = engine.backend
    handle = await engine.running()
    await backend.executions.fail(handle, "", "")
    assert (await backend.executions.fail(handle, "", "")).kind == "terminal_failed", "a repeat"
    stored = await record(engine, handle.execution_id)
    assert {"failure_reason", "failure_category"}.isdisjoint(stored)
    (attempt,) = await backend.reads.read_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_failure", None)
    event = (await engine.events(handle.execution_id))[-1]
    assert (event.get("outcome"), event.get("failure_category")) == ("failed", None)
    await backend.executions.replay_execution(handle.execution_id)
    (archived,) = await backend.reads.read_attempts(handle.execution_id)
    assert (archived.attempt_state, archived.failure_reason) == ("ended_failure", None)


async def test_a_cancellation_without_a_reason(engine: Engine) -> None:
    backend = engine.backend
    handle = await engine.running()
    await backend.executions.cancel_execution(handle.execution_id)
    stored = await record(engine, handle.execution_id)
    assert "cancellation_reason" not in stored
    assert stored["cancelled_by"] == "operator_override"
    info = await backend.reads.read_execution_info(handle.execution_id)
    assert (info.cancellation_reason, info.cancelled_by) == (None, "operator_override")
    before = await backend.reads.read_attempts(handle.execution_id)
    await backend.executions.replay_execution(handle.execution_id)
    (after,) = await backend.reads.read_attempts(handle.execution_id)
    assert [after.failure_reason] == [attempt.failure_reason for attempt in before]


async def test_a_cancellation_without_a_source(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.cancel_execution(handle.execution_id, source="", fence=handle)
    assert "cancelled_by" not in await record(engine, handle.execution_id)


async def test_a_revocation_without_a_reason(engine: Engine) -> None:
    backend = engine.backend
    handle = await engine.running()
    await backend.leases.revoke_lease(handle.execution_id, reason="", revoked_by="")
    stored = await record(engine, handle.execution_id)
    assert "lease_revoke_reason" not in stored
    assert stored["blocking_detail"] == "lease revoked"
    await reclaim(engine, handle.execution_id)
    first, _ = await backend.reads.read_attempts(handle.execution_id)
    assert first.failure_reason == "lease_revoked"


async def test_a_lane_forgets_why_it_was_stopped(engine: Engine) -> None:
    backend = engine.backend
    await backend.lanes.set_lane_state("default", "paused", "repairs")
    assert (await backend.lanes.get_lane("default")).reason == "repairs"
    await backend.lanes.set_lane_state("default", "active")
    assert (await backend.lanes.get_lane("default")).reason == ""
    await engine.create()
    assert len(await engine.claim_all()) == 1, "and gives work out again"


async def test_a_worker_that_serves_less_than_before(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**WORKER, lanes=["a", "b"], capabilities=["gpu"])
    await backend.workers.register_worker(**WORKER, lanes=["a"])
    (worker,) = await backend.workers.list_workers()
    assert (worker.lanes, worker.capabilities) == (("a",), ())
    await backend.workers.register_worker(**WORKER, lanes=[])
    (worker,) = await backend.workers.list_workers()
    assert worker.lanes == ()
    key = keys.worker_record("{default}", "w-1")
    ttl = await backend.transport.call("PTTL", key)
    assert isinstance(ttl, int)
    assert ttl > 0, "it still expires by itself"
