"""Admission on a cluster: budgets, quotas and executions are on different nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.admission import budget, claimed, limited, quota, settled, slots, worker
from tests.support.cluster import TestCluster
from tests.support.engine import Engine


@pytest.fixture
async def engine(cluster: TestCluster) -> AsyncIterator[Engine]:
    counts = PartitionCounts(flow=32)
    backend = await ValkeyBackend.connect(parse_url(cluster.url), prepare_with=counts)
    await backend.transport.call_all_primaries("FLUSHALL")
    await backend.meta.prepare()
    yield Engine(backend)
    await backend.aclose()


async def test_admission_across_nodes(engine: Engine) -> None:
    spent = await budget(engine, 1, spent=1)
    for _ in range(6):
        policy = await quota(engine, cap=1)
        first = await limited(engine, await budget(engine), quota=policy)
        claims = worker(engine, 5)
        (claim,) = await claims.claim_many(5)
        assert claim.execution_id == first
        second = await limited(engine, quota=policy)
        held = await limited(engine, spent)
        assert await claimed(engine) == []
        assert await slots(engine, policy) == 1
        await engine.backend.executions.complete(claim.handle)
        await settled(engine)
        assert await claimed(engine) == [second]
        state = await engine.backend.reads.read_execution_state(held)
        assert state.value == "rate_limited"
