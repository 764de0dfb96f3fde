"""Worker processes for failure runs, and the books they are checked against."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.events import Event
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import decode_entry
from flowfabric.valkey.address import parse_url
from tests.support.sdk import submit, until

LANES = ("default", "mail", "video")
SPREAD = 8
"""Partitions in use: a few, so that they are shared by all workers."""
_PAGE = 1000


class Fleet:
    """Worker processes that are killed and replaced."""

    def __init__(self, url: str, size: int, *, concurrency: int = 16) -> None:
        self._command = [
            *(sys.executable, "-m", "tests.chaos.worker", url, str(concurrency)),
            ",".join(LANES),
        ]
        self._processes = [self._start() for _ in range(size)]
        self.kills = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command)

    def kill_one(self, rng: random.Random) -> None:
        """kill -9 one worker and start another in its place."""
        victim = rng.randrange(len(self._processes))
        self._processes[victim].kill()
        self._processes[victim].wait()
        self._processes[victim] = self._start()
        self.kills += 1

    def stop(self) -> list[int]:
        """SIGTERM all; their exit codes."""
        for process in self._processes:
            process.terminate()
        codes: list[int] = []
        for process in self._processes:
            try:
                codes.append(process.wait(20))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return codes


async def prepared(url: str) -> ValkeyBackend:
    """A backend whose feeds keep every event of the run."""
    return await ValkeyBackend.connect(
        parse_url(url), prepare_with=PartitionCounts(), request_timeout=2.0
    )


async def fill(backend: ValkeyBackend, rng: random.Random, count: int) -> list[ExecutionId]:
    """Executions over lanes and partitions; some fail at first and are retried."""
    retry = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 50}}}
    ids: list[ExecutionId] = []
    while len(ids) < count:
        ids += await submit(
            backend,
            min(rng.randrange(20, 200), count - len(ids)),
            kind=rng.choice(["quick", "slow", "flaky", "threaded"]),
            lane=rng.choice(LANES),
            partition=rng.randrange(SPREAD),
            policy=retry,
        )
    return ids


class Books:
    """What the event feeds say, collected while the run goes on: feeds are capped."""

    def __init__(self, backend: ValkeyBackend) -> None:
        self._backend = backend
        self._positions = [f"{{fp:{n}}}" for n in range(SPREAD)]
        self._after = dict.fromkeys(self._positions, "-")
        self.completions: Counter[str] = Counter()
        self.epochs: dict[str, list[int]] = {}
        self.attempts: dict[str, list[int]] = {}

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(Exception):
                await self.read()
            await asyncio.sleep(0.05)

    async def read(self) -> None:
        """Everything there is now."""
        for tag in self._positions:
            while await self._page(tag) == _PAGE:
                pass

    async def _page(self, tag: str) -> int:
        feed = keys.events(tag)
        entries: Any = await self._backend.transport.call(
            "XRANGE", feed, self._after[tag], "+", "COUNT", _PAGE, key=feed, replay_safe=True
        )
        for entry, flat in entries:
            self._note(decode_entry(tag[1:-1], entry, flat))
            self._after[tag] = f"({entry.decode()}"
        return len(entries)

    def _note(self, event: Event) -> None:
        assert event.execution_id is not None
        if event.type == "completion":
            self.completions[event.execution_id] += 1
        elif event.type in ("acquired", "reclaimed"):
            new = "new_" if event.type == "reclaimed" else ""
            epoch, attempt = event.get(f"{new}lease_epoch"), event.get(f"{new}attempt_index")
            self.epochs.setdefault(event.execution_id, []).append(epoch)
            self.attempts.setdefault(event.execution_id, []).append(attempt)


async def all_ended(backend: ValkeyBackend, ids: Sequence[ExecutionId]) -> bool:
    """Whether every execution has its end."""
    ended = 0
    for first in range(0, len(ids), 500):
        part = ids[first : first + 500]
        states = await asyncio.gather(*(backend.reads.read_execution_state(i) for i in part))
        if any(state.value not in ("completed", "failed") for state in states):
            return False
        ended += len(part)
    return ended == len(ids)


async def audit(backend: ValkeyBackend, ids: Sequence[ExecutionId], books: Books) -> None:
    """None lost, one accepted end each, attempts and epochs in step."""
    await books.read()
    assert set(books.completions) == set(ids)
    doubled = {i: n for i, n in books.completions.items() if n != 1}
    assert doubled == {}
    for first in range(0, len(ids), 500):
        part = ids[first : first + 500]
        infos = await asyncio.gather(*(backend.reads.read_execution_info(i) for i in part))
        for info in infos:
            assert info.public_state.value == "completed", info
            epochs = books.epochs[info.execution_id]
            attempts = books.attempts[info.execution_id]
            # Every lease is newer than the one before; an attempt never goes back.
            assert epochs == sorted(set(epochs)), (info.execution_id, epochs)
            assert attempts == sorted(attempts), (info.execution_id, attempts)
            assert attempts[-1] == info.total_attempt_count - 1
            assert epochs[-1] == len(epochs)
    for tag in await backend.places.used_partitions():
        left: Any = await backend.transport.call("ZCARD", keys.index(tag, "lease_expiry"))
        assert left == 0, tag


async def finished(backend: ValkeyBackend, ids: Sequence[ExecutionId], seconds: float) -> None:
    async def done() -> bool:
        try:
            return await all_ended(backend, ids)
        except Exception:  # noqa: BLE001 - the server may be down at the moment
            return False

    await until(done, "the end of all executions", seconds)
