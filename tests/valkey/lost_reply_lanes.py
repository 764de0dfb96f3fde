"""Calls of the functions that write about lanes."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import LANE, Engine
from tests.valkey.lost_reply_case import Case, no_answer

FIXED = "00000000-0000-4000-8000-00000000000"


def new(n: int, **fields: Any) -> NewExecution:
    execution_id = ExecutionId.parse(f"{{fp:86}}:{FIXED}{n}")
    return NewExecution(execution_id=execution_id, execution_kind="job", **fields)


async def waiting(engine: Engine) -> ExecutionId:
    await engine.backend.executions.create_execution(new(1, priority=5))
    return new(1).execution_id


async def marked(engine: Engine) -> ExecutionId:
    execution_id = await waiting(engine)
    await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=1000)
    return execution_id


async def moved(engine: Engine) -> None:
    """A lane whose key `k` belongs to an execution on its former partition."""
    first = new(1, lane_id="busy", idempotency_key="k", shards=1)
    await engine.backend.executions.create_execution(first)
    await engine.backend.lanes.set_lane_config("busy", placement="spread", shards=8)


async def create_again(backend: ValkeyBackend, _: Any) -> Any:
    await backend.places.learn_lane("busy")
    again = new(2, lane_id="busy", idempotency_key="k", shards=8)
    return await backend.executions.create_many([again])


async def busy_worker(engine: Engine) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=[LANE]
    )
    await waiting(engine)
    await engine.claim()


async def reborn(engine: Engine) -> None:
    """A process with the name of one that was drained and died."""
    await busy_worker(engine)
    await engine.backend.workers.drain_worker("w-1")
    await engine.backend.transport.call("DEL", "ff:worker:{default}:w-1:alive")


LANE_CASES = {
    "drain_worker": Case(
        "ff_worker_drain", busy_worker, lambda backend, _: backend.workers.drain_worker("w-1")
    ),
    "refuse_claims": Case(
        "ff_refuse_claims", busy_worker, lambda backend, _: backend.workers.drain_worker("w-1")
    ),
    "register_again": Case(
        "ff_worker_register",
        reborn,
        lambda backend, _: backend.workers.register_worker(
            worker_id="w", worker_instance_id="w-1", lanes=[LANE], only_if_absent=True
        ),
        no_answer,
    ),
    "set_lane": Case(
        "ff_set_lane",
        waiting,
        lambda backend, _: backend.lanes.set_lane_state(LANE, "paused", "why"),
    ),
    "store_lane": Case(
        "ff_store_lane",
        waiting,
        lambda backend, _: backend.lanes.set_lane_config(LANE, reclaim_grace_ms=7),
    ),
    "store_lane_state": Case(
        "ff_store_lane",
        waiting,
        lambda backend, _: backend.lanes.set_lane_state(LANE, "paused"),
    ),
    "rescore": Case(
        "ff_rescore", marked, lambda backend, eid: backend.upkeep.rescore(eid.tag), no_answer
    ),
    "find_keys": Case("ff_find_keys", moved, create_again),
}
