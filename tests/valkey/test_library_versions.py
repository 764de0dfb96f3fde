"""Which library stays in the server when this process and the server differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from flowfabric.core.errors import ConfigError, EngineError, TransportError
from flowfabric.engine.valkey import library
from flowfabric.engine.valkey.library import (
    LibraryInfo,
    ensure_library,
    read_library,
    read_primaries,
)
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.connect import connect
from flowfabric.valkey.transport import Ask, Transport
from tests.support.cluster import TestCluster
from tests.support.server import TestServer

OURS, SERVES_FROM = 5, 3
OTHER = "another build"


def made(version: int, content_hash: str, min_client: int, *settings: int) -> str:
    """A library that says this of itself, and nothing else."""
    said = ", ".join(map(str, (version, f"'{content_hash}'", min_client, *settings)))
    return (
        "#!lua name=flowfabric\n"
        "server.register_function{function_name='ff_version', flags={'no-writes'}, "
        f"callback=function() return {{{said}}} end}}"
    )


def ours(**settings: Any) -> LibraryInfo:
    """What our own library says of itself."""
    return LibraryInfo(OURS, library._body()[1], SERVES_FROM, **settings)


STORED: dict[str, tuple[int, str, int] | None] = {
    "missing": None,
    "too_old": (SERVES_FROM - 1, OTHER, 1),
    "older": (SERVES_FROM, OTHER, 1),
    "same": (OURS, "ours", SERVES_FROM),
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
def our_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "LIBRARY_VERSION", OURS)
    monkeypatch.setattr(library, "MIN_CLIENT", SERVES_FROM)
    monkeypatch.delenv("FF_FORCE_LUA_RELOAD", raising=False)
    # As in production: without the functions for tests.
    monkeypatch.setattr(library, "_extensions", [])
    library._body.cache_clear()
    yield
    library._body.cache_clear()


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


async def put(ask: Ask, stored: str, *, cluster: bool = False) -> LibraryInfo | None:
    """Have one primary hold this, as it would say it."""
    of = STORED[stored]
    if of is None:
        return None
    version, content, min_client = of
    content = ours().content_hash if content == "ours" else content
    await ask("FUNCTION", "LOAD", made(version, content, min_client, 10_000, int(cluster)))
    return LibraryInfo(version, content, min_client, cluster=cluster)


@pytest.mark.parametrize(("rule", "stored", "what"), TABLE)
async def test_one_server(
    server: Transport, monkeypatch: pytest.MonkeyPatch, rule: str, stored: str, what: str
) -> None:
    before = await put(server.call, stored)
    if what in {"load", "keep"}:
        assert await ensure(server, rule, monkeypatch) is (what == "load")
        assert await read_library(server) == (ours() if what == "load" else before)
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
        one: await put(asks[one], stored, cluster=True),
        two: None,
        three: await put(asks[three], "newer", cluster=True),
    }
    if what in {"load", "keep"}:
        assert await ensure(cluster, rule, monkeypatch)
        loaded = ours(cluster=True)
        first = loaded if what == "load" else before[one]
        assert await read_primaries(cluster) == {one: first, two: loaded, three: before[three]}
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
    patience_s = 1.0

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
    assert await read_library(server) == ours()


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
    with pytest.raises(EngineError, match="keep loading"):
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
    assert await read_library(server) == ours()


async def test_a_load_that_cannot_succeed_is_not_repeated(server: Transport) -> None:
    await server.call(
        "FUNCTION",
        "LOAD",
        "#!lua name=stranger\nserver.register_function('ff_create', function() return 1 end)",
    )
    with pytest.raises(TransportError, match="ff_create already exists"):
        await asyncio.wait_for(ensure_library(server), 5)


async def test_the_length_of_feeds_is_what_the_last_preparer_wants(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def length(value: str, *, only_joining: bool = False) -> int:
        monkeypatch.setenv("FF_EVENTS_MAXLEN", value)
        await ensure_library(server, only_joining=only_joining)
        assert not await ensure_library(server, only_joining=only_joining)
        info = await read_library(server)
        assert info is not None
        return info.events_maxlen

    assert await length("50") == 50
    assert await length("20") == 20
    # Who has no wish of its own, and who only joins, leaves it.
    assert await length("") == 20
    assert await length("70", only_joining=True) == 20


async def test_how_much_a_call_does_is_what_the_last_preparer_wants(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def units(value: str, *, only_joining: bool = False) -> int:
        monkeypatch.setenv("FF_CASCADE_INLINE_EDGES", value)
        await ensure_library(server, only_joining=only_joining)
        assert not await ensure_library(server, only_joining=only_joining)
        info = await read_library(server)
        assert info is not None
        return info.cascade_units

    assert await units("") == 128
    assert await units("20") == 20
    assert await units("") == 20
    assert await units("70", only_joining=True) == 20
    with pytest.raises(ConfigError, match="FF_CASCADE_INLINE_EDGES"):
        await units("1001")


async def test_an_upgrade_keeps_the_settings(server: Transport) -> None:
    await server.call("FUNCTION", "LOAD", made(SERVES_FROM, OTHER, 1, 77, 0, 0, 50))
    assert await ensure_library(server)
    assert await read_library(server) == ours(events_maxlen=77, cascade_units=50)


async def test_a_primary_that_lost_the_library_gets_the_settings_of_the_others(
    cluster: Transport,
) -> None:
    one, *others = (await cluster.primaries()).values()
    await one("FUNCTION", "LOAD", made(OURS, ours().content_hash, SERVES_FROM, 77, 1))
    assert await ensure_library(cluster, only_joining=True)
    for ask in others:
        assert await library._read(ask) == ours(events_maxlen=77, cluster=True)


async def test_a_library_of_a_single_server_is_replaced_in_a_cluster(cluster: Transport) -> None:
    """Its doorbells would wake nobody."""
    for ask in (await cluster.primaries()).values():
        await put(ask, "same", cluster=False)
    assert await ensure_library(cluster, only_joining=True)
    assert set((await read_primaries(cluster)).values()) == {ours(cluster=True)}


@pytest.mark.parametrize("version", [OURS, OURS + 1])
async def test_functions_for_tests_are_refused(server: Transport, version: int) -> None:
    """With them anybody could move the clock."""
    await server.call("FUNCTION", "LOAD", made(version, OTHER, SERVES_FROM, 10_000, 0, 1))
    for only_joining in (False, True):
        with pytest.raises(library.LibraryConflictError, match="move its clock") as caught:
            await ensure_library(server, only_joining=only_joining)
        assert "FUNCTION DELETE flowfabric" in caught.value.hint
    # A test process has them itself.
    library.include("-- another function")
    if version > OURS:
        assert not await ensure_library(server)


@pytest.mark.parametrize("rule", ["owned", "forced"])
async def test_functions_for_tests_are_replaced_like_any_content(
    server: Transport, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    await server.call("FUNCTION", "LOAD", made(OURS, OTHER, SERVES_FROM, 10_000, 0, 1))
    assert await ensure(server, rule, monkeypatch)
    assert await read_library(server) == ours()


async def test_included_functions_are_part_of_the_content(server: Transport) -> None:
    before = ours()
    library.include("register('ff_more', function() return 7 end, { 'no-writes' })")
    assert await ensure_library(server)
    assert await server.call("FCALL", "ff_more", 0) == 7
    assert await read_library(server) == ours(extended=True)
    assert ours().content_hash != before.content_hash
