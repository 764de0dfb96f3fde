"""How a lease is lost: expiry marking and revocation (03 §11, §12, D7)."""

from __future__ import annotations

from flowfabric.core.contracts.leases import AlreadySatisfied
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.upkeep import Index
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import event_types, grant, lapsed, mark, paused, running


async def test_marking_twice_changes_nothing(engine: Engine) -> None:
    handle = await lapsed(engine)
    async with untouched(engine):
        assert await mark(engine, [handle.execution_id]) == ["already_expired"]
    assert await event_types(engine, handle.execution_id) == ["acquired", "expired"]


async def test_a_lapsed_lease_is_found_by_the_due_scan_once(engine: Engine) -> None:
    handle = await engine.running()
    tag = handle.execution_id.tag
    await engine.advance(TTL + 1)
    scan = await engine.backend.upkeep.scan_due([Index(tag, "lease_expiry")], 50)
    assert list(scan.due.values()) == [[handle.execution_id]]
    await mark(engine, [handle.execution_id])
    scan = await engine.backend.upkeep.scan_due([Index(tag, "lease_expiry")], 50)
    assert scan.due == {}


async def test_the_expected_lease_is_compared(engine: Engine) -> None:
    handle = await engine.running()
    other = new_uuid()
    async with untouched(engine):
        error = await refused(
            engine.backend.leases.revoke_lease(handle.execution_id, expected_lease_id=other),
            "stale_lease",
        )
    assert other in error.detail
    assert handle.lease_id in error.detail
    outcome = await engine.backend.leases.revoke_lease(
        handle.execution_id, expected_lease_id=handle.lease_id
    )
    assert outcome.kind == "revoked"


async def test_a_lapsed_lease_that_nobody_marked_can_be_revoked(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL + 1)
    assert (await engine.backend.leases.revoke_lease(handle.execution_id)).kind == "revoked"
    assert await event_types(engine, handle.execution_id) == ["acquired", "revoked"]


async def test_nothing_to_revoke(engine: Engine) -> None:
    backend = engine.backend
    await refused(backend.leases.revoke_lease(engine.new_id()), "execution_not_found")
    waiting = await engine.create()
    granted = await engine.create()
    await grant(engine, granted)
    delayed = await engine.create(delay_until=await engine.now() + 60_000)
    given_back = (await paused(engine)).execution_id
    ended = (await running(engine)).execution_id
    await backend.executions.cancel_execution(ended)
    expired = (await lapsed(engine)).execution_id
    revoked = (await running(engine)).execution_id
    await backend.leases.revoke_lease(revoked)
    async with untouched(engine):
        for execution_id, reason in (
            (waiting, "no_active_lease"),
            (granted, "no_active_lease"),
            (delayed, "no_active_lease"),
            (given_back, "no_active_lease"),
            (ended, "no_active_lease"),
            (expired, "already_expired"),
            (revoked, "already_revoked"),
        ):
            outcome = await backend.leases.revoke_lease(execution_id, expected_lease_id=new_uuid())
            assert outcome == AlreadySatisfied(reason)
