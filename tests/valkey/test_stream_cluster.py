"""Streams on a cluster: connections by node, and slots that move under a reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import slot_of
from tests.support.cluster import TestCluster, until
from tests.support.engine import Engine
from tests.support.streams import append, frames


@pytest.fixture
async def clustered(cluster: TestCluster) -> AsyncIterator[Engine]:
    backend = await ValkeyBackend.connect(parse_url(cluster.url), prepare_with=PartitionCounts())
    yield Engine(backend)
    await backend.aclose()


async def connections(cluster: TestCluster) -> int:
    total = 0
    for node in range(cluster.size):
        info: Any = await cluster.call(node, "INFO", "stats")
        total += int(info.decode().split("total_connections_received:")[1].split()[0])
    return total


async def blocked(cluster: TestCluster) -> bool:
    infos = [await cluster.call(node, "INFO", "clients") for node in range(cluster.size)]
    return any(b"blocked_clients:1" in info for info in infos)


async def test_connections_are_shared_by_the_tags_of_a_node(
    clustered: Engine, cluster: TestCluster
) -> None:
    backend = clustered.backend
    handles = [await clustered.running(lane=f"lane-{n}") for n in range(12)]
    assert len({handle.execution_id.tag for handle in handles}) > cluster.size
    for handle in handles:
        await append(clustered, handle, b"x")
        assert len((await backend.streams.read_stream(handle.execution_id, 0)).frames) == 1
    before = await connections(cluster)
    for handle in handles:
        await backend.streams.tail_stream(handle.execution_id, 0, block_ms=1000)
        await backend.streams.read_stream(handle.execution_id, 0)
    # Counting takes one connection to each node.
    assert await connections(cluster) - before == cluster.size


async def test_a_slot_that_moves_under_a_reader(clustered: Engine, cluster: TestCluster) -> None:
    backend = clustered.backend
    handle = await clustered.running(lane="moving")
    tag = handle.execution_id.tag
    slot, source = slot_of(tag), cluster.owner(slot_of(tag))
    target = (source + 1) % cluster.size
    await backend.streams.append_frames(handle, frames("a", "b"))
    page = await backend.streams.read_stream(handle.execution_id, 0)
    tail = asyncio.ensure_future(
        backend.streams.tail_stream(handle.execution_id, 0, after=page.next_cursor, block_ms=20_000)
    )
    await until(lambda: blocked(cluster))
    await cluster.move(slot, source, target)
    await until(lambda: blocked(cluster))
    await append(clustered, handle, b"c")
    async with asyncio.timeout(10):
        assert [frame.payload for frame in (await tail).frames] == [b"c"]
    await cluster.move(slot, target, source)
    # Nothing but reads: they find the new place by themselves.
    for _ in range(3):
        page = await backend.streams.read_stream(handle.execution_id, 0)
        assert [frame.payload for frame in page.frames] == [b"a", b"b", b"c"]
    await backend.executions.complete(handle)
    page = await backend.streams.tail_stream(
        handle.execution_id, 0, after=page.next_cursor, block_ms=9000
    )
    assert page.closed_reason == "attempt_success"
