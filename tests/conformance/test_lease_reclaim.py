"""Reclaim grants, reclaim, and the cap at both places (03 §15, D6, D13)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import (
    Claim,
    NotReclaimable,
    ReclaimCapExceeded,
    ReclaimGrant,
)
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import (
    OTHER,
    event_types,
    lapsed,
    mark,
    paused,
    reclaim,
    reclaim_grant,
    running,
)


def a_grant(execution_id: ExecutionId) -> ReclaimGrant:
    """A grant nobody issued."""
    return ReclaimGrant(
        execution_id=execution_id,
        partition_key=execution_id.tag,
        grant_key="k#t",
        expires_at_ms=2**53,
        lane_id="default",
    )


async def use(engine: Engine, held: ReclaimGrant, **options: Any) -> Any:
    arguments: dict[str, Any] = OTHER | {"lease_ttl_ms": TTL} | options
    return await engine.backend.claims.reclaim_execution(held, **arguments)


async def lose_once_more(engine: Engine, execution_id: ExecutionId) -> None:
    """The lease of the present holder runs out and is marked."""
    await engine.advance(TTL + 1)
    assert await mark(engine, [execution_id]) == ["marked_expired"]


async def test_what_cannot_be_reclaimed(engine: Engine) -> None:
    backend = engine.backend
    await refused(
        backend.claims.issue_reclaim_grant(engine.new_id(), **OTHER), "execution_not_found"
    )
    waiting = await engine.create()
    held = (await running(engine)).execution_id
    given_back = (await paused(engine)).execution_id
    ended = (await running(engine)).execution_id
    await backend.executions.cancel_execution(ended)
    async with untouched(engine):
        for execution_id in (waiting, held, given_back, ended):
            outcome = await backend.claims.issue_reclaim_grant(execution_id, **OTHER)
            assert outcome == NotReclaimable(execution_id, "execution_not_reclaimable")
            # The state comes before the grant.
            assert await use(engine, a_grant(execution_id)) == outcome
    await refused(use(engine, a_grant(engine.new_id())), "execution_not_found")


async def test_a_lapsed_lease_must_be_marked_first(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL + 1)
    outcome = await engine.backend.claims.issue_reclaim_grant(handle.execution_id, **OTHER)
    assert outcome.kind == "not_reclaimable"
    await refused(engine.backend.leases.renew(handle), "lease_expired")
    await reclaim_grant(engine, handle.execution_id)


@pytest.mark.parametrize("state", ["paused", "disabled"])
async def test_a_closed_lane_gives_nothing_back(engine: Engine, state: str) -> None:
    first, second = (await lapsed(engine)).execution_id, (await lapsed(engine)).execution_id
    held = await reclaim_grant(engine, first)
    await engine.backend.lanes.set_lane_state("default", state)
    async with untouched(engine):
        assert (await use(engine, held)).kind == "not_reclaimable"
        outcome = await engine.backend.claims.issue_reclaim_grant(second, **OTHER)
        assert outcome.kind == "not_reclaimable"
    await engine.backend.lanes.set_lane_state("default", "draining")
    assert isinstance(await use(engine, held), Claim)


async def test_another_instance_may_use_the_grant(engine: Engine) -> None:
    held = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    claim = await use(engine, held, worker_instance_id="v-2")
    assert claim.handle.worker_instance_id == "v-2"


async def test_a_grants_lane_must_be_the_executions(engine: Engine) -> None:
    held = await reclaim_grant(engine, (await lapsed(engine)).execution_id)
    async with untouched(engine):
        wrong = msgspec.structs.replace(held, lane_id="elsewhere")
        assert "lane_mismatch" in (await refused(use(engine, wrong), "invalid_input")).detail


@pytest.mark.parametrize("cap", [-1, 1.5, "3", True, 2**32])
async def test_a_cap_is_a_whole_number(engine: Engine, cap: Any) -> None:
    execution_id = (await lapsed(engine)).execution_id
    async with untouched(engine):
        work = use(engine, a_grant(execution_id), max_reclaim_count=cap)
        await refused(work, "invalid_input")


@pytest.mark.parametrize("via", ["grant", "reclaim"])
async def test_cap_zero_means_never(engine: Engine, via: str) -> None:
    execution_id = (await lapsed(engine, policy={"max_reclaim_count": 0})).execution_id
    if via == "grant":
        outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **OTHER)
    else:
        # The stored policy wins over the caller.
        outcome = await use(engine, a_grant(execution_id), max_reclaim_count=50)
    assert outcome == ReclaimCapExceeded(execution_id, 0)
    (attempt,) = await engine.backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "interrupted_reclaimed"


async def test_each_reclaim_counts_once_and_takes_its_own_index(engine: Engine) -> None:
    handle = await running(engine, policy={"max_reclaim_count": 3})
    for number in range(1, 4):
        await lose_once_more(engine, handle.execution_id)
        claim = await reclaim(engine, handle.execution_id)
        assert (claim.attempt_index, claim.handle.lease_epoch) == (number, number + 1)
    await lose_once_more(engine, handle.execution_id)
    outcome = await engine.backend.claims.issue_reclaim_grant(handle.execution_id, **OTHER)
    assert outcome == ReclaimCapExceeded(handle.execution_id, 3)
    attempts = await engine.backend.reads.read_attempts(handle.execution_id)
    assert [attempt.attempt_index for attempt in attempts] == [0, 1, 2, 3]
    assert len({attempt.attempt_id for attempt in attempts}) == 4


# --- lost replies ------------------------------------------------------------------------


async def test_a_repeated_reclaim_gives_the_same_claim(engine: Engine) -> None:
    execution_id = (await lapsed(engine)).execution_id
    held = await reclaim_grant(engine, execution_id)
    ids = {"lease_id": new_uuid(), "attempt_id": new_uuid()}
    first = await use(engine, held, **ids)
    async with untouched(engine):
        assert await use(engine, held, **ids) == first
        assert (await use(engine, held, lease_id=ids["lease_id"])).kind == "not_reclaimable"
    assert (await engine.backend.reads.read_execution_info(execution_id)).lease_reclaim_count == 1


async def test_recovery_as_a_worker_does_it(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL + 1)
    await refused(engine.backend.executions.complete(handle, b"late"), "lease_expired")
    claim = await reclaim(engine, handle.execution_id)
    await engine.backend.executions.complete(claim.handle, b"in time")
    assert await engine.backend.reads.get_execution_result(handle.execution_id) == b"in time"
    await refused(engine.backend.executions.complete(handle, b"late"), "execution_not_active")
    assert await event_types(engine, handle.execution_id) == [
        "acquired",
        "expired",
        "reclaimed",
        "completion",
    ]
