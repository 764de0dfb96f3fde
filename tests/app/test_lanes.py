"""Applications on lanes that are spread over partitions, also while that changes (04 S5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import flowfabric as ff
from tests.support.engine import Engine
from tests.support.sdk import until
from tests.support.server import TestServer

BUSY = "busy"


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def test_the_first_submission_of_a_process_is_spread_already(
    app: ff.Fabric, engine: Engine
) -> None:
    await engine.backend.lanes.set_lane_config(BUSY, placement="spread", shards=16)
    runs = await app.submit_many(app.named("job", lane=BUSY), [()] * 400)
    assert len({run.id.partition for run in runs}) == 16
    one = await app.named("job", lane=BUSY).submit()
    assert one.id.partition in {run.id.partition for run in runs}


async def test_a_worker_serves_every_shard(app: ff.Fabric, engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config(BUSY, placement="spread")

    @app.task(lane=BUSY)
    async def double(n: int) -> int:
        return 2 * n

    runs = await app.submit_many(double, [[n] for n in range(300)])
    assert len({run.id.partition for run in runs}) > 100
    worker = app.worker(lanes=[BUSY])
    serving = asyncio.create_task(worker.run(signals=False))
    try:
        assert [await run.result(timeout=30) for run in runs] == [2 * n for n in range(300)]
        # An idle worker is woken for any shard.
        late = await asyncio.gather(*(double.submit(n) for n in range(20)))
        assert [await run.result(timeout=10) for run in late] == [2 * n for n in range(20)]
    finally:
        worker.stop()
        await serving


async def test_keys_hold_while_the_placement_changes(
    app: ff.Fabric, engine: Engine, valkey: TestServer
) -> None:
    """Four submitters repeat the same keys while an operator changes the shards."""
    keys = [f"order-{n}" for n in range(12)]
    seen: dict[str, set[str]] = {key: set() for key in keys}
    rounds = 0
    stop = asyncio.Event()

    async def submit(fabric: ff.Fabric) -> None:
        nonlocal rounds
        while not stop.is_set():
            job = fabric.named("job", lane=BUSY)
            for key in keys:
                seen[key].add((await job.options(idempotency_key=key).submit()).id)
            rounds += 1

    others = [ff.Fabric(valkey.url) for _ in range(3)]
    submitting = [asyncio.create_task(submit(each)) for each in (app, *others)]
    try:
        for shards in (8, 64, 3, 256, 1, 8):
            before = rounds
            await engine.backend.lanes.set_lane_config(BUSY, placement="spread", shards=shards)
            await until(lambda at=before: rounds >= at + 4, "they submit")
    finally:
        stop.set()
        await asyncio.gather(*submitting)
        await asyncio.gather(*(each.aclose() for each in others))
    assert {key: len(ids) for key, ids in seen.items()} == dict.fromkeys(keys, 1)
