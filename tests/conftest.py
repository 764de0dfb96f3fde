"""Fixtures: one private Valkey per test process, a fresh engine per test, and a leak check."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from flowfabric.engine import metrics
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.clock import include_test_functions
from tests.support.cluster import TestCluster
from tests.support.engine import Engine, prepared_backend
from tests.support.leaks import find_leaks
from tests.support.monotonic import move_clock
from tests.support.server import TestServer

# How long an example takes says something about the machine, nothing about the code.
settings.register_profile("flowfabric", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flowfabric")

include_test_functions()
move_clock()


def pytest_collection_finish() -> None:
    """Spare garbage collections the ten thousand collected tests: each took 0.2 s over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def metrics_off_again() -> Iterator[None]:
    """What a server in the test process turned on."""
    yield
    metrics.disable()


@pytest.fixture(scope="session")
def valkey() -> Iterator[TestServer]:
    """The test process's own server; tests share it and each starts with an empty keyspace."""
    server = TestServer("--maxmemory-policy", "noeviction", "--appendonly", "yes")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    """A three-node cluster on loopback."""
    cluster = TestCluster()
    asyncio.run(cluster.form())
    yield cluster
    cluster.stop()


@pytest.fixture
async def backend(valkey: TestServer) -> AsyncIterator[ValkeyBackend]:
    """A prepared engine on an empty keyspace, with the test clock at the server's time."""
    async with prepared_backend(valkey.url) as prepared:
        yield prepared


@pytest.fixture
async def engine(backend: ValkeyBackend, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """The engine with shorthands. Afterwards no key may be left without an owner.

    A test that damages stored data on purpose says so with `@pytest.mark.corrupts`.
    """
    helper = Engine(backend)
    yield helper
    if request.node.get_closest_marker("corrupts") is None:
        assert await find_leaks(backend) == []
