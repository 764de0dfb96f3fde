"""Permits of stream calls: the ceiling, the readers' share, shutdown, settings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from flowfabric.core.errors import (
    ConfigError,
    EngineError,
    LimitError,
    TimeoutError_,
    UnavailableError,
)
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.stream_pool import StreamPool, ceiling_from_env
from tests.support.engine import Engine, refused
from tests.support.storage import until_blocked, use_pool, waiting_tail
from tests.support.streams import append, frames


@pytest.fixture
async def small(engine: Engine) -> Engine:
    """An engine whose pool has eight permits."""
    await use_pool(engine.backend, StreamPool(engine.backend.transport, 8))
    return engine


async def exhausted(backend: ValkeyBackend, execution_id: object, **how: int) -> LimitError:
    error = await refused(
        backend.streams.tail_stream(execution_id, 0, block_ms=1000, **how),  # pyright: ignore[reportArgumentType]
        "resource_exhausted",
    )
    assert isinstance(error, LimitError)
    return error


async def test_exhaustion_is_reported_immediately(small: Engine) -> None:
    handle, backend = await small.running(), small.backend
    tails = [await waiting_tail(small, handle.execution_id) for _ in range(8)]
    error = await exhausted(backend, handle.execution_id)
    assert error.details == ("stream_ops", "max=8", "retry_after_ms=200")
    assert (error.retryable, error.http_status, error.retry_after_ms) == (True, 429, 200)
    assert backend.stream_pool.held == 8
    # Writing, summaries and everything else need no permit.
    await backend.streams.append_frame(handle, frames('{"a":1}')[0], mode="summary")
    async with asyncio.timeout(5):
        await asyncio.gather(*tails)
    assert await backend.streams.read_summary(handle.execution_id, 0) is not None
    assert backend.stream_pool.held == 0
    await backend.streams.tail_stream(handle.execution_id, 0, block_ms=1)


async def test_followers_do_not_keep_readers_out(small: Engine) -> None:
    handle, backend = await small.running(), small.backend
    tails = [await waiting_tail(small, handle.execution_id) for _ in range(8)]
    await backend.streams.read_stream(handle.execution_id, 0)
    await backend.streams.tail_stream(handle.execution_id, 0, block_ms=0)
    # A quarter more, and then readers are refused too.
    with backend.stream_pool.permit(waits=False), backend.stream_pool.permit(waits=False):
        error = await refused(
            backend.streams.read_stream(handle.execution_id, 0), "resource_exhausted"
        )
        assert "retry_after_ms=200" in error.details
        await refused(backend.streams.tail_stream(handle.execution_id, 0), "resource_exhausted")
    await backend.streams.read_stream(handle.execution_id, 0)
    await backend.executions.complete(handle)
    await asyncio.gather(*tails)


@pytest.mark.parametrize(("ceiling", "pause"), [(1, 25), (2, 50), (64, 1600), (1000, 25_000)])
async def test_how_long_to_wait(backend: ValkeyBackend, ceiling: int, pause: int) -> None:
    pool = StreamPool(backend.transport, ceiling)
    pool.held = ceiling
    with pytest.raises(LimitError) as caught, pool.permit(waits=True):
        pass
    assert caught.value.retry_after_ms == pause


async def test_a_failed_call_gives_its_permit_back(small: Engine) -> None:
    backend = small.backend
    execution_id = await small.create()
    await backend.transport.call("SET", f"ff:stream:{execution_id.tag}:{execution_id}:0", "x")
    error = await refused(backend.streams.read_stream(execution_id, 0), "corruption")
    assert "WRONGTYPE" in error.detail
    assert backend.stream_pool.held == 0
    await backend.transport.call("DEL", f"ff:stream:{execution_id.tag}:{execution_id}:0")
    await backend.streams.read_stream(execution_id, 0)


# --- shutdown -----------------------------------------------------------------------------------


async def test_the_pool_shrinks_again(engine: Engine, backend: ValkeyBackend) -> None:
    """A burst of followers leaves no connections behind; a steady reader keeps its own."""
    pool = StreamPool(engine.backend.transport, 8, idle_s=0.2)
    await use_pool(engine.backend, pool)
    handle = await engine.running()
    before = await connected(backend)
    tails = [await waiting_tail(engine, handle.execution_id) for _ in range(8)]
    await append(engine, handle, "x")
    await asyncio.gather(*tails)
    assert await connected(backend) == before + 8
    async with asyncio.timeout(10):
        while await connected(backend) > before + 1:
            await engine.backend.streams.read_stream(handle.execution_id, 0)
        (steady,) = pool._idle[""]
        await engine.backend.streams.read_stream(handle.execution_id, 0)
        assert list(pool._idle[""]) == [steady]
        while pool._idle[""]:
            await connected(backend)
        await steady.aclose()
        # The server counts a connection until it sees that it was closed.
        while await connected(backend) > before:
            pass


async def connected(backend: ValkeyBackend) -> int:
    raw: Any = await backend.transport.call("INFO", "clients")
    text = raw if isinstance(raw, str) else raw.decode()
    return int(text.partition("connected_clients:")[2].split()[0])


async def test_shutdown_ends_waiting_tails_at_once(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    tails = [await waiting_tail(engine, handle.execution_id) for _ in range(16)]
    started = time.monotonic()
    await backend.meta.shutdown_prepare(20.0)
    pages = await asyncio.gather(*tails)
    assert time.monotonic() - started < 10, "not when their time is over"
    assert all(page.frames == () and page.closed_at is None for page in pages)
    for call in (
        backend.streams.read_stream(handle.execution_id, 0),
        backend.streams.tail_stream(handle.execution_id, 0),
    ):
        error = await refused(call, "unavailable")
        assert isinstance(error, UnavailableError)
        assert (error.retryable, error.http_status) == (True, 503)
    # Workers go on writing meanwhile.
    await append(engine, handle, b"x")


async def test_shutdown_reports_calls_that_outlast_the_grace(engine: Engine) -> None:
    backend = engine.backend
    with backend.stream_pool.permit(waits=False):
        started = time.monotonic()
        with pytest.raises(TimeoutError_) as caught:
            await backend.meta.shutdown_prepare(0.2)
        assert 0.2 <= time.monotonic() - started < 2
        assert (caught.value.code, caught.value.op) == ("timeout", "shutdown_prepare")
        assert caught.value.details[0] == "shutdown_prepare"
        assert caught.value.details[1].startswith("elapsed_ms=")
        with pytest.raises(TimeoutError_):
            await backend.meta.shutdown_prepare(0)
    await backend.meta.shutdown_prepare(0)


async def test_closing_ends_waiting_tails(engine: Engine, backend: ValkeyBackend) -> None:
    handle = await engine.running()
    other = ValkeyBackend(backend.transport, PartitionCounts())
    tail = asyncio.ensure_future(other.streams.tail_stream(handle.execution_id, 0, block_ms=20_000))
    await until_blocked(backend)
    await other.stream_pool.aclose()
    with pytest.raises(EngineError) as caught:
        async with asyncio.timeout(5):
            await tail
    assert caught.value.code == "transport"
    await until_blocked(backend, 0)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "ceiling"),
    [
        ({}, 64),
        ({"FF_MAX_CONCURRENT_STREAM_OPS": "7"}, 7),
        ({"FF_MAX_CONCURRENT_TAIL": "9"}, 9),
        ({"FF_MAX_CONCURRENT_STREAM_OPS": "7", "FF_MAX_CONCURRENT_TAIL": "nonsense"}, 7),
        ({"FF_MAX_CONCURRENT_STREAM_OPS": ""}, 64),
        ({"FF_MAX_CONCURRENT_STREAM_OPS": " 8 "}, 8),
    ],
)
def test_the_ceiling_is_a_setting(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], ceiling: int
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert ceiling_from_env() == ceiling


@pytest.mark.parametrize("name", ["FF_MAX_CONCURRENT_STREAM_OPS", "FF_MAX_CONCURRENT_TAIL"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "٣", "8 9"])
def test_a_wrong_ceiling_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        ceiling_from_env()


async def test_the_environment_is_read(
    backend: ValkeyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_MAX_CONCURRENT_STREAM_OPS", "3")
    assert StreamPool(backend.transport).ceiling == 3
