"""Workers and the server are killed under load: nothing is lost, nothing ends twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.chaos.load import Books, Fleet, audit, fill, finished, prepared
from tests.support.sdk import seeded, until
from tests.support.server import TestServer


@pytest.fixture
def server() -> Iterator[TestServer]:
    own = TestServer(
        *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction")
    )
    yield own
    own.stop()


@pytest.fixture
async def backend(server: TestServer) -> AsyncIterator[ValkeyBackend]:
    async with await prepared(server.url) as backend:
        yield backend


async def killing_workers(
    server: TestServer, backend: ValkeyBackend, *, count: int, workers: int, seconds: float
) -> None:
    rng = seeded("killing workers")
    books = Books(backend)
    following = asyncio.create_task(books.follow())
    fleet = Fleet(server.url, workers)
    enough = asyncio.Event()
    killing = asyncio.create_task(kill_often(fleet, rng, enough))
    try:
        ids = await fill(backend, rng, count // 2)
        await until(lambda: sum(books.completions.values()) > 0, "a fleet at work", 30)
        ids += await fill(backend, rng, count - count // 2)
        # However fast the fleet is, it has work while it is killed.
        while fleet.kills < 3:
            ids += await fill(backend, rng, 50)
        deadline = time.monotonic() + seconds
        await until(
            lambda: sum(books.completions.values()) >= len(ids) or time.monotonic() > deadline,
            "most of the work",
            seconds + 30,
        )
        enough.set()
        await killing
        await finished(backend, ids, 60)
    finally:
        enough.set()
        await asyncio.wait([killing])
        codes = fleet.stop()
        following.cancel()
        await asyncio.wait([following])
    print(f"{len(ids)} executions, {fleet.kills} workers killed")  # noqa: T201
    # The last ones were asked to stop, and did; one may have been too young to listen.
    assert set(codes) <= {0, -signal.SIGTERM}
    await audit(backend, ids, books)
    assert any(len(set(attempts)) > 1 for attempts in books.attempts.values())


async def kill_often(fleet: Fleet, rng: random.Random, enough: asyncio.Event) -> None:
    while not enough.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.2, 0.9)):
                await enough.wait()
        if not enough.is_set():
            await asyncio.to_thread(fleet.kill_one, rng)


async def killing_the_server(
    server: TestServer, backend: ValkeyBackend, *, count: int, workers: int, kills: int
) -> None:
    rng = seeded("killing the server")
    books = Books(backend)
    following = asyncio.create_task(books.follow())
    fleet = Fleet(server.url, workers)
    try:
        ids: list[ExecutionId] = []
        for _ in range(kills):
            ids += await fill(backend, rng, count // kills)
            before = sum(books.completions.values())
            await until(
                lambda seen=before: sum(books.completions.values()) > seen,  # type: ignore[misc]
                "work before the kill",
                30,
            )
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(rng.uniform(0, 0.5))
            await asyncio.to_thread(server.start)
            back = time.monotonic()
            # More to do, so that going on can be seen.
            ids += await fill(backend, rng, 50)
            stood = sum(books.completions.values())
            await until(
                lambda seen=stood: sum(books.completions.values()) > seen,  # type: ignore[misc]
                "work after the restart",
                30,
            )
            assert time.monotonic() - back < 5.0
        await finished(backend, ids, 60)
    finally:
        codes = fleet.stop()
        following.cancel()
        await asyncio.wait([following])
    assert set(codes) <= {0, -signal.SIGTERM}
    await audit(backend, ids, books)


@pytest.mark.timeout(90)
async def test_workers_are_killed(server: TestServer, backend: ValkeyBackend) -> None:
    await killing_workers(server, backend, count=5000, workers=3, seconds=10)


@pytest.mark.timeout(90)
async def test_server_is_killed(server: TestServer, backend: ValkeyBackend) -> None:
    await killing_the_server(server, backend, count=2000, workers=2, kills=2)


@pytest.mark.chaos
async def test_workers_are_killed_for_long(server: TestServer, backend: ValkeyBackend) -> None:
    await killing_workers(server, backend, count=60_000, workers=6, seconds=240)


@pytest.mark.chaos
async def test_server_is_killed_often(server: TestServer, backend: ValkeyBackend) -> None:
    await killing_the_server(server, backend, count=20_000, workers=4, kills=12)
