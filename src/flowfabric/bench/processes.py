"""Worker processes, seen from the process that measures."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncGenerator
from typing import IO

import msgspec

from flowfabric.bench.child import Event, Plan
from flowfabric.core.errors import ConfigError

_WAIT_S = 120.0
_END_S = 20.0


class WorkerProcess:
    """One process of workers: events come out, and it can be ended or killed."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.returncode

    async def events(self, name: str, count: int = 1) -> list[Event]:
        """The next `count` events of this name; others are passed over."""
        found: list[Event] = []
        assert self._process.stdout is not None
        async with asyncio.timeout(_WAIT_S):
            while len(found) < count:
                line = await self._process.stdout.readline()
                if not line:
                    raise self._ended()
                event = msgspec.json.decode(line, type=Event)
                if event.name == name:
                    found.append(event)
        return found

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()

    async def end(self) -> None:
        """Have it stop its workers and wait for that; kill it when it takes too long."""
        process = self._process
        if process.returncode is None and process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _ended(self) -> ConfigError:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return ConfigError("bench", f"a worker process ended: {said[-1] if said else 'no message'}")


@contextlib.asynccontextmanager
async def worker_process(plan: Plan) -> AsyncGenerator[WorkerProcess]:
    """A process whose workers are all connected; ended afterwards."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flowfabric.bench.child", msgspec.json.encode(plan).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # Ctrl-C reaches only us, and we end it in order.
            start_new_session=True,
        )
        worker = WorkerProcess(process, errors)
        try:
            await worker.events("ready", plan.workers)
            yield worker
        finally:
            await worker.end()
