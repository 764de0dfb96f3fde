"""A three-node cluster on loopback, one per test module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.valkey.address import parse_url
from flowfabric.valkey.cluster import ClusterTransport
from tests.support.cluster import TestCluster


@pytest.fixture
async def client(cluster: TestCluster) -> AsyncIterator[ClusterTransport]:
    client = ClusterTransport(parse_url(cluster.url))
    await client.wait_ready()
    await client.call_all_primaries("FLUSHALL")
    yield client
    await client.aclose()
