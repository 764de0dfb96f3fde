from __future__ import annotations

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.suspension import UsePending
from flowfabric.core.ids import new_uuid
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.leases import running as held
from tests.support.scanning import idle, members, plant, running
from tests.support.sdk import until
from tests.support.suspension import Waits

NAME = "pending_wp_expiry"
INDEX = "pending_waitpoint_expiry"


async def test_unused_waitpoints_are_closed(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await held(engine)
    execution_id = handle.execution_id
    short = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    long = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    used = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    await waits.backend.suspensions.suspend(
        handle, condition=Single("k"), waitpoints=[UsePending(used.waitpoint_id)]
    )
    supervisor = idle(engine)
    assert await supervisor.scan_once(NAME) == ScanResult()
    await engine.advance(1001)
    assert await supervisor.scan_once(NAME) == ScanResult(processed=1)
    states = [
        (await waits.waitpoint(execution_id, one.waitpoint_id))["state"]
        for one in (short, long, used)
    ]
    assert states == ["closed", "pending", "active"]
    closed = await waits.waitpoint(execution_id, short.waitpoint_id)
    assert closed["close_reason"] == "never_committed"
    assert await members(engine, execution_id.tag, INDEX) == [long.waitpoint_id]


async def test_more_than_a_page_and_deleted_executions(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await held(engine)
    for _ in range(230):
        await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
    await plant(engine, handle.execution_id.tag, INDEX, new_uuid())
    await plant(engine, handle.execution_id.tag, INDEX, "not an id")
    await engine.advance(1001)
    assert await idle(engine).scan_once(NAME) == ScanResult(processed=232)
    assert await members(engine, handle.execution_id.tag, INDEX) == []


async def test_the_filter_asks_for_the_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    ours = await held(engine, namespace="acme")
    theirs = await held(engine)
    mine = await waits.backend.waitpoints.create_waitpoint(ours, "k", 1000)
    other = await waits.backend.waitpoints.create_waitpoint(theirs, "k", 1000)
    stray = new_uuid()
    await plant(engine, ours.execution_id.tag, INDEX, stray)
    await engine.advance(1001)
    accept = ScannerFilter(namespace="acme")
    assert await idle(engine, accept=accept).scan_once(NAME) == ScanResult(processed=1)
    left = await members(engine, ours.execution_id.tag, INDEX)
    assert set(left) == {other.waitpoint_id, stray}, "what belongs to nobody is not ours"
    assert mine.waitpoint_id not in left


@pytest.mark.corrupts
async def test_a_poison_item_stays(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await held(engine)
    broken, healthy = [
        await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000) for _ in range(2)
    ]
    key = f"ff:wp:{handle.execution_id.tag}:{broken.waitpoint_id}"
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "garbage")
    await engine.advance(1001)
    assert await idle(engine).scan_once(NAME) == ScanResult(processed=1, errors=1)
    left = await members(engine, handle.execution_id.tag, INDEX)
    assert left == [broken.waitpoint_id]
    assert healthy.waitpoint_id not in left


async def test_a_running_supervisor_closes_them(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await held(engine)
    async with running(engine.backend):
        pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1000)
        await engine.advance(1001)

        async def closed() -> bool:
            stored = await waits.waitpoint(handle.execution_id, pending.waitpoint_id)
            return stored["state"] == "closed"

        await until(closed)
