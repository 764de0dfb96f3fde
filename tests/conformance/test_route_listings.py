"""Listings and counts show what no live worker can take as blocked by its route (04 S6)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from tests.support.engine import LANE, Engine

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu"]}}
BOTH: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu", "ssd"]}}


async def listed(engine: Engine, state: str) -> list[ExecutionId]:
    """The executions that a lane lists in a state, which must be as many as it counts there."""
    partition = engine.new_id().partition
    page = await engine.backend.listings.list_lane(LANE, state, partition=partition)
    counts = (await engine.backend.lanes.get_lane(LANE)).counts
    assert counts[state] == len(page.executions)
    return [row.execution_id for row in page.executions]


async def register(engine: Engine, name: str, *capabilities: str, **fields: Any) -> None:
    await engine.backend.workers.register_worker(
        worker_id=name,
        worker_instance_id=name,
        lanes=fields.pop("lanes", [LANE]),
        capabilities=capabilities,
        **fields,
    )


async def reason(engine: Engine, execution_id: ExecutionId) -> str | None:
    found = await engine.backend.reads.describe_execution(execution_id)
    assert found is not None
    return found.blocking_reason


async def test_it_is_blocked_until_one_worker_covers_it(engine: Engine) -> None:
    plain = await engine.create()
    # Executions of the same millisecond are listed by their ids, which are random.
    await engine.advance(1)
    gpu = await engine.create(policy=GPU)
    await engine.advance(1)
    both = await engine.create(policy=BOTH)
    assert await listed(engine, "eligible") == [plain]
    assert await listed(engine, "blocked_route") == [gpu, both]
    assert await reason(engine, both) == "waiting_for_capable_worker"
    # Two halves do not add up.
    await register(engine, "first", "gpu")
    await register(engine, "second", "ssd")
    assert await listed(engine, "eligible") == [plain, gpu]
    assert await listed(engine, "blocked_route") == [both]
    await register(engine, "third", "gpu", "ssd")
    assert await listed(engine, "eligible") == [plain, gpu, both]
    assert await listed(engine, "blocked_route") == []
    assert await reason(engine, both) == "waiting_for_worker"
    await engine.backend.workers.mark_worker_dead("third")
    assert await listed(engine, "blocked_route") == [both]


async def test_what_was_blocked_by_hand_is_listed_as_well(engine: Engine) -> None:
    by_hand, untaken = await engine.create(), await engine.create(policy=GPU)
    await engine.backend.claims.block_route(by_hand)
    assert set(await listed(engine, "blocked_route")) == {by_hand, untaken}
    assert await listed(engine, "eligible") == []


@pytest.mark.parametrize(
    "other", [{"lanes": ["elsewhere"]}, {"namespace": "acme"}, {"namespaces": ["acme"]}]
)
async def test_workers_of_another_place_do_not_count(engine: Engine, other: Any) -> None:
    gpu = await engine.create(policy=GPU)
    await register(engine, "other", "gpu", **other)
    assert await listed(engine, "blocked_route") == [gpu]
    await register(engine, "all", "gpu", namespaces=["*"])
    assert await listed(engine, "eligible") == [gpu]


async def test_a_task_that_no_worker_knows(engine: Engine) -> None:
    execution_id = await engine.create(execution_kind="resize")
    claimed = await engine.claim_all(tasks=["other"])
    assert not claimed
    assert await listed(engine, "blocked_route") == [execution_id]
    await register(engine, "one", tasks=["other"], takes_other_tasks=False)
    assert await listed(engine, "blocked_route") == [execution_id]
    await register(engine, "two", tasks=["resize"], takes_other_tasks=False)
    assert await listed(engine, "eligible") == [execution_id]


async def test_a_claim_does_not_need_the_registry(engine: Engine) -> None:
    gpu = await engine.create(policy=GPU)
    assert await listed(engine, "blocked_route") == [gpu]
    (claim,) = await engine.claim_all(capabilities=["gpu"])
    assert claim.execution_id == gpu
