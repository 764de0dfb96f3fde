"""What is checked before a deployment is set up or used."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import AsyncIterator, Callable

import pytest

from flowfabric.core.errors import ConfigError, EngineError
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.meta import Grade
from flowfabric.engine.valkey import keys, library
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.health import health_findings
from flowfabric.engine.valkey.library import LibraryInfo, read_library
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connect import connect
from flowfabric.valkey.transport import Transport
from tests.support.server import TestServer
from tests.unit.valkey.resp import HELLO, bulk, scripted_peer
from tests.valkey.test_library_versions import made

COUNTS = PartitionCounts(flow=4, budget=2, quota=2)


class Peer:
    """Speaks as some server would, and notes what it is asked."""

    def __init__(self, info: str, **replies: bytes) -> None:
        self.asked: list[bytes] = []
        self._replies = {"HELLO": HELLO, "INFO": bulk(info), "PING": b"+PONG\r\n"} | replies

    def __call__(self, command: list[bytes]) -> bytes:
        self.asked.append(command[0])
        return self._replies.get(command[0].decode(), b"-ERR unknown command\r\n")


REDIS = "# Server\r\nredis_version:7.4.1\r\n"
OLD = "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.2.9\r\n"


@pytest.mark.parametrize("prepare_with", [None, COUNTS])
async def test_redis_is_refused_by_name_and_left_alone(
    prepare_with: PartitionCounts | None,
) -> None:
    peer = Peer(REDIS, HMGET=b"*3\r\n_\r\n_\r\n_\r\n")
    async with scripted_peer(peer) as port:
        address = parse_url(f"valkey://127.0.0.1:{port}")
        with pytest.raises(EngineError, match="is not Valkey") as caught:
            await asyncio.wait_for(ValkeyBackend.connect(address, prepare_with=prepare_with), 5)
    assert caught.value.code == "valkey_version_too_low"
    assert not {b"EVAL", b"FUNCTION", b"SADD"} & set(peer.asked)


async def test_a_client_does_not_wait_for_an_upgrade_of_the_server() -> None:
    async with scripted_peer(Peer(OLD)) as port:
        with pytest.raises(EngineError, match=r"detected 7\.2, required >= 8\.0"):
            await asyncio.wait_for(
                ValkeyBackend.connect(parse_url(f"valkey://127.0.0.1:{port}")), timeout=5
            )


def clock(*times: tuple[int, int]) -> Callable[[list[bytes]], bytes]:
    """A server whose TIME shows these one after the other."""
    left = list(times)

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"TIME":
            seconds, micros = left.pop(0)
            return b"*2\r\n" + bulk(str(seconds)) + bulk(str(micros))
        return HELLO if command[0] == b"HELLO" else b"-NOPERM no\r\n"

    return answer


@pytest.mark.parametrize(
    ("times", "ok"),
    [
        (((100, 5), (100, 5)), False),
        (((100, 5), (100, 4)), False),
        (((100, 999_999), (99, 999_999)), False),
        (((100, 5), (100, 6)), True),
        (((100, 999_999), (101, 0)), True),
    ],
)
async def test_a_clock_that_stops_or_goes_back_is_found(
    times: tuple[tuple[int, int], ...], *, ok: bool
) -> None:
    async with scripted_peer(clock(*times)) as port:
        transport = Transport(parse_url(f"valkey://127.0.0.1:{port}"))
        try:
            findings = {finding.name: finding for finding in await health_findings(transport)}
        finally:
            await transport.aclose()
    assert (findings["clock"].grade is Grade.OK) is ok
    # A server that hides its settings is no reason not to run.
    assert findings["eviction"].grade is Grade.OK


def telling(info: str) -> Callable[[list[bytes]], bytes]:
    """A server that hides its settings, but says how it is."""

    rest = clock((100, 5), (100, 6))

    def answer(command: list[bytes]) -> bytes:
        return bulk(info.replace("\n", "\r\n")) if command[0] == b"INFO" else rest(command)

    return answer


@pytest.mark.parametrize(
    ("info", "name", "grade", "said"),
    [
        ("used_memory:3145728\nmaxmemory:0", "memory", Grade.OK, "3 MiB used, no limit set"),
        ("used_memory:89\nmaxmemory:100", "memory", Grade.OK, "0 KiB of 0 KiB used"),
        ("used_memory:90\nmaxmemory:100", "memory", Grade.WARNING, "nearly full"),
        ("used_memory:100\nmaxmemory:100", "memory", Grade.BROKEN, "the server refuses new work"),
        ("", "memory", Grade.OK, "no limit set"),
        ("role:master\naof_last_write_status:ok", "writes", Grade.OK, "accepted"),
        ("role:slave\nmaster_host:a\nmaster_port:1", "writes", Grade.BROKEN, "replica of a:1"),
        ("aof_last_write_status:err", "writes", Grade.BROKEN, "append-only file failed"),
        ("rdb_last_bgsave_status:err", "writes", Grade.BROKEN, "last snapshot failed"),
    ],
)
async def test_memory_and_writes(info: str, name: str, grade: Grade, said: str) -> None:
    async with scripted_peer(telling(f"# Section\n{info}\n")) as port:
        transport = Transport(parse_url(f"valkey://127.0.0.1:{port}"))
        try:
            findings = {finding.name: finding for finding in await health_findings(transport)}
        finally:
            await transport.aclose()
    found = findings[name]
    assert found.grade is grade
    assert said in found.detail
    assert bool(found.advice) is (grade is not Grade.OK)


@pytest.fixture
async def server(valkey: TestServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Transport]:
    """Empty: no counts, no library."""
    monkeypatch.delenv("FF_DEV_MODE", raising=False)
    monkeypatch.delenv("FF_FORCE_LUA_RELOAD", raising=False)
    transport = await connect(parse_url(valkey.url))
    await transport.call("FLUSHALL")
    await transport.call("FUNCTION", "FLUSH")
    yield transport
    await transport.call("FLUSHALL")
    await transport.call("FUNCTION", "FLUSH")
    await transport.aclose()


async def joined(valkey: TestServer) -> PartitionCounts:
    backend = await ValkeyBackend.connect(parse_url(valkey.url))
    await backend.aclose()
    return backend.counts


async def store_counts(server: Transport) -> None:
    names = ("num_flow_partitions", "num_budget_partitions", "num_quota_partitions")
    pairs = zip(names, (COUNTS.flow, COUNTS.budget, COUNTS.quota), strict=True)
    await server.call("HSET", keys.CONFIG_PARTITIONS, *(part for pair in pairs for part in pair))


async def test_a_client_loads_nothing_into_a_server_that_was_never_prepared(
    valkey: TestServer, server: Transport
) -> None:
    with pytest.raises(ConfigError, match="no partition counts"):
        await joined(valkey)
    assert await read_library(server) is None


async def test_a_client_loads_a_missing_library(valkey: TestServer, server: Transport) -> None:
    await store_counts(server)
    assert await joined(valkey) == COUNTS
    stored = await read_library(server)
    assert stored is not None
    assert stored.version == library.LIBRARY_VERSION


async def test_a_client_refuses_a_library_that_does_not_serve_it(
    valkey: TestServer, server: Transport
) -> None:
    await store_counts(server)
    newer = library.LIBRARY_VERSION + 1
    await server.call("FUNCTION", "LOAD", made(newer, "x", newer))
    with pytest.raises(EngineError, match="Upgrade this process") as caught:
        await joined(valkey)
    assert caught.value.code == "library_version_conflict"
    await server.call("FUNCTION", "LOAD", "REPLACE", made(newer, "x", newer - 1))
    assert await joined(valkey) == COUNTS
    assert await read_library(server) == LibraryInfo(newer, "x", newer - 1)


async def test_a_client_does_not_end_the_service_of_older_processes(
    valkey: TestServer, server: Transport
) -> None:
    await store_counts(server)
    older = LibraryInfo(library.MIN_CLIENT - 1, "x", 0)
    await server.call("FUNCTION", "LOAD", made(older.version, "x", 0))
    with pytest.raises(EngineError, match="doctor --prepare"):
        await joined(valkey)
    assert await read_library(server) == older
    await (await ValkeyBackend.connect(parse_url(valkey.url), prepare_with=COUNTS)).aclose()
    assert await joined(valkey) == COUNTS


async def test_joining_is_three_commands_in_one_write(
    valkey: TestServer, server: Transport
) -> None:
    await store_counts(server)
    await joined(valkey)
    asked = await commands(server)
    await joined(valkey)
    after = await commands(server)
    spent = {name: count - asked.get(name, 0) for name, count in after.items()}
    spent = {name: count for name, count in spent.items() if count and name != "info"}
    assert spent == {"hello": 1, "ping": 1, "hmget": 1, "fcall": 1}


async def commands(server: Transport) -> dict[str, int]:
    text = (await server.call("INFO", "commandstats")).decode()
    rows = (line.removeprefix("cmdstat_").split(":calls=") for line in text.splitlines())
    return {row[0]: int(row[1].split(",")[0]) for row in rows if len(row) == 2}


@pytest.mark.parametrize("prepare_with", [None, COUNTS])
async def test_the_owner_of_a_server_replaces_other_content_of_its_version(
    valkey: TestServer, server: Transport, prepare_with: PartitionCounts | None
) -> None:
    """As after an upgrade of the package: the folder of the embedded Valkey kept the old one."""
    await store_counts(server)
    await server.call("FUNCTION", "LOAD", made(library.LIBRARY_VERSION, "x", 1))
    address = parse_url(valkey.url)
    with pytest.raises(EngineError, match="FF_FORCE_LUA_RELOAD"):
        await ValkeyBackend.connect(address, prepare_with=prepare_with)
    backend = await ValkeyBackend.connect(address, prepare_with=prepare_with, revive=os.getpid)
    await backend.aclose()
    stored = await read_library(server)
    assert stored is not None
    assert stored.content_hash != "x"


async def test_a_check_cancelled_at_its_start_leaves_no_coroutine_behind(
    backend: ValkeyBackend,
) -> None:
    """A program may end right after it connected. Python warns of coroutines never awaited."""
    check = asyncio.create_task(health_findings(backend.transport))
    await asyncio.sleep(0)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del check
        gc.collect()
    assert seen == []
