from __future__ import annotations

import pytest

from flowfabric.core.conditions import OperatorOnly
from flowfabric.core.contracts.suspension import Suspended
from flowfabric.core.state import PublicState
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.leases import running as held
from tests.support.scanning import break_record, idle, members, plant, running
from tests.support.sdk import until
from tests.support.suspension import GO, Waits

NAME = "suspension_timeout"


async def parked(waits: Waits, *behaviors: str, **create: str) -> list[Suspended]:
    """Suspensions that are all due a second from now."""
    due = await waits.engine.now() + 1000
    return [
        await waits.park(
            GO,
            handle=await held(waits.engine, **create),
            timeout_at=due,
            timeout_behavior=behavior,
        )
        for behavior in behaviors
    ]


async def test_each_ends_as_it_asked_to(engine: Engine) -> None:
    waits = await Waits.open(engine)
    everyone = await parked(waits, "fail", "cancel", "expire", "auto_resume", "escalate")
    untimed = await waits.park(OperatorOnly(), handle=await held(engine))
    supervisor = idle(engine)
    assert await supervisor.scan_once(NAME) == ScanResult()
    await engine.advance(1001)
    assert await supervisor.scan_once(NAME) == ScanResult(processed=5)
    states = [
        await engine.backend.reads.read_execution_state(one.handle.execution_id)
        for one in (*everyone, untimed)
    ]
    assert states == ["failed", "cancelled", "expired", "waiting", "suspended", "suspended"]
    assert await members(engine, untimed.handle.execution_id.tag, NAME) == []
    assert await supervisor.scan_once(NAME) == ScanResult()


async def test_more_than_a_page(engine: Engine) -> None:
    waits = await Waits.open(engine)
    await parked(waits, *["fail"] * 120)
    await engine.advance(1001)
    assert await idle(engine).scan_once(NAME) == ScanResult(processed=120)


async def test_a_signal_came_first(engine: Engine) -> None:
    waits = await Waits.open(engine)
    (one,) = await parked(waits, "fail")
    tag = one.handle.execution_id.tag
    await waits.send(one)
    await engine.advance(1001)
    # As if the scanner had read the index just before.
    await plant(engine, tag, NAME, one.handle.execution_id)
    await plant(engine, tag, NAME, engine.new_id())
    assert await idle(engine).scan_once(NAME) == ScanResult(processed=2)
    state = await engine.backend.reads.read_execution_state(one.handle.execution_id)
    assert state is PublicState.WAITING


@pytest.mark.corrupts
async def test_a_later_suspension_keeps_its_own_time(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await held(engine)
    due = await engine.now() + 60_000
    await waits.park(handle=handle, timeout_at=due)
    await plant(engine, handle.execution_id.tag, NAME, handle.execution_id)
    assert await idle(engine).scan_once(NAME) == ScanResult()
    assert (await engine.vector(handle.execution_id)).lifecycle_phase == "suspended"


async def test_only_what_the_filter_accepts(engine: Engine) -> None:
    waits = await Waits.open(engine)
    (ours,) = await parked(waits, "fail", namespace="acme")
    (theirs,) = await parked(waits, "fail")
    await engine.advance(1001)
    accept = ScannerFilter(namespace="acme")
    assert await idle(engine, accept=accept).scan_once(NAME) == ScanResult(processed=1)
    left = await members(engine, theirs.handle.execution_id.tag, NAME)
    assert left == [theirs.handle.execution_id]
    assert ours.handle.execution_id not in left


@pytest.mark.corrupts
async def test_a_poison_item_stays_and_the_others_go_on(engine: Engine) -> None:
    waits = await Waits.open(engine)
    poison, healthy = await parked(waits, "fail", "fail")
    await break_record(engine, poison.handle.execution_id)
    await engine.advance(1001)
    assert await idle(engine).scan_once(NAME) == ScanResult(processed=1, errors=1)
    tag = healthy.handle.execution_id.tag
    assert await members(engine, tag, NAME) == [poison.handle.execution_id]


async def test_a_running_supervisor_ends_pauses(engine: Engine) -> None:
    waits = await Waits.open(engine)
    async with running(engine.backend):
        (one,) = await parked(waits, "auto_resume")
        await engine.advance(1001)

        async def resumed() -> bool:
            vector = await engine.vector(one.handle.execution_id)
            return vector.lifecycle_phase == "runnable"

        await until(resumed)
    claim = await engine.claim()
    assert claim.resume_cause is not None
    assert claim.resume_cause.trigger == "timeout"
