"""The private server that a scenario runs on."""

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from flowfabric.bench.report import Options, Progress
from flowfabric.core.partition import PartitionCounts, solo_partition
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import open_backend, start_embedded
from flowfabric.engine.valkey.raw import RawCalls

T = TypeVar("T")

LANE = "default"
_END_S = 30.0
_POLL_S = 0.001
_health_log = logging.getLogger("flowfabric.engine.valkey.health")


class Arena:
    """A private server with an initialised engine, and the options of the measurement."""

    def __init__(self, url: str, backend: Backend, options: Options, progress: Progress) -> None:
        self.url = url
        self.backend = backend
        self.options = options
        self.progress = progress
        self.partition = solo_partition(LANE, backend.counts)
        """The partition that holds the lane's executions."""
        self.tag = f"{{fp:{self.partition}}}"
        self.raw = RawCalls(backend, LANE, self.tag, progress.step)

    async def server_cpu_s(self) -> float:
        """Processor time of the server's main thread."""
        return (await self.backend.meta.usage()).cpu_s

    async def until_done(self) -> None:
        """Wait until everything submitted to the lane is claimed and completed."""
        # In this order: a claim moves an execution atomically from the first to the second.
        await poll(self._nothing_waits)
        await poll(self._nothing_runs)

    async def _nothing_waits(self) -> bool:
        return not await self.backend.wakeups.find_work([(LANE, self.tag)])

    async def _nothing_runs(self) -> bool:
        lane = self.backend.listings.list_lane
        return not (await lane(LANE, "active", partition=self.partition, limit=1)).executions


async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


async def timed(work: Awaitable[T]) -> tuple[float, T]:
    """How many seconds the work takes, and its result."""
    start = time.perf_counter()
    result = await work
    return time.perf_counter() - start, result


@contextlib.asynccontextmanager
async def arena(options: Options, progress: Progress) -> AsyncGenerator[Arena]:
    """A fresh server; it and its data are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ff-bench-", ignore_cleanup_errors=True) as folder:
        server = await asyncio.to_thread(start_embedded, Path(folder), aof=options.aof)
        pid = server.pid
        # The server has no append-only file on purpose.
        _health_log.setLevel(logging.ERROR)
        try:
            counts = PartitionCounts()
            backend = await open_backend(server.url, prepare_with=counts, name="ff-bench")
            async with contextlib.aclosing(backend):
                # Tokens of waits are signed.
                await backend.secrets.seed_at_boot(secrets.token_hex(32))
                yield Arena(server.url, backend, options, progress)
        finally:
            _health_log.setLevel(logging.NOTSET)
            server.release()
            # Remove the folder only after the server has stopped writing to it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(poll(lambda: _gone(pid)), _END_S)


async def _gone(pid: int | None) -> bool:
    try:
        return pid is None or os.kill(pid, 0) is not None
    except ProcessLookupError:
        return True
