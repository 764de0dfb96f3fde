"""Routing on a cluster: lanes on many slots, and drains that hold in each."""

from __future__ import annotations

from typing import Any

from flowfabric.core.contracts.executions import Created, Duplicate, NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import lane_partitions
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.workers import Draining
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.cluster import slot_of
from tests.support.cluster import TestCluster

LANE, SHARDS = "busy", 12


def keyed(backend: ValkeyBackend, key: str) -> NewExecution:
    execution_id = ExecutionId.solo(LANE, backend.counts, SHARDS, ("default", key))
    return NewExecution(
        execution_id=execution_id,
        execution_kind="job",
        lane_id=LANE,
        idempotency_key=key,
        shards=SHARDS,
    )


async def test_a_key_names_one_execution_of_a_spread_lane(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    await backend.lanes.set_lane_config(LANE, placement="spread", shards=SHARDS)
    names = [f"order-{n}" for n in range(48)]
    made = await backend.executions.create_many([keyed(backend, key) for key in names])
    assert {type(outcome) for outcome in made} == {Created}
    first = [outcome.execution_id for outcome in made if isinstance(outcome, Created)]
    again = await backend.executions.create_many([keyed(backend, key) for key in names])
    assert [(type(each), each.execution_id) for each in again if isinstance(each, Duplicate)] == [
        (Duplicate, execution_id) for execution_id in first
    ]
    own = lane_partitions(LANE, SHARDS, backend.counts)
    assert {each.partition for each in first} == set(own)
    assert {cluster.owner(slot_of(each.tag)) for each in first} == {0, 1, 2}
    want, taken = ClaimRequest(LANE, "w", "w-1"), list[ExecutionId]()
    for tag in {each.tag for each in first}:
        claimed = (await backend.claims.claim_many(want, tag, 100)).claims
        taken += [claim.execution_id for claim in claimed]
    assert sorted(taken) == sorted(first)
    assert (await backend.lanes.get_lane(LANE)).counts["active"] == len(first)


async def test_a_draining_worker_gets_nothing_in_any_partition(backend: ValkeyBackend) -> None:
    worker: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lanes": [LANE]}
    await backend.workers.register_worker(**worker, namespaces=["*"])
    await backend.lanes.set_lane_config(LANE, placement="spread", shards=SHARDS)
    made = [keyed(backend, f"order-{n}") for n in range(48)]
    await backend.executions.create_many(made)
    tags = sorted({each.execution_id.tag for each in made})
    want, other = ClaimRequest(LANE, "w", "w-1"), ClaimRequest(LANE, "w", "w-2")
    for tag in tags:
        assert len((await backend.claims.claim_many(want, tag, 1)).claims) == 1
    assert await backend.workers.drain_worker("w-1") == Draining(len(tags))
    for tag in tags:
        refused = await backend.claims.claim_many(want, tag, 10)
        assert (refused.claims, refused.draining) == ([], True)
    left = [len((await backend.claims.claim_many(other, tag, 100)).claims) for tag in tags]
    assert sum(left) == len(made) - len(tags)


async def test_a_spread_lane_is_counted_and_its_oldest_found_on_every_node(
    backend: ValkeyBackend,
) -> None:
    await backend.lanes.set_lane_config(LANE, placement="spread", shards=SHARDS)
    made = [keyed(backend, f"key-{n}") for n in range(40)]
    await backend.executions.create_many(made)
    first = await backend.reads.read_execution_info(made[0].execution_id)
    counts = await backend.listings.count_lanes([LANE])
    assert counts[LANE]["eligible"] == 40
    waited = await backend.meta.server_time_ms() - int(first.created_at)
    assert (await backend.listings.oldest_eligible([LANE]))[LANE] >= waited
