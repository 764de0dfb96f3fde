"""Waiting callers follow a slot that moves to another primary, without any fallback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, NewExecution
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import slot_of
from flowfabric.valkey.transport import Connection
from tests.support.cluster import TestCluster, until

LANE = "moving"
Pair = tuple[ValkeyBackend, ValkeyBackend]


@pytest.fixture
async def pair(cluster: TestCluster) -> AsyncIterator[Pair]:
    """Two clients: what one of them learns of the move is no help to the other."""
    address, counts = parse_url(cluster.url), PartitionCounts(flow=32)
    async with await ValkeyBackend.connect(address, prepare_with=counts) as first:
        await first.transport.call_all_primaries("FLUSHALL")
        await first.meta.prepare()
        async with await ValkeyBackend.connect(address) as second:
            yield first, second


async def create(backend: ValkeyBackend) -> ExecutionId:
    execution_id = ExecutionId.solo(LANE, backend.counts)
    new = NewExecution(execution_id=execution_id, execution_kind="job", lane_id=LANE)
    assert isinstance(await backend.executions.create_execution(new), Created)
    return execution_id


@asynccontextmanager
async def moved(cluster: TestCluster, tag: str) -> AsyncGenerator[None]:
    """The tag's slot lives elsewhere in the block."""
    slot = slot_of(tag)
    home = cluster.owner(slot)
    target = (home + 1) % 3
    await cluster.move(slot, home, target)
    try:
        yield
    finally:
        await cluster.move(slot, target, home)


async def test_a_waiting_caller_gets_the_result(pair: Pair, cluster: TestCluster) -> None:
    waiting, acting = pair
    execution_id = await create(acting)
    tag = execution_id.tag

    async def see_the_end() -> None:
        while (await waiting.reads.read_execution_state(execution_id)).value != "completed":
            await waiting.events.wait_ended(execution_id)

    async def is_blocked() -> bool:
        lists = [await cluster.call(node, "CLIENT", "LIST") for node in range(3)]
        return any(b"cmd=xread" in listed for listed in lists)

    waiter = asyncio.create_task(see_the_end())
    await until(is_blocked)
    async with moved(cluster, tag):
        await until(is_blocked)
        (claim,) = (await acting.claims.claim_many(ClaimRequest(LANE, "w", "w-1"), tag, 1)).claims
        await acting.executions.complete(claim.handle, b"done")
        began = time.monotonic()
        await waiter
        assert time.monotonic() - began < 5


async def test_an_idle_worker_hears_the_next_ring(pair: Pair, cluster: TestCluster) -> None:
    hearing, acting = pair
    home = ExecutionId.solo(LANE, hearing.counts).tag
    bell = hearing.wakeups.listen([LANE])
    while await bell.wait(0.05):
        pass
    async with moved(cluster, home):
        # It notices by itself, has the caller look around in case it missed a ring, and listens.
        began = time.monotonic()
        await bell.wait(30)
        while await bell.wait(0.05):
            pass
        assert time.monotonic() - began < 5
        heard = asyncio.create_task(bell.wait(30))
        await create(acting)
        assert await heard == [(LANE, home)]
    await bell.aclose()


async def test_a_failed_dial_is_made_up_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three primaries does not answer at first: its rings are heard afterwards."""
    hearing, acting = pair
    bell: Any = hearing.wakeups.listen([LANE])
    dial, dialled = hearing.transport.blocking, 0

    async def second_fails(*args: Any, **options: Any) -> Connection:
        nonlocal dialled
        dialled += 1
        if dialled == 2:
            raise TransportError("transport", "no answer")
        return await dial(*args, **options)

    monkeypatch.setattr(hearing.transport, "blocking", second_fails)
    # It hears the others meanwhile.
    await bell.wait(0.05)
    assert bell._primaries
    assert not bell.connected
    while not bell.connected or await bell.wait(0.05):
        await bell.wait(0.05)
    assert dialled == 4
    heard = asyncio.create_task(bell.wait(30))
    execution_id = await create(acting)
    assert await heard == [(LANE, execution_id.tag)]
    await bell.aclose()
