"""Renewal, one by one and in batches (03 §10, D11)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Fence, Handle, Renewed
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.engine.probes import (
    event_types,
    fields,
    freeze,
    lossy,
    paused,
    placed,
    refused,
    running,
    untouched,
)
from tests.support.engine import TTL, Engine
from tests.support.server import TestServer


async def test_a_renewal_extends_the_lease_and_nothing_else(engine: Engine) -> None:
    handle = await engine.running(policy={"timeout_policy": {"attempt_timeout_ms": 90_000}})
    execution_id = handle.execution_id
    before = await fields(engine, execution_id)
    timeout = (await placed(engine, execution_id))["attempt_timeout"]
    now = await engine.now() + 1000
    await freeze(engine, now)
    assert await engine.backend.leases.renew(handle) == Renewed(now + TTL, 1)
    after = await fields(engine, execution_id)
    assert after == before | {
        "lease_expires_at": str(now + TTL),
        "lease_last_renewed_at": str(now),
    }
    assert await placed(engine, execution_id) == {
        "lane:default:active": now + TTL,
        "lease_expiry": now + TTL,
        "attempt_timeout": timeout,
        "worker:w-1:leases": None,
    }
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is not None
    assert snapshot.current_lease.last_heartbeat_at == now
    assert snapshot.last_mutation_at == now
    assert await event_types(engine, execution_id) == ["acquired"]


async def test_a_renewal_may_also_shorten(engine: Engine) -> None:
    handle = await engine.running()
    await freeze(engine, await engine.now())
    renewed = await engine.backend.leases.renew_lease(handle.execution_id, handle, 1)
    assert renewed.expires_at == await engine.now() + 1
    await freeze(engine, renewed.expires_at)
    await refused("lease_expired", engine.backend.leases.renew(handle))


async def test_a_lease_ends_at_its_expiry_not_after(engine: Engine) -> None:
    await freeze(engine, await engine.now())
    handle = await engine.running()
    now = await engine.now()
    await freeze(engine, now + TTL - 1)
    renewed = await engine.backend.leases.renew(handle)
    assert renewed.expires_at == now + 2 * TTL - 1
    await freeze(engine, renewed.expires_at)
    await refused("lease_expired", engine.backend.leases.renew(handle))
    # The refusal marked it: the next claim may take it.
    assert "lane:default:reclaimable" in await placed(engine, handle.execution_id)


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
    await refused("invalid_input", work)


async def test_check_order(engine: Engine) -> None:
    handle = await engine.running()
    unknown, backend = engine.new_id(), engine.backend
    partial = Fence(handle.lease_id, handle.lease_epoch, "")
    async with untouched(engine):
        await refused("execution_not_found", backend.leases.renew_lease(unknown, Fence(), TTL))
        await refused(
            "fence_required", backend.leases.renew_lease(handle.execution_id, Fence(), TTL)
        )
        for fence in (
            partial,
            Fence(handle.lease_id, None, handle.attempt_id),
            Fence("", handle.lease_epoch, handle.attempt_id),
            Fence(handle.lease_id),
        ):
            await refused(
                "partial_fence_triple", backend.leases.renew_lease(handle.execution_id, fence, TTL)
            )
        for fence in (
            Fence(new_uuid(), 1, handle.attempt_id, 0),
            Fence(handle.lease_id, 2, handle.attempt_id, 0),
            Fence(handle.lease_id, 1, new_uuid(), 0),
            Fence(handle.lease_id, 1, handle.attempt_id, 1),
        ):
            await refused(
                "stale_lease", backend.leases.renew_lease(handle.execution_id, fence, TTL)
            )
    assert (
        await backend.leases.renew_lease(handle.execution_id, handle.fence, TTL)
    ).lease_epoch == 1
    await backend.executions.cancel_execution(handle.execution_id)
    error = await refused("execution_not_active", backend.leases.renew(handle))
    assert list(error.details) == ["cancelled", "1", "terminal", handle.attempt_id]
    await refused(
        "partial_fence_triple", backend.leases.renew_lease(handle.execution_id, partial, TTL)
    )


async def test_expiry_and_revocation_come_before_identity(engine: Engine) -> None:
    handle = await engine.running()
    other = Fence(new_uuid(), 7, new_uuid(), 3)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await engine.advance(TTL + 1)
    await refused(
        "lease_revoked", engine.backend.leases.renew_lease(handle.execution_id, other, TTL)
    )
    lapsed = await engine.running()
    await engine.advance(TTL + 1)
    await refused(
        "lease_expired", engine.backend.leases.renew_lease(lapsed.execution_id, other, TTL)
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


async def test_three_hundred_leases_with_their_own_ttls(engine: Engine) -> None:
    await engine.backend.executions.create_many([_new(engine) for _ in range(300)])
    claims = await engine.claim_all(256) + await engine.claim_all(256, ttl=5000)
    assert len(claims) == 300
    await freeze(engine, await engine.now() + 100)
    now = await engine.now()
    outcomes = await engine.backend.leases.renew_many([claim.handle for claim in claims])
    expiries = [item.expires_at for item in outcomes if isinstance(item, Renewed)]
    assert expiries == [now + TTL] * 256 + [now + 5000] * 44
    assert (await placed(engine, claims[-1].execution_id))["lease_expiry"] == now + 5000


def _new(engine: Engine) -> Any:
    return NewExecution(execution_id=engine.new_id(), execution_kind="job")


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
        await refused("invalid_input", engine.backend.leases.renew(broken))


async def test_a_lost_reply_is_harmless(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    async with lossy(engine, valkey) as (client, proxy):
        proxy.drop_next_reply(b"ff_renew")
        (outcome,) = await client.leases.renew_many([handle])
        assert proxy.dropped == 1
    assert isinstance(outcome, Renewed)
    await engine.backend.executions.complete(handle)


async def test_a_paused_execution_has_no_lease_to_renew(engine: Engine) -> None:
    handle = await paused(engine)
    async with untouched(engine):
        error = await refused("execution_not_active", engine.backend.leases.renew(handle))
    assert list(error.details) == ["none", "1", "runnable", handle.attempt_id]


async def test_when_it_was_acquired_and_should_be_renewed(engine: Engine) -> None:
    """Advice for people and tools: two thirds of the way from the last renewal to the end."""
    names = ["lease_acquired_at", "lease_renewal_deadline"]

    async def times(execution_id: ExecutionId) -> list[int | None]:
        found = await engine.backend.reads.read_exec_core_fields(execution_id, names)
        return [None if found[name] is None else int(found[name] or "") for name in names]

    start = await engine.now() + 10
    await freeze(engine, start)
    execution_id = await engine.create()
    assert await times(execution_id) == [None, None]
    handle = (await engine.claim()).handle
    assert await times(execution_id) == [start, start + TTL * 2 // 3]
    await freeze(engine, start + 1000)
    await engine.backend.leases.renew_lease(execution_id, handle, 10_000)
    assert await times(execution_id) == [start, start + 1000 + 6666]
    await engine.backend.executions.delay(handle, 1)
    assert await times(execution_id) == [None, None]
    await freeze(engine, start + 2000)
    resumed = (await engine.claim()).handle
    assert await times(execution_id) == [start + 2000, start + 2000 + TTL * 2 // 3]
    await freeze(engine, start + 2000 + TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
    reclaimed = (await engine.claim()).handle
    assert reclaimed.lease_epoch == resumed.lease_epoch + 1
    begun = start + 2000 + TTL
    assert await times(execution_id) == [begun, begun + TTL * 2 // 3]
    await engine.backend.executions.complete(reclaimed)
    assert await times(execution_id) == [None, None]
