"""An application on the engine of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import flowfabric as ff
from tests.support.engine import Engine
from tests.support.server import TestServer
from tests.support.waiting import SECRET


@pytest.fixture
async def waiting_app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    """An application whose handlers can wait."""
    await engine.backend.secrets.seed_at_boot(SECRET)
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric
