"""Workers and waiters on a cluster: rings, results, moved slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from tests.support.cluster import TestCluster
from tests.support.sdk import config, opener, serving, submit, until, watch_of


@pytest.fixture
async def client(cluster: TestCluster) -> AsyncIterator[Client]:
    backend = await ValkeyBackend.connect(parse_url(cluster.url), prepare_with=PartitionCounts())
    await backend.transport.call_all_primaries("FLUSHALL")
    await backend.meta.prepare()
    async with Client(backend) as client:
        yield client


async def work(task: ClaimedTask) -> bytes:
    return task.input_payload


async def test_idle_worker_wakes_at_once_wherever_work_appears(
    cluster: TestCluster, client: Client
) -> None:
    # Without a ring, it would look again in an hour.
    settings = config(claim_poll_interval_ms=3_600_000, max_concurrent_tasks=4)
    async with (
        await Worker.connect(settings, opener(cluster.url)) as worker,
        serving(worker, {"job": work}) as runtime,
    ):
        claiming: Any = runtime._claiming
        bell = claiming._doorbell
        await until(lambda: bell.listening and len(bell._primaries) == 3, "three subscriptions")
        for partition in (None, 0, 100, 200, 255):
            (execution_id,) = await submit(client.backend, partition=partition, input_payload=b"x")
            assert await client.result(execution_id, timeout=30) == b"x"


async def test_many_waiters_over_slots(cluster: TestCluster, client: Client) -> None:
    async with (
        await Worker.connect(config(max_concurrent_tasks=8), opener(cluster.url)) as worker,
        serving(worker, {"job": work}) as runtime,
    ):
        waiters = [
            asyncio.create_task(client.result(execution_id, timeout=30))
            for partition in range(0, 256, 16)
            for execution_id in await submit(client.backend, 5, partition=partition)
        ]
        assert await asyncio.gather(*waiters) == [b""] * len(waiters)
        assert runtime.summary.completed == len(waiters)
    await until(lambda: watch_of(client).waiting == 0, "no waiter left")
