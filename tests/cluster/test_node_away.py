"""One primary hangs or is dead: work on the others is submitted, found and run at once."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import slot_of
from tests.support.cluster import TestCluster
from tests.support.scanning import QUICK, running
from tests.support.sdk import config, opener, serving, state, submit, until

COUNTS = PartitionCounts(flow=12)
SOON_S = 3.0
"""Less than a call waits for a server that hangs (5 s) or cannot be reached (10 s)."""


@pytest.fixture
async def backend(cluster: TestCluster) -> AsyncIterator[ValkeyBackend]:
    for node in range(3):
        await cluster.call(node, "FLUSHALL")
        await cluster.call(node, "CONFIG", "SET", "cluster-require-full-coverage", "no")
    address = parse_url(cluster.url)
    async with await ValkeyBackend.connect(address, prepare_with=COUNTS) as backend:
        await backend.meta.prepare()
        yield backend


def away(cluster: TestCluster) -> int:
    """The node that goes away: the one with the registry of partitions."""
    return cluster.owner(slot_of(keys.PARTITIONS))


def partitions(cluster: TestCluster, node: int) -> list[int]:
    return [n for n in range(COUNTS.flow) if cluster.owner(slot_of(f"{{fp:{n}}}")) == node]


def served(cluster: TestCluster) -> int:
    """A partition on another node."""
    return partitions(cluster, (away(cluster) + 1) % 3)[0]


async def leave(cluster: TestCluster, how: str) -> None:
    if how == "hangs":
        os.kill(cluster.nodes[away(cluster)].pid, signal.SIGSTOP)
    else:
        cluster.nodes[away(cluster)].kill()


async def come_back(cluster: TestCluster, how: str) -> None:
    if how == "hangs":
        os.kill(cluster.nodes[away(cluster)].pid, signal.SIGCONT)
    else:
        await asyncio.to_thread(cluster.nodes[away(cluster)].start)
    await cluster.agree(3)


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_a_worker_runs_what_is_elsewhere(
    backend: ValkeyBackend, cluster: TestCluster, how: str
) -> None:
    ran = asyncio.Queue[str]()

    async def handler(task: ClaimedTask) -> None:
        ran.put_nowait(task.execution_id)

    partition = served(cluster)
    await submit(backend, partition=partition)
    async with (
        await Worker.connect(config(max_concurrent_tasks=2), opener(cluster.url)) as worker,
        serving(worker, {"job": handler}) as runtime,
    ):
        await ran.get()
        claiming: Any = runtime._claiming
        await until(lambda: claiming._doorbell.listening, "an idle worker")
        await leave(cluster, how)
        try:
            # It has a hint there, and is about to register as idle.
            for lost in partitions(cluster, away(cluster)):
                claiming._lanes["default"].add(f"{{fp:{lost}}}")
            for primary in claiming._doorbell._primaries:
                primary.register_at = -math.inf
            claiming._wake.set()
            claiming._doorbell._woken.set()
            for _ in range(3):
                (execution_id,) = await submit(backend, partition=partition)
                async with asyncio.timeout(SOON_S):
                    assert await ran.get() == execution_id
        finally:
            await come_back(cluster, how)
        await until(lambda: claiming._doorbell.connected, "all primaries heard", 20)
        assert worker.claims.free == 2


async def test_known_places_take_work_without_the_registry(
    backend: ValkeyBackend, cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = served(cluster)
    await submit(backend, partition=partition)
    await leave(cluster, "hangs")
    try:
        monkeypatch.setattr(backend.places, "_repeat_at", 0.0)
        async with asyncio.timeout(SOON_S):
            await submit(backend, partition=partition)
    finally:
        await come_back(cluster, "hangs")


async def test_a_search_finds_what_is_elsewhere(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    partition = served(cluster)
    await submit(backend, partition=partition)
    lost = partitions(cluster, away(cluster))
    places = [("default", f"{{fp:{n}}}") for n in (*lost, partition)]
    await leave(cluster, "hangs")
    try:
        async with asyncio.timeout(SOON_S):
            assert await backend.wakeups.find_work(places) == places[-1:]
            with pytest.raises(TransportError):
                await backend.wakeups.find_work(places[:-1])
    finally:
        await come_back(cluster, "hangs")


async def test_scanners_do_what_is_due_elsewhere(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    partition = served(cluster)
    for each in (*partitions(cluster, away(cluster)), partition):
        await submit(backend, partition=each)
    settings = msgspec.structs.replace(QUICK, territory_refresh_s=2, clock_trust_s=5)
    async with running(backend, settings) as supervisor:
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 1, "a few cycles")
        await leave(cluster, "hangs")
        try:
            (delayed,) = await submit(backend, partition=partition, delay_ms=200)
            await until(lambda: is_waiting(backend, delayed), "the end of the delay", 8)
        finally:
            await come_back(cluster, "hangs")
        await until(
            lambda: not any(each.stuck for each in supervisor.status().values()), timeout=20
        )


async def is_waiting(backend: ValkeyBackend, execution_id: ExecutionId) -> bool:
    return await state(backend, execution_id) == "waiting"
