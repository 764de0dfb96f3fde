"""Calls that complete and also claim: how long a worker stays on one partition (04 S3)."""

from __future__ import annotations

from flowfabric.core.contracts.leases import Claim, Handle
from flowfabric.engine.api.executions import Completion
from flowfabric.scheduler.claims import WorkerClaims
from tests.support.engine import LANE, Engine

OTHER = "other"
NEARBY = "{fp:7}"
"""A partition that is none of the lanes' own."""


def _worker(engine: Engine, permits: int = 1) -> WorkerClaims[Claim]:
    return WorkerClaims(
        backend=engine.backend,
        requests={lane: engine.want(lane=lane) for lane in (LANE, OTHER)},
        adopt=lambda claim, _: claim,
        free=permits,
        poll_s=60.0,
    )


async def _complete(
    claims: WorkerClaims[Claim], handle: Handle, *, of_flow: bool = False
) -> list[Claim]:
    """Complete one task; what the same call claimed."""
    outcomes, tasks = await claims.complete(
        *(handle.lane_id, handle.execution_id.tag, [Completion(handle)], lambda: False),
        of_flow=of_flow,
    )
    assert outcomes == [None]
    claims.release()
    return tasks()


async def _stay(claims: WorkerClaims[Claim], handle: Handle, most: int = 40) -> int:
    """Complete one task after the other; how many calls in a row also claimed."""
    for count in range(most):
        tasks = await _complete(claims, handle)
        if not tasks:
            return count
        handle = tasks[0].handle
    return most


async def _busy(engine: Engine, lane: str = LANE, n: int = 60) -> None:
    for _ in range(n):
        await engine.create(lane=lane)


async def _claim(claims: WorkerClaims[Claim], lane: str = LANE) -> Handle:
    """Claim by a visit to the lane's own partition."""
    hints = claims.lanes[lane]
    (claim,) = await hints.visit([hints.home], 1, claims.claim_from)
    return claim.handle


async def test_after_16_claims_of_completing_calls_other_lanes_have_a_turn(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine)
    held = await _claim(claims)
    claims.lanes[OTHER].add(claims.lanes[OTHER].home)
    assert await _stay(claims, held) == 16
    # Only a visit begins another run of 16, and the lane still has its hint.
    assert list(claims.lanes[LANE].hinted) == [claims.lanes[LANE].home]
    assert await _stay(claims, await _claim(claims)) == 16


async def test_other_partitions_of_the_lane_have_a_turn_after_16_claims(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine, permits=2)
    held = await _claim(claims)
    claims.lanes[LANE].add(NEARBY)
    assert await _stay(claims, held) == 16
    assert claims.lanes[LANE].oldest() == NEARBY


async def test_every_partition_counts_for_itself(engine: Engine) -> None:
    await _busy(engine)
    await _busy(engine, OTHER)
    claims = _worker(engine, permits=2)
    first, second = await _claim(claims), await _claim(claims, OTHER)
    for _ in range(10):
        (claim,) = await _complete(claims, first)
        first = claim.handle
    assert await _stay(claims, second) == 16
    assert await _stay(claims, first) == 6


async def test_a_worker_stays_where_nothing_else_is_hinted_at(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine)
    assert await _stay(claims, await _claim(claims)) == 40


async def test_without_free_permits_an_older_hint_of_the_lane_comes_first(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine)
    held, hints = await _claim(claims), claims.lanes[LANE]
    hints.hinted = {NEARBY: None, hints.home: None}
    assert await _complete(claims, held) == []
    # What a completing call claimed renews the hint: then the other one is older.
    held = await _claim(claims)
    hints.hinted = {hints.home: None, NEARBY: None}
    (claim,) = await _complete(claims, held)
    assert list(hints.hinted) == [NEARBY, hints.home]
    assert await _complete(claims, claim.handle) == []


async def test_a_member_of_a_flow_takes_what_it_released_unless_others_wait(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine)
    held, hints = await _claim(claims), claims.lanes[LANE]
    hints.hinted = {}
    (claim,) = await _complete(claims, held, of_flow=True)
    hints.hinted = {NEARBY: None}
    assert await _complete(claims, claim.handle, of_flow=True) == []
    # The next visit but one finds what was released.
    assert list(hints.hinted) == [NEARBY, hints.home]


async def test_with_free_permits_no_hint_waits(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine, permits=2)
    held, hints = await _claim(claims), claims.lanes[LANE]
    hints.hinted = {NEARBY: None}
    assert len(await _complete(claims, held, of_flow=True)) == 1


async def test_members_of_flows_count_too(engine: Engine) -> None:
    await _busy(engine)
    claims = _worker(engine, permits=2)
    held, hints = await _claim(claims), claims.lanes[LANE]
    claims.lanes[OTHER].add(claims.lanes[OTHER].home)
    for _ in range(16):
        hints.hinted = {}
        (claim,) = await _complete(claims, held, of_flow=True)
        held = claim.handle
    hints.hinted = {}
    assert await _complete(claims, held, of_flow=True) == []
    assert list(hints.hinted) == [hints.home]


async def test_a_worker_that_stops_gives_back_what_a_completing_call_claimed(
    engine: Engine,
) -> None:
    await _busy(engine, n=2)
    claims = _worker(engine)
    handle = await _claim(claims)
    _, tasks = await claims.complete(
        LANE, handle.execution_id.tag, [Completion(handle)], lambda: False
    )
    claims.release()
    claims.stopping = True
    assert tasks() == []
    await claims.aclose()
    assert (await engine.claim(instance="w-2")).handle.lease_epoch == 2
