"""The server goes away or refuses: clients learn what is wrong, workers go on when it heals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.client import Client
from flowfabric.sdk.runtime import WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connection import dial
from tests.support.proxy import FaultProxy
from tests.support.sdk import config, opener, submit, until
from tests.support.server import TestServer, free_port

SETTINGS = (
    *("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"),
    *("--busy-reply-threshold", "20", "--loading-process-events-interval-bytes", "1024"),
)


@pytest.fixture
def server() -> Iterator[TestServer]:
    own = TestServer(*SETTINGS)
    yield own
    own.stop()


class Site:
    """A worker at work, and a client with little patience."""

    def __init__(self, server: TestServer, client: Client, runtime: WorkerRuntime) -> None:
        self.server = server
        self.client = client
        self.runtime = runtime
        self.gate = asyncio.Event()
        self.holding = asyncio.Event()
        self.held: ExecutionId | None = None

    async def command(self, *args: Any) -> Any:
        conn = await dial(parse_url(self.server.url))
        try:
            return await conn.call(*args)
        finally:
            await conn.aclose()

    async def handle(self, task: ClaimedTask) -> None:
        if task.execution_kind == "held":
            self.holding.set()
            await self.gate.wait()

    async def works(self, within: float = 5.0) -> None:
        """New work goes through, as soon as this impatient client has its connection back."""
        async with asyncio.timeout(within):
            await until(lambda: written(self.client), "a connection")
            (execution_id,) = await submit(self.client.backend)
            await self.client.result(execution_id)


@pytest.fixture
async def site(server: TestServer) -> AsyncIterator[Site]:
    async with at_work(server, server.url) as site:
        yield site


@asynccontextmanager
async def at_work(server: TestServer, url: str, lease_ttl_ms: int = 20_000) -> AsyncGenerator[Site]:
    """A site that reaches the server by this address; on leaving, no work may be lost."""
    backend = await ValkeyBackend.connect(
        parse_url(url), prepare_with=PartitionCounts(), request_timeout=0.4
    )
    worker = await Worker.connect(
        config(max_concurrent_tasks=4, claim_poll_interval_ms=100, lease_ttl_ms=lease_ttl_ms),
        opener(url, request_timeout=0.4),
    )
    runtime = WorkerRuntime(worker)
    site = Site(server, Client(backend), runtime)
    for kind in ("job", "held"):
        runtime.on(kind, site.handle)
    run = asyncio.create_task(runtime.run(grace_s=1))
    await site.works()
    # One task is under way in every outage; its result must survive it.
    (held,) = await submit(backend, kind="held")
    await site.holding.wait()
    site.held = held
    yield site
    assert not run.done()
    await site.client.result(held, timeout=10)
    runtime.stop()
    summary = await run
    assert (summary.abandoned, summary.failed) == (0, 0)
    assert worker.free == 4
    await worker.aclose()
    await site.client.aclose()


async def fails_as(kind: str, client: Client) -> None:
    """Until the fault has spread to every connection, calls may fail in other ways."""
    deadline = time.monotonic() + 10
    seen: TransportError | None = None
    while seen is None or seen.kind != kind:
        assert time.monotonic() < deadline, f"never {kind}, last {seen}"
        try:
            await client.submit("job")
        except TransportError as error:
            seen = error
    assert seen.retryable
    assert seen.hint


async def test_killed_and_restarted(site: Site) -> None:
    site.server.kill()
    site.gate.set()
    await fails_as("transport", site.client)
    site.server.start()
    await site.works()


async def test_loading(site: Site) -> None:
    await submit(site.client.backend, 300, kind="job", lane="elsewhere")
    # Keys are loaded slowly, on request, only from a snapshot.
    await site.command("BGREWRITEAOF")
    await until(lambda: rewritten(site), "the rewrite")
    site.server.kill()
    site.gate.set()
    site.server._extra = (*SETTINGS, "--key-load-delay", "5000")
    starting = asyncio.create_task(asyncio.to_thread(site.server.start))
    await fails_as("busy_loading", site.client)
    await starting
    await site.works()


async def rewritten(site: Site) -> bool:
    raw: Any = await site.command("INFO", "persistence")
    text = raw if isinstance(raw, str) else raw.decode()
    return "aof_rewrite_in_progress:0" in text and "aof_rewrite_scheduled:0" in text


@pytest.mark.parametrize("loads", [False, True])
async def test_a_short_restart_shows_in_no_handler(site: Site, loads: bool) -> None:
    """Frames and progress are repeated while the lease lasts; no frame is lost."""
    half_way = asyncio.Event()

    async def talks(task: ClaimedTask) -> None:
        await task.append_frame("delta", b"0")
        for number in range(1, 100):
            await task.write_frame(Frame(payload=str(number).encode()))
            await task.update_progress(number)
            if number == 20:
                half_way.set()

    site.runtime.on("talks", talks)
    backend = site.client.backend
    await submit(backend, 300, lane="elsewhere")
    await site.command("BGREWRITEAOF")
    await until(lambda: rewritten(site), "the rewrite")
    (execution_id,) = await submit(backend, kind="talks")
    await half_way.wait()
    site.gate.set()
    site.server.kill()
    site.server._extra = (*SETTINGS, "--key-load-delay", "1500" if loads else "0")
    await asyncio.to_thread(site.server.start)
    await until(lambda: written(site.client), "a connection")
    await site.client.result(execution_id, timeout=20)
    ended = await backend.reads.read_execution_info(execution_id)
    assert (ended.public_state.value, ended.total_attempt_count) == ("completed", 1)
    assert ended.progress_pct == 99
    page = await backend.streams.read_stream(execution_id, 0, count_limit=200)
    assert [int(frame.payload) for frame in page.frames] == list(range(100))


async def test_out_of_memory(site: Site) -> None:
    await site.command("CONFIG", "SET", "maxmemory", "1")
    await fails_as("out_of_memory", site.client)
    # What is stored goes on and ends; only new work is refused.
    site.gate.set()
    assert site.held is not None
    await site.client.result(site.held, timeout=10)
    await site.command("CONFIG", "SET", "maxmemory", "0")
    await site.works()


async def test_read_only_replica(site: Site) -> None:
    await site.command("REPLICAOF", "127.0.0.1", "1")
    await fails_as("read_only", site.client)
    site.gate.set()
    await refused_once(site)
    await site.command("REPLICAOF", "NO", "ONE")
    await site.works()


async def test_failover_behind_one_address() -> None:
    """The old primary lives on as a replica; new connections lead to the new one."""
    spare = TestServer(*SETTINGS, port=free_port())
    old = TestServer(*SETTINGS, port=free_port())
    proxy = FaultProxy(old.socket_path)
    try:
        async with at_work(old, proxy.url, lease_ttl_ms=6000) as site:
            there = Site(spare, site.client, site.runtime)
            await there.command("REPLICAOF", "127.0.0.1", old.port)
            await until(lambda: says(there, "master_link_status:up"), "a replica in step")
            await site.command("FAILOVER")
            await until(lambda: says(there, "role:master"), "the failover")
            await until(lambda: says(site, "role:slave"), "the demotion")
            await fails_as("read_only", site.client)
            proxy._upstream = str(spare.socket_path)
            await site.works()
            # Nobody stays behind: neither blocking connections nor the keeper of the held lease.
            await until(lambda: deserted(site), "the move of every connection")
            site.gate.set()
    finally:
        proxy.stop()
        old.stop()
        spare.stop()


async def deserted(site: Site) -> bool:
    left: Any = await site.command("CLIENT", "LIST", "TYPE", "normal")
    # The one that asks.
    return left.count(b"name=flowfabric") == 1


async def says(site: Site, line: str) -> bool:
    raw: Any = await site.command("INFO", "replication")
    return line in raw.decode()


async def written(client: Client) -> bool:
    try:
        await client.submit("job")
    except TransportError:
        return False
    return True


async def test_too_few_replicas(site: Site) -> None:
    await site.command("CONFIG", "SET", "min-replicas-to-write", "1")
    await fails_as("no_replicas", site.client)
    site.gate.set()
    await refused_once(site)
    await site.command("CONFIG", "SET", "min-replicas-to-write", "0")
    await site.works()


async def test_a_disk_that_takes_no_snapshot(site: Site) -> None:
    in_the_way = site.server.folder / "dump.rdb"
    in_the_way.mkdir()
    await site.command("CONFIG", "SET", "save", "3600 1")
    await site.command("BGSAVE")
    await fails_as("cannot_persist", site.client)
    site.gate.set()
    await refused_once(site)
    in_the_way.rmdir()
    await site.command("BGSAVE")
    await site.works()


async def test_busy_script(site: Site) -> None:
    conn = await dial(parse_url(site.server.url))
    busy = conn.submit(("EVAL", "while true do end", 0), 60)
    await fails_as("busy_script", site.client)
    site.gate.set()
    await refused_once(site)
    await site.command("SCRIPT", "KILL")
    with pytest.raises(TransportError):
        await busy
    await conn.aclose()
    await site.works()


async def refused_once(site: Site) -> None:
    """The held task's result was tried at least once."""
    endings = site.runtime._endings
    await until(lambda: bool(endings._calls), "a result on its way")


async def test_library_lost(site: Site) -> None:
    """A failover to a node without the library: whoever notices first loads it again."""
    await site.command("FUNCTION", "FLUSH")
    site.gate.set()
    await site.works()


async def test_revoked_permission_ends_the_run(server: TestServer) -> None:
    backend = await ValkeyBackend.connect(parse_url(server.url), prepare_with=PartitionCounts())
    worker = await Worker.connect(config(claim_poll_interval_ms=50), opener(server.url))
    runtime = WorkerRuntime(worker)
    run = asyncio.create_task(runtime.run())
    await submit(backend)
    await until(lambda: runtime.summary.failed == 1, "a worker at work")
    await submit(backend, 1, lane="elsewhere")
    await backend.transport.call("ACL", "SETUSER", "default", "-fcall")
    await backend.transport.call("ZADD", "ff:wake:default", 0, 86)
    with pytest.raises(TransportError, match="NOPERM") as caught:
        await asyncio.wait_for(run, 10)
    assert caught.value.kind == "auth"
    assert worker.free == 1
    await worker.aclose()
    await backend.aclose()
