"""A three-node cluster on loopback, one per test module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import ClusterTransport
from tests.support.cluster import TestCluster
from tests.support.engine import Engine


@pytest.fixture
async def client(cluster: TestCluster) -> AsyncIterator[ClusterTransport]:
    client = ClusterTransport(parse_url(cluster.url))
    await client.wait_ready()
    await client.call_all_primaries("FLUSHALL")
    yield client
    await client.aclose()


@pytest.fixture
async def backend(cluster: TestCluster) -> AsyncIterator[ValkeyBackend]:
    """A prepared engine of few partitions on an emptied cluster."""
    counts = PartitionCounts(flow=32)
    async with await ValkeyBackend.connect(parse_url(cluster.url), prepare_with=counts) as backend:
        await backend.transport.call_all_primaries("FLUSHALL")
        await backend.meta.prepare()
        await backend.secrets.seed_at_boot("ab" * 32)
        yield backend


@pytest.fixture
def engine(backend: ValkeyBackend) -> Engine:
    """The engine with shorthands."""
    return Engine(backend)
