"""What a claim passes over: foreign requirements, live grants, graces, closed lanes."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import ClaimedMany
from flowfabric.core.policy import parse_policy
from tests.support.claims import BOTH, GPU, claim_many, create_many, ids
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import grant, mark

# --- capabilities ------------------------------------------------------------------


async def test_only_covered_requirements_are_claimed_and_nothing_is_written(
    engine: Engine,
) -> None:
    both = await engine.create(policy=BOTH)
    gpu = await engine.create(policy=GPU)
    async with untouched(engine):
        assert await claim_many(engine) == ClaimedMany([], 0)
        assert await claim_many(engine, capabilities=["GPU"]) == ClaimedMany([], 0)
    assert ids((await claim_many(engine, capabilities=["gpu"])).claims) == [gpu]
    assert ids((await claim_many(engine, capabilities=["cuda", "gpu"])).claims) == [both]


async def test_a_niche_requirement_behind_a_long_queue_is_found_at_once(engine: Engine) -> None:
    await create_many(engine, 60, priority=10)
    gpu = [await engine.create(policy=GPU, priority=5) for _ in range(40)]
    niche = await engine.create(policy=BOTH)
    # A worker that offers both sees plain work first, then gpu, then the niche one.
    claims = await engine.claim_all(capabilities=["gpu", "cuda"])
    assert set(ids(claims)[60:]) == set(gpu)
    assert ids(await engine.claim_all(capabilities=["gpu", "cuda"])) == [niche]
    # Behind work that the asking worker cannot take.
    await create_many(engine, 60, priority=9, policy=parse_policy(GPU))
    plain = await engine.create()
    assert ids((await claim_many(engine, 1)).claims) == [plain]


async def test_a_lost_niche_execution_behind_lost_foreign_work_is_found(engine: Engine) -> None:
    for _ in range(400):
        await engine.create(policy=GPU, priority=5)
    plain = await engine.create()
    claims = (await claim_many(engine, 256, capabilities=["gpu"])).claims
    claims += (await claim_many(engine, 256, capabilities=["gpu"])).claims
    assert len(claims) == 401
    await engine.advance(TTL + 1)
    assert set(await mark(engine, ids(claims))) == {"marked_expired"}
    taken = await claim_many(engine, 1)
    assert ids(taken.claims) == [plain]
    assert taken.claims[0].handle.kind == "reclaimed"
    # Nothing is left for this worker, so it need not ask again.
    assert await claim_many(engine, 1) == ClaimedMany([], 0)
    foreign = await claim_many(engine, 1, capabilities=["gpu"])
    assert (len(foreign.claims), foreign.remaining) == (1, 399)


async def test_a_reclaim_needs_the_capabilities_too(engine: Engine) -> None:
    await engine.create(policy=GPU)
    claim = await engine.claim(capabilities=["gpu"])
    await engine.advance(TTL + 1)
    await mark(engine, [claim.execution_id])
    assert (await claim_many(engine)).claims == []
    assert ids((await claim_many(engine, capabilities=["gpu"])).claims) == [claim.execution_id]


# --- grants and lane states ----------------------------------------------------------


async def test_live_grants_are_skipped_and_hide_nothing(engine: Engine) -> None:
    held = [await engine.create(priority=1) for _ in range(16)]
    grants = [await grant(engine, execution_id) for execution_id in held]
    free = await engine.create()
    assert ids((await claim_many(engine, 1, worker="v", instance="v-1")).claims) == [free]
    # None of them is there for the taking, so nothing remains.
    assert await claim_many(engine) == ClaimedMany([], 0)
    claim = await engine.backend.claims.claim_execution(
        grants[3], worker_id="w", worker_instance_id="w-9", lease_ttl_ms=TTL
    )
    assert claim.execution_id == held[3]


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_closed_lane_hands_out_nothing(engine: Engine, state: str) -> None:
    running = await engine.running()
    lost = await engine.running()
    await engine.backend.leases.revoke_lease(lost.execution_id)
    waiting = await engine.create()
    assert await engine.backend.lanes.set_lane_state("default", state) == "active"
    async with untouched(engine):
        assert await claim_many(engine) == ClaimedMany([], 0)
    # Running work goes on.
    await engine.backend.leases.renew(running)
    await engine.backend.executions.complete(running)
    assert await engine.backend.lanes.set_lane_state("default", "active") == state
    assert set(ids((await claim_many(engine)).claims)) == {lost.execution_id, waiting}


async def test_a_draining_lane_is_emptied(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.lanes.set_lane_state("default", "draining")
    await refused(engine.create(), "lane_not_accepting")
    assert ids((await claim_many(engine)).claims) == [execution_id]
