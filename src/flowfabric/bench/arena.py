"""The private server a scenario runs on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

from flowfabric.bench.command import Aof
from flowfabric.core.partition import PartitionCounts, solo_partition
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.valkey.connect import open_backend, start_embedded

LANE = "default"
_END_S = 30.0
_POLL_S = 0.001


class Arena:
    """A server of its own with a prepared engine on it."""

    def __init__(self, url: str, backend: Backend) -> None:
        self.url = url
        self.backend = backend
        self.partition = solo_partition(LANE, backend.counts)
        """The partition that holds the lane's executions."""
        self.tag = f"{{fp:{self.partition}}}"

    async def seed_secret(self) -> None:
        """Make waits possible: their tokens are signed."""
        await self.backend.secrets.seed_at_boot(secrets.token_hex(32))

    async def server_cpu_s(self) -> float:
        """Processor time of the server's main thread."""
        return (await self.backend.meta.usage()).cpu_s

    async def until_done(self) -> None:
        """Return when everything submitted to the lane is claimed and completed."""
        # A claim moves an execution from the first to the second in one step.
        await poll(self._nothing_waits)
        await poll(self._nothing_runs)

    async def _nothing_waits(self) -> bool:
        return not await self.backend.wakeups.find_work(LANE, [self.tag])

    async def _nothing_runs(self) -> bool:
        lane = self.backend.listings.list_lane
        return not (await lane(LANE, "active", partition=self.partition, limit=1)).executions


async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


@contextlib.asynccontextmanager
async def arena(aof: Aof) -> AsyncGenerator[Arena]:
    """A fresh server; it and its data are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ff-bench-", ignore_cleanup_errors=True) as folder:
        server = await asyncio.to_thread(start_embedded, Path(folder), aof=aof)
        pid = server.pid
        try:
            with _without_health_warnings():
                backend = await open_backend(
                    server.url, prepare_with=PartitionCounts(), name="ff-bench"
                )
                async with contextlib.aclosing(backend):
                    yield Arena(server.url, backend)
        finally:
            server.release()
            # Remove the folder only after the server has stopped writing to it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(poll(lambda: _gone(pid)), _END_S)


async def _gone(pid: int | None) -> bool:
    try:
        return pid is None or os.kill(pid, 0) is not None
    except ProcessLookupError:
        return True


@contextlib.contextmanager
def _without_health_warnings() -> Generator[None]:
    """The server has no append-only file on purpose."""
    log = logging.getLogger("flowfabric.engine.valkey.health")
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)
