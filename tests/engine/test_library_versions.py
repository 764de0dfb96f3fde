"""Which library stays in the server when this process and the server differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from flowfabric.core.errors import EngineError, TransportError
from flowfabric.valkey import library
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connect import connect
from flowfabric.valkey.library import LibraryInfo, ensure_library, read_library, read_primaries
from flowfabric.valkey.transport import Ask, Transport
from tests.cluster.nodes import TestCluster
from tests.support.server import TestServer

OURS, SERVES_FROM = 5, 3
_, OUR_HASH = library._body()
OTHER = "another build"


def made(version: int, content_hash: str, min_client: int) -> str:
    """A library that says this of itself, and nothing else."""
    return (
        "#!lua name=flowfabric\n"
        "server.register_function{function_name='ff_version', flags={'no-writes'}, "
        f"callback=function() return {{{version}, '{content_hash}', {min_client}}} end}}"
    )


STORED: dict[str, tuple[int, str, int] | None] = {
    "missing": None,
    "too_old": (SERVES_FROM - 1, OTHER, 1),
    "older": (SERVES_FROM, OTHER, 1),
    "same": (OURS, OUR_HASH, SERVES_FROM),
    "other_content": (OURS, OTHER, SERVES_FROM),
    "newer": (OURS + 1, OTHER, OURS),
    "too_new": (OURS + 1, OTHER, OURS + 1),
}
# What a boot does. The others differ in one line each.
BOOT = {
    "missing": "load",
    "too_old": "load",
    "older": "load",
    "same": "keep",
    "other_content": "FF_FORCE_LUA_RELOAD=1",
    "newer": "keep",
    "too_new": "Upgrade this process",
}
RULES: dict[str, dict[str, str]] = {
    "boot": BOOT,
    "forced": BOOT | {"other_content": "load"},
    "owned": BOOT | {"other_content": "load"},
    "joining": BOOT | {"too_old": "doctor --prepare"},
}
TABLE = [(rule, stored, what) for rule, row in RULES.items() for stored, what in row.items()]


@pytest.fixture(autouse=True)
def our_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY_VERSION", OURS)
    monkeypatch.setattr(library, "MIN_CLIENT", SERVES_FROM)
    monkeypatch.delenv("FF_FORCE_LUA_RELOAD", raising=False)


@pytest.fixture
async def server(valkey: TestServer) -> AsyncIterator[Transport]:
    transport = await connect(parse_url(valkey.url))
    await transport.call("FUNCTION", "FLUSH")
    yield transport
    # The next test loads the real one again.
    await transport.call("FUNCTION", "FLUSH")
    await transport.aclose()


@pytest.fixture(scope="module")
def running() -> Iterator[TestCluster]:
    cluster = TestCluster()
    asyncio.run(cluster.form())
    yield cluster
    cluster.stop()


@pytest.fixture
async def cluster(running: TestCluster) -> AsyncIterator[Transport]:
    transport = await connect(parse_url(running.url))
    await transport.call_all_primaries("FUNCTION", "FLUSH")
    yield transport
    await transport.aclose()


async def ensure(transport: Transport, rule: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    if rule == "forced":
        monkeypatch.setenv("FF_FORCE_LUA_RELOAD", "1")
    return await ensure_library(transport, owned=rule == "owned", only_joining=rule == "joining")


async def put(ask: Ask, stored: str) -> LibraryInfo | None:
    """Have one primary hold this, as it would say it."""
    of = STORED[stored]
    if of is None:
        return None
    await ask("FUNCTION", "LOAD", made(*of))
    return LibraryInfo(*of)


OUR_INFO = LibraryInfo(OURS, OUR_HASH, SERVES_FROM)


@pytest.mark.parametrize(("rule", "stored", "what"), TABLE)
async def test_one_server(
    server: Transport, monkeypatch: pytest.MonkeyPatch, rule: str, stored: str, what: str
) -> None:
    before = await put(server.call, stored)
    if what in {"load", "keep"}:
        assert await ensure(server, rule, monkeypatch) is (what == "load")
        assert await read_library(server) == (OUR_INFO if what == "load" else before)
        assert not await ensure(server, rule, monkeypatch)
    else:
        with pytest.raises(EngineError, match="library_version_conflict") as caught:
            await ensure(server, rule, monkeypatch)
        assert caught.value.code == "library_version_conflict"
        assert what in caught.value.hint
        assert what in str(caught.value)
        assert await read_library(server) == before


@pytest.mark.parametrize(("rule", "stored", "what"), TABLE)
async def test_one_primary_of_a_cluster(
    cluster: Transport, monkeypatch: pytest.MonkeyPatch, rule: str, stored: str, what: str
) -> None:
    """The first primary holds this, the second nothing, the third a newer one to keep."""
    one, two, three = await cluster.primaries()
    asks = await cluster.primaries()
    before = {
        one: await put(asks[one], stored),
        two: None,
        three: await put(asks[three], "newer"),
    }
    if what in {"load", "keep"}:
        assert await ensure(cluster, rule, monkeypatch)
        first = OUR_INFO if what == "load" else before[one]
        assert await read_primaries(cluster) == {one: first, two: OUR_INFO, three: before[three]}
        assert not await ensure(cluster, rule, monkeypatch)
    else:
        with pytest.raises(EngineError) as caught:
            await ensure(cluster, rule, monkeypatch)
        assert caught.value.code == "library_version_conflict"
        assert what in caught.value.hint
        # A conflict anywhere leaves everything as it was.
        assert await read_primaries(cluster) == before


async def test_the_oldest_primary_speaks_for_the_cluster(cluster: Transport) -> None:
    one, two, three = (await cluster.primaries()).values()
    await put(one, "newer")
    await put(two, "older")
    assert await read_library(cluster) is None
    await put(three, "same")
    oldest = await read_library(cluster)
    assert oldest is not None
    assert oldest.version == SERVES_FROM


class Racing:
    """A server on which another process acts between our look and our load."""

    is_cluster = False

    def __init__(self, server: Transport, *loads: str) -> None:
        self._server = server
        self._left = list(loads)
        self.sent: list[tuple[Any, ...]] = []

    async def primaries(self) -> dict[str, Ask]:
        return {"it": self._ask}

    async def _ask(self, *args: Any, timeout: float | None = None) -> Any:
        if args[:2] == ("FUNCTION", "LOAD") and self._left:
            await self._server.call("FUNCTION", "LOAD", "REPLACE", self._left.pop(0))
        self.sent.append(args[:-1])
        return await self._server.call(*args, timeout=timeout)


async def race(server: Transport, *loads: str) -> tuple[bool, list[tuple[Any, ...]]]:
    racing = Racing(server, *loads)
    found = await read_primaries(server)
    return await ensure_library(racing, found=found), racing.sent  # pyright: ignore[reportArgumentType]


async def test_a_newer_one_that_came_meanwhile_stays(server: Transport) -> None:
    loaded, sent = await race(server, made(OURS + 1, OTHER, OURS))
    assert not loaded
    assert ("FUNCTION", "LOAD", "REPLACE") not in sent
    assert await read_library(server) == LibraryInfo(OURS + 1, OTHER, OURS)


async def test_an_older_one_that_came_meanwhile_is_replaced(server: Transport) -> None:
    loaded, sent = await race(server, made(SERVES_FROM, OTHER, 1))
    assert loaded
    assert [args for args in sent if args[0] == "FUNCTION"] == [
        ("FUNCTION", "LOAD"),
        ("FUNCTION", "LOAD", "REPLACE"),
    ]
    assert await read_library(server) == OUR_INFO


async def test_the_look_before_a_replacement_is_a_fresh_one(server: Transport) -> None:
    """Between the first look and the load, an older library has become a newer one."""
    await put(server.call, "older")
    found = await read_primaries(server)
    await server.call("FUNCTION", "LOAD", "REPLACE", made(OURS + 1, OTHER, OURS))
    assert not await ensure_library(server, found=found)
    assert await read_library(server) == LibraryInfo(OURS + 1, OTHER, OURS)


async def test_two_forced_builds_do_not_fight_for_ever(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_FORCE_LUA_RELOAD", "yes")
    reloading = Reloading(server)
    with pytest.raises(EngineError, match="all the time"):
        await ensure_library(reloading)  # pyright: ignore[reportArgumentType]


class Reloading(Racing):
    """The other process loads its own again as soon as ours is in."""

    async def _ask(self, *args: Any, timeout: float | None = None) -> Any:
        reply = await self._server.call(*args, timeout=timeout)
        if args[:2] == ("FUNCTION", "LOAD"):
            await self._server.call("FUNCTION", "LOAD", "REPLACE", made(OURS, OTHER, 1))
        return reply


async def test_a_library_that_does_not_say_what_it_is_is_replaced(server: Transport) -> None:
    await server.call(
        "FUNCTION",
        "LOAD",
        "#!lua name=flowfabric\nserver.register_function('ff_other', function() return 1 end)",
    )
    assert await ensure_library(server)
    assert await read_library(server) == OUR_INFO


async def test_a_load_that_cannot_succeed_is_not_repeated(server: Transport) -> None:
    await server.call(
        "FUNCTION",
        "LOAD",
        "#!lua name=stranger\nserver.register_function('ff_create', function() return 1 end)",
    )
    with pytest.raises(TransportError, match="ff_create already exists"):
        await asyncio.wait_for(ensure_library(server), 5)
