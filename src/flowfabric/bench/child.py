"""A process full of workers: `python -m flowfabric.bench.child PLAN`, told what to do as JSON.

It tells events as JSON lines on stdout and ends when its stdin does, so it never outlives the
process that started it.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

from flowfabric.app.worker import AppWorker
from flowfabric.bench.tasks import BenchApp, Count


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to run."""

    url: str
    workers: int = 1
    concurrency: int = 1
    batch: int = 64
    lane: str = "default"
    lease_ttl_s: float = 30.0
    scanners: bool = True
    goal: int = 0
    """After so many calls of `noop` it tells `reached`."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened there, and when by the machine's monotonic clock."""

    name: str
    at_ns: int
    item: int = 0


def _tell(name: str, item: int = 0) -> None:
    line = msgspec.json.encode(Event(name, time.monotonic_ns(), item))
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


async def _run(plan: Plan) -> None:
    app = BenchApp(
        plan.url,
        count=Count(plan.goal, lambda: _tell("reached")),
        started=lambda item: _tell("started", item),
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
    serving = [asyncio.create_task(_serve(worker)) for worker in workers]
    ending = asyncio.create_task(_told_to_end())
    await asyncio.wait([ending, *serving], return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*serving)
    await app.fabric.aclose()


async def _told_to_end() -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    # Not a thread that reads: that would keep a crashed process from ending.
    loop.add_reader(sys.stdin.fileno(), told.set)
    await told.wait()
    loop.remove_reader(sys.stdin.fileno())


async def _serve(worker: AppWorker) -> None:
    await worker.run(grace_s=0.0, signals=False, ready=lambda: _tell("ready"))


if __name__ == "__main__":
    uvloop.run(_run(msgspec.json.decode(sys.argv[1], type=Plan)))
