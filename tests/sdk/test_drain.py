"""A worker that an operator drains (04 §9)."""

from __future__ import annotations

import asyncio

import flowfabric as ff
from flowfabric.engine.api.workers import Draining
from tests.support.engine import Engine
from tests.support.sdk import until
from tests.support.server import TestServer


async def test_a_drained_worker_finishes_and_leaves_the_rest_to_others(
    engine: Engine, valkey: TestServer
) -> None:
    async with ff.Fabric(valkey.url) as app:
        started, go = asyncio.Event(), asyncio.Event()

        @app.task
        async def slow() -> str:
            started.set()
            await go.wait()
            return "done"

        first = await slow.submit()
        worker = app.worker()
        serving = asyncio.create_task(worker.run(signals=False))
        await started.wait()
        client = await app.client()
        (entry,) = await client.workers()
        assert await client.drain_worker(entry.worker_instance_id) == Draining(1)
        second = await slow.submit()
        leases = await client.list_worker_leases(entry.worker_instance_id)
        assert [held.execution_id for held in leases.entries] == [first.id]
        go.set()
        assert await first.result(timeout=10) == "done"
        runtime = worker._runtime  # pyright: ignore[reportPrivateUsage]
        assert runtime is not None
        sdk_worker = runtime.worker
        await until(lambda: sdk_worker.claims.draining, "it knows that it is drained")
        assert (await second.state()).value == "waiting"
        assert not serving.done()
        other = app.worker()
        also = asyncio.create_task(other.run(signals=False))
        assert await second.result(timeout=10) == "done"
        # The heartbeat is what counts.
        await engine.backend.transport.call("DEL", "ff:idx:{default}:drains")
        await sdk_worker._announce()  # pyright: ignore[reportPrivateUsage]
        assert not sdk_worker.claims.draining
        for each in (worker, other):
            each.stop()
        await asyncio.gather(serving, also)


async def test_lanes_and_workers_of_a_client(engine: Engine, valkey: TestServer) -> None:
    async with ff.Fabric(valkey.url) as app:
        client = await app.client()
        assert await client.set_lane_state("mails", "paused", "maintenance") == "active"
        await client.set_lane_config("mails", placement="spread", shards=4)
        assert await client.lanes() == (["default", "mails"], None)
        lane = await client.lane("mails")
        assert (lane.state, lane.reason, lane.shards) == ("paused", "maintenance", 4)
        assert await client.workers() == []
        assert (await client.list_expired_leases()).entries == ()
