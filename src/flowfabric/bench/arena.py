"""The private server a scenario runs on, and what can be read off it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

from flowfabric.bench.options import Aof
from flowfabric.core.partition import PartitionCounts, solo_partition
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.connect import open_backend, start_embedded

LANE = "default"
_END_S = 30.0


class Arena:
    """A server of its own with a prepared engine on it."""

    def __init__(self, url: str, backend: ValkeyBackend) -> None:
        self.url = url
        self.backend = backend
        self.tag = f"{{fp:{solo_partition(LANE, backend.counts)}}}"
        """The partition that holds the lane's executions."""

    async def seed_secret(self) -> None:
        """Make waits possible: their tokens are signed."""
        await self.backend.secrets.seed_at_boot(secrets.token_hex(32))

    async def info(self, section: str) -> dict[str, str]:
        """The fields of one section of INFO."""
        text = bytes(await self.backend.transport.call("INFO", section)).decode()
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    async def server_cpu_s(self) -> float:
        """Processor time of the thread that runs commands."""
        cpu = await self.info("cpu")
        return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])

    async def until_done(self) -> None:
        """Return when all that was submitted to the lane is claimed and completed."""
        # What leaves the first index enters the second in the same step.
        for index in (keys.eligible(self.tag, LANE), keys.index(self.tag, "lease_expiry")):
            while await self.backend.transport.call("ZCARD", index, key=index):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def arena(aof: Aof) -> AsyncGenerator[Arena]:
    """A fresh server, ended afterwards; its data goes with it."""
    with tempfile.TemporaryDirectory(prefix="ff-bench-", ignore_cleanup_errors=True) as folder:
        server = await asyncio.to_thread(start_embedded, Path(folder), aof=aof)
        pid = server.pid
        try:
            with _without_known_warnings():
                backend = await open_backend(
                    server.url, prepare_with=PartitionCounts(), name="ff-bench"
                )
                async with backend:
                    yield Arena(server.url, backend)
        finally:
            server.release()
            # The folder may go only when nobody writes into it.
            await _until_gone(pid)


async def _until_gone(pid: int | None) -> None:
    deadline = time.monotonic() + _END_S
    while pid is not None and time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def _without_known_warnings() -> Generator[None]:
    """A server that keeps no log on purpose is nothing to warn of."""
    log = logging.getLogger("flowfabric.engine.valkey.health")

    def other(record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and record.args[:1] == ("persistence",))

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)
