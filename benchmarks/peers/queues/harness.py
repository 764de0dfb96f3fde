"""The protocol between the runner and one queue's script, run in the peers' environment.

A script defines a `Queue` (below) and calls `main()`. The runner starts it twice:
`<script> submit …` enqueues n no-op tasks, `<script> work …` is the one worker process.
Each writes one JSON object to the file named by `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from importlib.metadata import version
from pathlib import Path

import redis
import uvloop

# Small enough to stop a slow queue in time, large enough for a batch API to show its worth.
CHUNK = 1000
POLL_S = 0.1
# How often the server is asked whether anything is left, once every task has run.
DRAIN_POLL_S = 0.005
# No call for this long and nothing left on the server: the rest never comes.
STALL_S = 2.0


class Queue(ABC):
    """What a peer tells the harness; `submit` and `work` may be coroutines."""

    package: str
    note: str

    @abstractmethod
    def __init__(self, url: str) -> None:
        """Connect to the server."""

    @abstractmethod
    def submit(self, count: int) -> object:
        """Enqueue `count` no-op tasks."""

    @abstractmethod
    def work(self) -> object:
        """Run one worker in this process, for ever."""

    @abstractmethod
    def left(self, client: redis.Redis) -> int:
        """How many tasks the server still holds, unacknowledged ones included."""


class _Probe:
    """Counts the calls of the no-op task, from any thread."""

    def __init__(self) -> None:
        # next() on itertools.count is one atomic step, so threads need no lock.
        self._numbers = itertools.count(1)
        self.goal = 0
        self.calls = 0
        self.first = self.latest = 0.0
        self.all_called = threading.Event()

    def tick(self) -> None:
        self.calls = call = next(self._numbers)
        self.latest = time.perf_counter()
        if call == 1:
            self.first = self.latest
        if call >= self.goal:
            self.all_called.set()


_probe = _Probe()
tick = _probe.tick


def main(queue_class: type[Queue]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=("submit", "work"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    # Harmless to the threaded queues, and the asyncio ones are all faster with it.
    uvloop.install()
    if options.phase == "submit":
        asyncio.run(_submit(queue_class, options))
    else:
        _work(queue_class, options)


async def _submit(queue_class: type[Queue], options: argparse.Namespace) -> None:
    queue = queue_class(options.url)
    done, seconds = 0, 0.0
    while done < options.n and seconds < options.budget:
        count = min(CHUNK, options.n - done)
        start = time.perf_counter()
        outcome = queue.submit(count)
        if inspect.isawaitable(outcome):
            await outcome
        seconds += time.perf_counter() - start
        done += count
    _report(
        options.out,
        n=done,
        seconds=seconds,
        version=version(queue.package),
        note=queue.note,
    )


def _work(queue_class: type[Queue], options: argparse.Namespace) -> None:
    _probe.goal = options.n
    if inspect.iscoroutinefunction(queue_class.work):
        asyncio.run(_work_async(queue_class, options))
    else:
        queue = queue_class(options.url)
        _watch(queue, options)
        queue.work()


async def _work_async(queue_class: type[Queue], options: argparse.Namespace) -> None:
    queue = queue_class(options.url)
    _watch(queue, options)
    await queue.work()


def _watch(queue: Queue, options: argparse.Namespace) -> None:
    threading.Thread(target=_finish, args=(queue, options), daemon=True).start()


def _finish(queue: Queue, options: argparse.Namespace) -> None:
    """Stop the clock when all is done, or when the budget is spent."""
    client = redis.Redis.from_url(options.url)
    deadline = time.perf_counter() + options.budget
    last = 0.0
    while not last and time.perf_counter() < deadline:
        if _probe.all_called.wait(POLL_S):
            last = _drained(queue, client, deadline)
        elif _stalled() and not queue.left(client):
            # The queue dropped a task: nothing is left, and not every task has run.
            last = _probe.latest
    seconds = (last or time.perf_counter()) - _probe.first
    _report(options.out, n=min(_probe.calls, options.n), seconds=seconds, complete=bool(last))
    # A queue's own shutdown is not measured and may wait for seconds; the server is private.
    os._exit(0)


def _drained(queue: Queue, client: redis.Redis, deadline: float) -> float:
    """Every task has run; wait for the last acknowledgements."""
    while queue.left(client) and time.perf_counter() < deadline:
        time.sleep(DRAIN_POLL_S)
    return time.perf_counter()


def _stalled() -> bool:
    return _probe.calls > 0 and time.perf_counter() - _probe.latest > STALL_S


def _report(out: Path, **values: object) -> None:
    part = out.with_suffix(".part")
    part.write_text(json.dumps(values))
    part.rename(out)
