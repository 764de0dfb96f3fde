"""One primary hangs or is dead: work on the others is submitted, found and run at once."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.executions import Completed
from flowfabric.core.contracts.leases import Renewed
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scheduler.claim_desk import ClaimDesk
from flowfabric.sdk.runtime import Handler
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.server.process import ServerProcess
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import slot_of
from tests.support.cluster import TestCluster
from tests.support.engine import Engine
from tests.support.http_engine import serving as over_server
from tests.support.scanning import QUICK, running
from tests.support.sdk import config, opener, serving, state, submit, until

COUNTS = PartitionCounts(flow=12)
REQUEST = ClaimRequest("default", "w", "w-1")
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


def served_node(cluster: TestCluster) -> int:
    return (away(cluster) + 1) % 3


def served(cluster: TestCluster) -> int:
    """A partition on another node."""
    return partitions(cluster, served_node(cluster))[0]


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


@asynccontextmanager
async def remote_worker(
    engine: Engine, handler: Handler
) -> AsyncGenerator[tuple[Worker, ServerProcess]]:
    """A worker that claims through a server."""
    async with over_server(engine) as server:
        host, port = server.address
        connect = partial(HttpBackend.connect, ServerAddress(host=host, port=port))
        async with (
            await Worker.connect(config(max_concurrent_tasks=3), connect) as worker,
            serving(worker, {"job": handler}),
        ):
            yield worker, server


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_a_remote_worker_runs_what_is_elsewhere(
    engine: Engine, cluster: TestCluster, how: str
) -> None:
    ran, held, end = asyncio.Queue[str](), asyncio.Event(), asyncio.Event()
    partition, lost = served(cluster), partitions(cluster, away(cluster))
    (stuck,) = await submit(engine.backend, partition=lost[0])
    (first,) = await submit(engine.backend, partition=partition)

    async def handler(task: ClaimedTask) -> None:
        if task.execution_id == stuck:
            held.set()
            await end.wait()
        ran.put_nowait(task.execution_id)

    async with remote_worker(engine, handler) as (_, server):
        assert await ran.get() == first
        await held.wait()
        await leave(cluster, how)
        try:
            # Its completion cannot be stored, and there are hints at partitions on that node.
            end.set()
            assert await ran.get() == stuck
            for offer in server.app.services.remote.desk._offers.values():
                for number in lost:
                    offer.lanes["default"].add(f"{{fp:{number}}}")
            # Each claim stores a note on a node of its own.
            for _ in range(8):
                (execution_id,) = await submit(engine.backend, partition=partition)
                async with asyncio.timeout(SOON_S):
                    assert await ran.get() == execution_id
                    await until(lambda each=execution_id: is_in(engine, each, "completed"))
        finally:
            await come_back(cluster, how)
        if how == "hangs":
            await until(lambda: is_in(engine, stuck, "completed"), timeout=20)
        assert ran.empty()


async def test_a_claim_gets_what_a_slow_server_answers_late(
    engine: Engine, cluster: TestCluster
) -> None:
    lost = partitions(cluster, away(cluster))[0]
    (execution_id,) = await submit(engine.backend, partition=lost)
    desk = ClaimDesk(engine.backend)
    await leave(cluster, "hangs")
    try:
        desk.offer(["default"], "", None, "w-1").lanes["default"].add(f"{{fp:{lost}}}")
        claiming = asyncio.create_task(desk.claim({"default": REQUEST}, 1, 30.0))
        await until(lambda: desk.waiting > 0, "a claim that waits")
    finally:
        await come_back(cluster, "hangs")
    found = await claiming
    assert [claim.execution_id for claim in found.claims] == [execution_id]
    await desk.aclose()


async def test_what_comes_after_the_answer_is_given_back(
    engine: Engine, cluster: TestCluster
) -> None:
    lost = partitions(cluster, away(cluster))[0]
    (late,) = await submit(engine.backend, partition=lost)
    (soon,) = await submit(engine.backend, partition=served(cluster))
    desk = ClaimDesk(engine.backend)
    await leave(cluster, "hangs")
    try:
        lane = desk.offer(["default"], "", None, "w-1").lanes["default"]
        lane.add(f"{{fp:{lost}}}")
        lane.add(soon.tag)
        async with asyncio.timeout(SOON_S):
            found = await desk.claim({"default": REQUEST}, 2)
        assert [claim.execution_id for claim in found.claims] == [soon]
    finally:
        await come_back(cluster, "hangs")
    await until(lambda: was_released(engine, late), "the release", 20)
    await desk.aclose()


async def test_closing_cuts_no_claim_short(engine: Engine, cluster: TestCluster) -> None:
    (execution_id,) = await submit(engine.backend, partition=served(cluster))
    desk = ClaimDesk(engine.backend)
    offer = desk.offer(["default"], "", None, "w-1")
    offer.lanes["default"].add(execution_id.tag)
    offer.lanes["default"].swept_at = time.monotonic()
    claiming = asyncio.create_task(desk.claim({"default": REQUEST}, 1, 30.0))
    while offer.visits is None or ("default", execution_id.tag) not in offer.visits:  # noqa: ASYNC110 - it lasts a few turns of the loop
        await asyncio.sleep(0)
    await desk.aclose()
    found = await claiming
    assert [claim.execution_id for claim in found.claims] == [execution_id]


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_a_batch_renews_and_completes_what_is_elsewhere(
    engine: Engine, cluster: TestCluster, how: str
) -> None:
    numbers = [partitions(cluster, away(cluster))[0], *partitions(cluster, served_node(cluster))]
    for number in numbers:
        await submit(engine.backend, partition=number)
    claims = [
        claim
        for number in numbers
        for claim in (await engine.backend.claims.claim_many(REQUEST, f"{{fp:{number}}}", 1)).claims
    ]
    handles = [claim.handle for claim in claims]
    await leave(cluster, how)
    try:
        async with asyncio.timeout(SOON_S):
            lost, *renewed = await engine.backend.leases.renew_many(handles)
        assert isinstance(lost, TransportError)
        assert all(isinstance(each, Renewed) for each in renewed)
        async with asyncio.timeout(SOON_S):
            lost, *completed = await engine.backend.executions.complete_many(
                [Completion(handle) for handle in handles]
            )
        assert isinstance(lost, TransportError)
        assert all(isinstance(each, Completed) for each in completed)
        with pytest.raises(TransportError):
            await engine.backend.leases.renew_many(handles[:1])
    finally:
        await come_back(cluster, how)


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


async def test_scanners_do_what_is_due_elsewhere(engine: Engine, cluster: TestCluster) -> None:
    backend = engine.backend
    partition = served(cluster)
    for each in (*partitions(cluster, away(cluster)), partition):
        await submit(backend, partition=each)
    settings = msgspec.structs.replace(QUICK, territory_refresh_s=2, clock_trust_s=5)
    async with running(backend, settings) as supervisor:
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 1, "a few cycles")
        await leave(cluster, "hangs")
        try:
            (delayed,) = await submit(backend, partition=partition, delay_ms=200)
            await until(lambda: is_in(engine, delayed, "waiting"), "the end of the delay", 8)
        finally:
            await come_back(cluster, "hangs")
        await until(
            lambda: not any(each.stuck for each in supervisor.status().values()), timeout=20
        )


async def is_in(engine: Engine, execution_id: ExecutionId, name: str) -> bool:
    return await state(engine.backend, execution_id) == name


async def was_released(engine: Engine, execution_id: ExecutionId) -> bool:
    info = await engine.backend.reads.read_execution_info(execution_id)
    return info.total_attempt_count == 1 and await is_in(engine, execution_id, "waiting")
