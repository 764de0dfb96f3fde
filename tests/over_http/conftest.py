"""The engine through a server: conformance tests of this folder run over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import Engine
from tests.support.http_engine import over_http
from tests.support.leaks import find_leaks


@pytest.fixture
async def engine(backend: ValkeyBackend, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """The engine of a conformance test; what clients may do goes over HTTP."""
    async with over_http(Engine(backend)) as found:
        yield found
    if request.node.get_closest_marker("corrupts") is None:
        assert await find_leaks(backend) == []
