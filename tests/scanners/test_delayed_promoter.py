from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.state import PublicState
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.scanning import DEFAULTS, create_delayed, idle, members, plant, rings, running
from tests.support.sdk import until


async def test_due_becomes_eligible_and_rings(engine: Engine) -> None:
    (delayed,) = await create_delayed(engine, 1)
    supervisor = idle(engine)
    assert await supervisor.scan_once("delayed_promoter") == ScanResult()
    await engine.advance(1001)
    assert await supervisor.scan_once("delayed_promoter") == ScanResult(processed=1)
    assert await engine.backend.reads.read_execution_state(delayed) is PublicState.WAITING
    assert await rings(engine) == [str(delayed.partition).encode()]


async def test_a_retry_keeps_its_attempt_state(engine: Engine) -> None:
    handle = await engine.running(
        policy={"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
    )
    await engine.backend.executions.fail(handle, "no", "transient")
    await engine.advance(501)
    assert (await idle(engine).scan_once("delayed_promoter")).processed == 1
    claim = await engine.claim()
    assert claim.handle.kind == "fresh"
    attempts = await engine.backend.reads.read_attempts(handle.execution_id)
    assert [attempt.attempt_type for attempt in attempts] == ["initial", "retry"]


async def test_every_registered_lane_also_with_a_colon_in_its_name(engine: Engine) -> None:
    due = await engine.now() + 60_000
    ids = [await engine.create(lane=lane, delay_until=due) for lane in ("a:b", "50%", "other lane")]
    await engine.advance(60_010)
    assert (await idle(engine).scan_once("delayed_promoter")).processed == 3
    states = [await engine.backend.reads.read_execution_state(one) for one in ids]
    assert states == [PublicState.WAITING] * 3


async def test_one_partition_only(engine: Engine) -> None:
    due = await engine.now() + 60_000
    here = await engine.create(lane="default", delay_until=due)
    there = await engine.create(lane="another", delay_until=due)
    assert here.partition != there.partition
    await engine.advance(60_010)
    found = await idle(engine).scan_once("delayed_promoter", there.partition)
    assert found == ScanResult(processed=1)
    assert await engine.backend.reads.read_execution_state(here) is PublicState.DELAYED


async def test_entries_that_do_not_belong_are_cleaned(engine: Engine) -> None:
    ghost, waiting = engine.new_id(), await engine.create()
    held = await engine.running(lane="default", priority=5)
    for stray in (ghost, waiting, held.execution_id):
        await plant(engine, ghost.tag, "lane:default:delayed", stray)
    assert await idle(engine).scan_once("delayed_promoter") == ScanResult(processed=3)
    assert await members(engine, ghost.tag, "lane:default:delayed") == []
    assert await engine.backend.reads.read_execution_state(waiting) is PublicState.WAITING


@pytest.mark.corrupts
async def test_due_in_the_index_but_not_by_its_record(engine: Engine) -> None:
    (delayed,) = await create_delayed(engine, 1, in_ms=60_000)
    await plant(engine, delayed.tag, "lane:default:delayed", delayed)
    assert await idle(engine).scan_once("delayed_promoter") == ScanResult()
    assert await engine.backend.reads.read_execution_state(delayed) is PublicState.DELAYED


async def test_promoted_within_the_interval_of_its_time(engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    async with running(engine.backend, DEFAULTS) as supervisor:
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 0)
        started = loop.time()
        (delayed,) = await create_delayed(engine, 1, in_ms=300)

        async def waits() -> bool:
            return await engine.backend.reads.read_execution_state(delayed) is PublicState.WAITING

        await until(waits)
        late = loop.time() - started - 0.3
    assert 0 <= late < 0.75 + 0.25, "the interval, and what a busy machine adds"
