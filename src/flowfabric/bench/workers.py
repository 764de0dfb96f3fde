"""The application of the scenarios, and processes of workers that run it.

A process gets its plan as JSON, `python -m flowfabric.bench.workers PLAN`, and prints events as
JSON lines. It exits when its stdin closes, so it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from typing import IO, Any

import msgspec
import uvloop

from flowfabric.app.context import Context
from flowfabric.app.fabric import Fabric
from flowfabric.app.tasks import Task
from flowfabric.bench.arena import LANE
from flowfabric.core.errors import ConfigError

_WAIT_S = 120.0
_END_S = 20.0


class Count:
    """Counts calls up to a goal and notes when the first and the last one came."""

    def __init__(self, goal: int, reached: Callable[[], None]) -> None:
        self.goal = goal
        self.first_ns = 0
        self._calls = 0
        self._reached = reached

    def tick(self) -> None:
        """One more call."""
        self._calls += 1
        if self._calls == 1:
            self.first_ns = time.monotonic_ns()
        if self._calls == self.goal:
            self._reached()


class BenchApp:
    """An application on the scenario's server: `noop`, `stamp`, `hold`, `ask` and `unwanted`."""

    def __init__(
        self, url: str, *, count: Count | None = None, started: Callable[[int], None] | None = None
    ) -> None:
        self.fabric = Fabric(url)
        self.count = count

        async def noop() -> None:
            if self.count is not None:
                self.count.tick()

        async def stamp() -> int:
            # CLOCK_MONOTONIC is one clock for all processes of the machine.
            return time.monotonic_ns()

        async def hold(item: int) -> None:
            if started is not None:
                started(item)
            await asyncio.Event().wait()

        async def ask(ctx: Context) -> int:
            await ctx.wait_for("go")
            return time.monotonic_ns()

        async def unwanted() -> None:
            raise AssertionError("no worker offers what this task requires")

        task = self.fabric.task
        self.noop: Task[[], Any] = task(lane=LANE)(noop)
        self.stamp: Task[[], Any] = task(lane=LANE)(stamp)
        self.hold: Task[[int], Any] = task(lane=LANE)(hold)
        self.ask: Task[[], Any] = task(lane=LANE)(ask)
        self.unwanted: Task[[], Any] = task(lane=LANE, capabilities={"bench-nobody"})(unwanted)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the process runs."""

    url: str
    workers: int = 1
    concurrency: int = 1
    batch: int = 64
    lane: str = "default"
    lease_ttl_s: float = 30.0
    scanners: bool = True
    goal: int = 0
    """After this many calls of `noop` it prints `reached`."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened there, and when by the machine's monotonic clock."""

    name: str
    at_ns: int
    item: int = 0


def _print(name: str, item: int = 0) -> None:
    line = msgspec.json.encode(Event(name, time.monotonic_ns(), item))
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


async def _run(plan: Plan) -> None:
    app = BenchApp(
        plan.url,
        count=Count(plan.goal, lambda: _print("reached")),
        started=lambda item: _print("started", item),
    )
    workers = [
        app.fabric.worker(
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
    ending = asyncio.create_task(_stdin_closed())
    await asyncio.wait([ending, *serving], return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*serving)
    await app.fabric.aclose()


async def _stdin_closed() -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    # Not a thread that reads: it would keep a crashed process from exiting.
    loop.add_reader(sys.stdin.fileno(), closed.set)
    await closed.wait()
    loop.remove_reader(sys.stdin.fileno())


class WorkerProcess:
    """One process of workers."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    async def events(self, name: str, count: int = 1) -> list[Event]:
        """The next `count` events of this name; others are skipped."""
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
        """Stop its workers and wait; kill it if that takes too long."""
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
            await worker.end()


if __name__ == "__main__":
    uvloop.run(_run(msgspec.json.decode(sys.argv[1], type=Plan)))
