"""Renewal, one by one and in batches (03 §10, D11)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Fence, Handle, Renewed
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import paused, running


async def test_a_renewal_may_also_shorten(engine: Engine) -> None:
    handle = await engine.running()
    await engine.freeze(await engine.now())
    renewed = await engine.backend.leases.renew_lease(handle.execution_id, handle, 1)
    assert renewed.expires_at == await engine.now() + 1
    await engine.freeze(renewed.expires_at)
    await refused(engine.backend.leases.renew(handle), "lease_expired")


async def test_renewal_events_are_opt_in(engine: Engine) -> None:
    handle = await engine.running(lane="loud")
    await engine.backend.leases.renew(handle)
    await engine.backend.lanes.set_lane_config("loud", emit_renewals=True)
    await engine.backend.leases.renew(handle)
    await engine.backend.lanes.set_lane_config("loud", emit_renewals=False)
    await engine.backend.leases.renew(handle)
    events = await engine.events(handle.execution_id)
    assert [event.type for event in events] == ["acquired", "renewed"]
    assert events[1].get("lease_id") == handle.lease_id
    assert events[1].get("worker_instance_id") == "w-1"


@pytest.mark.parametrize("ttl", [0, -1, "1", 2.5, None, True, 2**60])
async def test_numbers_are_checked_first(engine: Engine, ttl: Any) -> None:
    work = engine.backend.leases.renew_lease(engine.new_id(), Fence(), ttl)
    await refused(work, "invalid_input")


async def test_check_order(engine: Engine) -> None:
    handle = await engine.running()
    unknown, backend = engine.new_id(), engine.backend
    partial = Fence(handle.lease_id, handle.lease_epoch, "")
    async with untouched(engine):
        await refused(backend.leases.renew_lease(unknown, Fence(), TTL), "execution_not_found")
        await refused(
            backend.leases.renew_lease(handle.execution_id, Fence(), TTL), "fence_required"
        )
        for fence in (
            partial,
            Fence(handle.lease_id, None, handle.attempt_id),
            Fence("", handle.lease_epoch, handle.attempt_id),
            Fence(handle.lease_id),
        ):
            await refused(
                backend.leases.renew_lease(handle.execution_id, fence, TTL), "partial_fence_triple"
            )
        for fence in (
            Fence(new_uuid(), 1, handle.attempt_id, 0),
            Fence(handle.lease_id, 2, handle.attempt_id, 0),
            Fence(handle.lease_id, 1, new_uuid(), 0),
            Fence(handle.lease_id, 1, handle.attempt_id, 1),
        ):
            await refused(
                backend.leases.renew_lease(handle.execution_id, fence, TTL), "stale_lease"
            )
    assert (
        await backend.leases.renew_lease(handle.execution_id, handle.fence, TTL)
    ).lease_epoch == 1
    await backend.executions.cancel_execution(handle.execution_id)
    error = await refused(backend.leases.renew(handle), "execution_not_active")
    assert list(error.details) == ["cancelled", "1", "terminal", handle.attempt_id]
    await refused(
        backend.leases.renew_lease(handle.execution_id, partial, TTL), "partial_fence_triple"
    )


async def test_expiry_and_revocation_come_before_identity(engine: Engine) -> None:
    handle = await engine.running()
    other = Fence(new_uuid(), 7, new_uuid(), 3)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await engine.advance(TTL + 1)
    await refused(
        engine.backend.leases.renew_lease(handle.execution_id, other, TTL), "lease_revoked"
    )
    lapsed = await engine.running()
    await engine.advance(TTL + 1)
    await refused(
        engine.backend.leases.renew_lease(lapsed.execution_id, other, TTL), "lease_expired"
    )


# --- many ------------------------------------------------------------------------


def verdicts(outcomes: list[Renewed | EngineError]) -> list[str]:
    return [item.code if isinstance(item, EngineError) else item.kind for item in outcomes]


async def test_one_failing_handle_affects_no_other(engine: Engine) -> None:
    good = await running(engine)
    ended = await running(engine, lane="second")
    await engine.backend.executions.complete(ended)
    stale = await running(engine, lane="third")
    await engine.backend.executions.delay(stale, 1)
    await engine.claim(lane="third")
    revoked = await running(engine)
    await engine.backend.leases.revoke_lease(revoked.execution_id)
    gone = Handle(
        execution_id=engine.new_id("fourth"),
        lease=good.lease,
        attempt=good.attempt,
        lease_ttl_ms=TTL,
        lane_id="fourth",
        worker_instance_id="w-1",
    )
    also_good = await running(engine, lane="second")
    handles = [good, ended, stale, revoked, gone, also_good]
    assert verdicts(await engine.backend.leases.renew_many(handles)) == [
        "renewed",
        "execution_not_active",
        "stale_lease",
        "lease_revoked",
        "execution_not_found",
        "renewed",
    ]
    assert await engine.backend.leases.renew_many([]) == []


async def test_a_handle_with_an_impossible_ttl_is_refused_alone(engine: Engine) -> None:
    good, bad = await running(engine), await running(engine)
    for ttl in (0, 2**60):
        broken = Handle(
            execution_id=bad.execution_id,
            lease=bad.lease,
            attempt=bad.attempt,
            lease_ttl_ms=ttl,
            lane_id="default",
            worker_instance_id="w-1",
        )
        assert verdicts(await engine.backend.leases.renew_many([broken, good])) == [
            "invalid_input",
            "renewed",
        ]
        await refused(engine.backend.leases.renew(broken), "invalid_input")


async def test_a_paused_execution_has_no_lease_to_renew(engine: Engine) -> None:
    handle = await paused(engine)
    async with untouched(engine):
        error = await refused(engine.backend.leases.renew(handle), "execution_not_active")
    assert list(error.details) == ["none", "1", "runnable", handle.attempt_id]


async def test_when_it_was_acquired_and_should_be_renewed(engine: Engine) -> None:
    """Advice for people and tools: two thirds of the way from the last renewal to the end."""
    names = ["lease_acquired_at", "lease_renewal_deadline"]

    async def times(execution_id: ExecutionId) -> list[int | None]:
        found = await engine.backend.reads.read_exec_core_fields(execution_id, names)
        return [None if found[name] is None else int(found[name] or "") for name in names]

    start = await engine.now() + 10
    await engine.freeze(start)
    execution_id = await engine.create()
    assert await times(execution_id) == [None, None]
    handle = (await engine.claim()).handle
    assert await times(execution_id) == [start, start + TTL * 2 // 3]
    await engine.freeze(start + 1000)
    await engine.backend.leases.renew_lease(execution_id, handle, 10_000)
    assert await times(execution_id) == [start, start + 1000 + 6666]
    await engine.backend.executions.delay(handle, 1)
    assert await times(execution_id) == [None, None]
    await engine.freeze(start + 2000)
    resumed = (await engine.claim()).handle
    assert await times(execution_id) == [start + 2000, start + 2000 + TTL * 2 // 3]
    await engine.freeze(start + 2000 + TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
    reclaimed = (await engine.claim()).handle
    assert reclaimed.lease_epoch == resumed.lease_epoch + 1
    begun = start + 2000 + TTL
    assert await times(execution_id) == [begun, begun + TTL * 2 // 3]
    await engine.backend.executions.complete(reclaimed)
    assert await times(execution_id) == [None, None]
