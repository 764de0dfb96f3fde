"""A worker factory on the engine of the test; whatever it made is closed afterwards."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from flowfabric.sdk.worker import Worker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import config, opener
from tests.support.server import TestServer

MakeWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def make_worker(
    engine: Engine, valkey: TestServer, proxy: FaultProxy
) -> AsyncIterator[MakeWorker]:
    """Connects workers; the urls are the addresses of the worker and of its lease keeper."""
    # The proxy must outlive the workers that use it.
    made: list[Worker] = []

    async def make(*urls: str, request_timeout: float = 5.0, **settings: Any) -> Worker:
        place = opener(*(urls or (valkey.url,)), request_timeout=request_timeout)
        worker = await Worker.connect(config(**settings), place)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        await worker.aclose()
    keepers = [t.name for t in threading.enumerate() if t.name == "ff-lease-keeper"]
    assert keepers == []


@pytest.fixture
def proxy(valkey: TestServer) -> Iterator[FaultProxy]:
    with FaultProxy(valkey.socket_path) as proxy:
        yield proxy
