"""What remains of leases: the feed, the short history, the index by worker (03 §14, 12 §11)."""

from __future__ import annotations

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.conformance.test_lease_history import RETRY
from tests.support.engine import TTL, Engine
from tests.support.leases import lapsed, mark, reclaim, running
from tests.support.storage import indexes
from tests.valkey.mutation import mutated, private_engine, private_server

__all__ = ["private_engine", "private_server"]


async def leased_by(engine: Engine, execution_id: ExecutionId) -> set[str]:
    return {name for name in await indexes(engine, execution_id) if name.startswith("worker:")}


async def test_a_further_field_in_front_hides_no_release(private_engine: Engine) -> None:
    engine = private_engine
    code = mutated("lib/60_events.lua", "'w', rec.worker, ...)", "'w', rec.worker, 'x', '1', ...)")
    await engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)
    handle = await running(engine, policy=RETRY)
    await engine.backend.executions.fail(handle, "boom", "transient")
    (event,) = await engine.backend.reads.read_execution_history(handle.execution_id)
    assert (event.type, event.get("reason")) == ("released", "failed_retry_scheduled")
    assert event.get("x") == "1"


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
