"""The application of the scenarios, and processes of workers that run it.

A process gets its plan as JSON, `python -m flowfabric.bench.workers PLAN`, and prints each event
with its time. It exits when its stdin closes, so it never outlives its parent.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from typing import IO

import msgspec
import uvloop

from flowfabric.app.context import Context
from flowfabric.app.fabric import Fabric
from flowfabric.bench.arena import LANE
from flowfabric.core.errors import ConfigError

_WAIT_S = 120.0
_END_S = 20.0


class BenchApp(Fabric):
    """An application on the scenario's server: `noop`, `stamp`, `hold`, `ask` and `unwanted`."""

    def __init__(self, url: str, *, started: Callable[[], None] = lambda: None) -> None:
        super().__init__(url)
        self.expect(0, lambda: None)

        async def noop() -> None:
            if not self.first_ns:
                self.first_ns = time.monotonic_ns()
            self._left -= 1
            if self._left == 0:
                self._reached()

        async def stamp() -> int:
            # CLOCK_MONOTONIC is one clock for all processes of the machine.
            return time.monotonic_ns()

        async def hold() -> None:
            started()
            await asyncio.Event().wait()

        async def ask(ctx: Context) -> int:
            await ctx.wait_for("go")
            return time.monotonic_ns()

        async def unwanted() -> None:
            raise AssertionError("no worker offers what this task requires")

        task = self.task(lane=LANE)
        self.noop, self.stamp, self.hold, self.ask = task(noop), task(stamp), task(hold), task(ask)
        self.unwanted = self.task(lane=LANE, capabilities={"bench-nobody"})(unwanted)

    def expect(self, calls: int, reached: Callable[[], None]) -> None:
        """Call `reached` after this many calls of `noop`; `first_ns` is the time of the first."""
        self.first_ns = 0
        self._left = calls
        self._reached = reached


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a process runs."""

    url: str
    workers: int = 1
    concurrency: int = 1
    batch: int = 64
    lane: str = LANE
    lease_ttl_s: float = 30.0
    scanners: bool = True
    goal: int = 0
    """After this many calls of `noop` it prints `reached`."""


def _print(event: str) -> None:
    sys.stdout.write(f"{event} {time.monotonic_ns()}\n")
    sys.stdout.flush()


async def _run(plan: Plan) -> None:
    app = BenchApp(plan.url, started=lambda: _print("started"))
    app.expect(plan.goal, lambda: _print("reached"))
    workers = [
        app.worker(
            concurrency=plan.concurrency,
            batch=plan.batch,
            lanes=[plan.lane],
            lease_ttl=plan.lease_ttl_s,
            scanners=plan.scanners,
        )
        for _ in range(plan.workers)
    ]
    serving = [
        asyncio.create_task(worker.run(grace_s=0.0, signals=False, ready=lambda: _print("ready")))
        for worker in workers
    ]
    closed = asyncio.Event()
    # Not a thread that reads: it would keep a crashed process from exiting.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
    ending = asyncio.create_task(closed.wait())
    await asyncio.wait([ending, *serving], return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*serving)
    await app.aclose()


class WorkerProcess:
    """One process of workers."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.process = process
        self._errors = errors

    async def events(self, name: str, count: int = 1) -> list[int]:
        """The times in ns of the next `count` events of this name; others are skipped."""
        found: list[int] = []
        assert self.process.stdout is not None
        async with asyncio.timeout(_WAIT_S):
            while len(found) < count:
                event, _, at_ns = (await self.process.stdout.readline()).decode().partition(" ")
                if not event:
                    self._errors.seek(0)
                    lines = self._errors.read().decode(errors="replace").splitlines()
                    said = lines[-1] if lines else "no message"
                    raise ConfigError("bench", f"a worker process ended: {said}")
                if event == name:
                    found.append(int(at_ns))
        return found


@contextlib.asynccontextmanager
async def worker_process(plan: Plan) -> AsyncGenerator[WorkerProcess]:
    """A process whose workers are all connected; it ends with the block."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flowfabric.bench.workers", msgspec.json.encode(plan).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # Ctrl-C reaches only this process, which ends the other in order.
            start_new_session=True,
        )
        worker = WorkerProcess(process, errors)
        try:
            await worker.events("ready", plan.workers)
            yield worker
        finally:
            if process.returncode is None and process.stdin is not None:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                process.kill()
                await process.wait()


if __name__ == "__main__":
    uvloop.run(_run(msgspec.json.decode(sys.argv[1], type=Plan)))
