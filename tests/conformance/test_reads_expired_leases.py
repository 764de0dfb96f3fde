"""Leases whose time is over, live or already offered for reclaim (03 D7, 04 §9)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.engine.api.leases import ExpiredLease
from tests.support.engine import TTL, Engine, refused
from tests.support.executions import mark

LANES = ("alpha", "beta", "gamma")


async def leased(engine: Engine, lane: str, ttl: int = TTL, **create: Any) -> Handle:
    await engine.create(lane=lane, **create)
    return (await engine.claim(lane=lane, ttl=ttl)).handle


async def listed(engine: Engine, *args: Any, **options: Any) -> list[ExpiredLease]:
    return list((await engine.backend.leases.list_expired_leases(*args, **options)).entries)


async def test_both_sets_are_read(engine: Engine) -> None:
    backend = engine.backend
    unnoticed = await leased(engine, "alpha", 1000)
    noticed = await leased(engine, "beta", 2000)
    revoked = await leased(engine, "gamma", 3000)
    later = await leased(engine, "alpha", 60_000)
    assert await listed(engine) == []
    await backend.leases.revoke_lease(revoked.execution_id)
    # Its time is not over: nobody holds it any more, but it has not expired.
    assert await listed(engine) == []
    await engine.advance(5000)
    await mark(engine, noticed.execution_id)
    entries = await listed(engine)
    assert [entry.execution_id for entry in entries] == [
        unnoticed.execution_id,
        noticed.execution_id,
        revoked.execution_id,
    ]
    for entry, handle in zip(entries, (unnoticed, noticed, revoked), strict=True):
        assert (entry.lease_id, entry.lease_epoch) == (handle.lease_id, handle.lease_epoch)
        assert (entry.worker_instance_id, entry.attempt_index) == ("w-1", 0)
    assert entries == sorted(entries, key=lambda e: (e.expires_at_ms, e.execution_id))
    moment = await engine.now() + 60_000
    assert (await listed(engine, moment))[-1].execution_id == later.execution_id
    assert [e.execution_id for e in await listed(engine, entries[0].expires_at_ms)] == [
        unnoticed.execution_id
    ]
    assert await listed(engine, entries[0].expires_at_ms - 1) == []


async def test_a_lease_that_went_on_or_ended_is_not_listed(engine: Engine) -> None:
    backend = engine.backend
    renewed, ended, taken = [await leased(engine, lane) for lane in LANES]
    await engine.advance(TTL - 1000)
    await backend.leases.renew(renewed)
    await backend.executions.complete(ended)
    await engine.advance(2000)
    await mark(engine, taken.execution_id)
    assert [entry.execution_id for entry in await listed(engine)] == [taken.execution_id]
    await engine.claim(lane="gamma")
    assert await listed(engine) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("at_once", [1, 32])
async def test_pages_cover_all_partitions_without_gap_or_repeat(
    engine: Engine, limit: int, at_once: int
) -> None:
    handles = [
        await leased(engine, f"lane-{n % 4}", 1000 + 100 * (n % 3), priority=n) for n in range(12)
    ]
    await engine.advance(5000)
    for handle in handles[::2]:
        await mark(engine, handle.execution_id)
    whole = await listed(engine)
    assert {entry.execution_id for entry in whole} == {handle.execution_id for handle in handles}
    found: list[ExpiredLease] = []
    after = None
    pages = 0
    while True:
        page = await engine.backend.leases.list_expired_leases(
            after=after, limit=limit, max_partitions_per_call=at_once
        )
        found += page.entries
        pages += 1
        assert len(page.entries) <= limit
        if page.cursor is None:
            break
        after = page.cursor
    assert found == whole
    assert pages == -(-12 // limit)


async def test_a_namespace_sees_its_own(engine: Engine) -> None:
    mine = await leased(engine, "alpha", 1000, namespace="mine")
    await leased(engine, "alpha", 1000, namespace="theirs")
    await engine.advance(2000)
    entries = await listed(engine, namespace="mine")
    assert [entry.execution_id for entry in entries] == [mine.execution_id]
    assert len(await listed(engine)) == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"as_of": "x"}, "invalid_input"),
        ({"as_of": -1}, "invalid_input"),
        ({"as_of": True}, "invalid_input"),
        ({"limit": None}, "invalid_input"),
        ({"limit": -1}, "invalid_input"),
        ({"max_partitions_per_call": "x"}, "invalid_input"),
        ({"namespace": "a b"}, "invalid_input"),
        ({"after": "x"}, "invalid_cursor"),
        ({"after": (1,)}, "invalid_cursor"),
        ({"after": (1, "x")}, "invalid_cursor"),
        ({"after": ("1", "{fp:1}:11111111-2222-4333-8444-555555555555")}, "invalid_cursor"),
    ],
)
async def test_wrong_arguments(engine: Engine, options: dict[str, Any], code: str) -> None:
    await refused(engine.backend.leases.list_expired_leases(**options), code)


async def test_no_room_gives_nothing(engine: Engine) -> None:
    await leased(engine, "alpha", 1000)
    await engine.advance(2000)
    assert await listed(engine, limit=0) == []


async def test_reading_writes_nothing(engine: Engine) -> None:
    handle = await leased(engine, "alpha", 1000)
    await engine.advance(2000)
    before = await engine.dump()
    assert [entry.execution_id for entry in await listed(engine)] == [handle.execution_id]
    assert await engine.dump() == before
