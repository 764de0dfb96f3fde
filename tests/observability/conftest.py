"""Metrics are on for these tests, and off again afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric import observability
from flowfabric.engine.metrics import Meter
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import prepared_backend
from tests.support.server import TestServer


@pytest.fixture
def meter() -> Meter:
    """The numbers of the test, from zero."""
    return observability.enable()


@pytest.fixture
async def backend(valkey: TestServer, meter: Meter) -> AsyncIterator[ValkeyBackend]:
    """A prepared engine on an empty keyspace whose calls are counted."""
    async with prepared_backend(valkey.url) as prepared:
        yield prepared
