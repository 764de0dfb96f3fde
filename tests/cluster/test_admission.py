"""Admission on a cluster: budgets, quotas and executions are on different nodes."""

from __future__ import annotations

from tests.support.admission import budget, claimed, limited, quota, settled, slots, worker
from tests.support.engine import Engine


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
