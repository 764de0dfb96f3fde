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
from typing import IO, Any, NamedTuple, Self

import msgspec

from flowfabric.app.context import Context
from flowfabric.app.fabric import Fabric
from flowfabric.app.run import Run
from flowfabric.bench.arena import LANE, Arena, poll
from flowfabric.core.errors import ConfigError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import PublicState
from flowfabric.sdk.service import service_runner

LIMITS = "bench"
"""The name of the budget and of the quota of `BenchApp.limited`."""
_WAIT_S = 120.0
_END_S = 20.0
_BURST = 256


CAPABILITY_SETS = tuple(f"bench-{number}" for number in range(10))


class BenchApp(Fabric):
    """An application on the scenario's server: `noop`, `limited`, `stamp`, `hold`, …"""

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
        self.limited = self.task(name="limited", lane=LANE, budgets=[LIMITS], quota=LIMITS)(noop)
        self.routed = [
            self.task(lane=LANE, capabilities={name}, name=f"noop-{name}")(noop)
            for name in CAPABILITY_SETS
        ]
        self.unwanted = self.task(lane=LANE, capabilities={"bench-nobody"})(unwanted)

    def expect(self, calls: int, reached: Callable[[], None]) -> None:
        """Call `reached` after this many calls of `noop`; `first_ns` is the time of the first."""
        self.first_ns = 0
        self._left = calls
        self._reached = reached


class SignalTarget(NamedTuple):
    """An open waitpoint and its token."""

    execution_id: ExecutionId
    waitpoint_id: str
    token: str

    @classmethod
    async def of(cls, at: Arena, run: Run[int]) -> Self:
        """The wait of a run of `ask`, as soon as it is suspended."""

        async def suspended() -> bool:
            return await run.state() is PublicState.SUSPENDED

        await poll(suspended)
        (waitpoint,) = (await at.backend.waitpoints.list_pending_waitpoints(run.id)).entries
        token = await at.backend.signals.read_waitpoint_token(run.id, waitpoint.waitpoint_id)
        assert token is not None
        return cls(run.id, waitpoint.waitpoint_id, token.reveal())


class Plan(NamedTuple):
    """What a process runs: see `worker_process`."""

    url: str
    workers: int
    goal: int
    noise_per_s: float
    settings: dict[str, Any]


def _print(event: str) -> None:
    sys.stdout.write(f"{event} {time.monotonic_ns()}\n")
    sys.stdout.flush()


async def _make_noise(app: BenchApp, per_s: float) -> None:
    """Submit in bursts, as applications do, at a steady rate."""
    app.namespace = "noisy"
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        await app.submit_many(app.stamp, [()] * _BURST)
        due += _BURST / per_s
        await asyncio.sleep(due - loop.time())


async def _run(plan: Plan) -> None:
    app = BenchApp(plan.url, started=lambda: _print("started"))
    app.expect(plan.goal, lambda: _print("reached"))
    workers = [app.worker(**plan.settings) for _ in range(plan.workers)]
    serving = [
        asyncio.create_task(worker.run(grace_s=0.0, signals=False, ready=lambda: _print("ready")))
        for worker in workers
    ]
    closed = asyncio.Event()
    # Not a reading thread, which would keep a crashed process from exiting.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), closed.set)
    ending = asyncio.create_task(closed.wait())
    noise = [asyncio.create_task(_make_noise(app, plan.noise_per_s))] if plan.noise_per_s else []
    await asyncio.wait([ending, *noise, *serving], return_when=asyncio.FIRST_COMPLETED)
    for task in noise:
        task.cancel()
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
async def worker_process(
    url: str, *, workers: int = 1, goal: int = 0, noise_per_s: float = 0.0, **settings: Any
) -> AsyncGenerator[WorkerProcess]:
    """A process whose workers are all connected; it ends with the block.

    `settings` are those of `Fabric.worker`. After `goal` calls of `noop` it prints `reached`.
    With `noise_per_s` it also submits that many executions of the namespace "noisy" per second.
    """
    plan = msgspec.json.encode(Plan(url, workers, goal, noise_per_s, settings)).decode()
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flowfabric.bench.workers", plan),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            # Ctrl-C reaches only this process, which then stops the other one cleanly.
            start_new_session=True,
        )
        worker = WorkerProcess(process, errors)
        try:
            await worker.events("ready", workers)
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
    with service_runner() as runner:
        runner.run(_run(msgspec.json.decode(sys.argv[1], type=Plan)))
