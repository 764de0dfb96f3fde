"""Tails: waiting, waking, time, isolation from everything else."""

from __future__ import annotations

import asyncio
import time

from tests.support.engine import Engine
from tests.support.streams import append, frames


async def test_what_is_there_is_returned_at_once(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    outcome = await backend.streams.append_frames(handle, frames("a", "b", "c"))
    page = await backend.streams.tail_stream(handle.execution_id, 0, block_ms=30_000, count_limit=2)
    assert [frame.payload for frame in page.frames] == [b"a", b"b"]
    page = await backend.streams.tail_stream(
        handle.execution_id, 0, after=outcome.stream_ids[1], block_ms=30_000
    )
    assert [frame.payload for frame in page.frames] == [b"c"]
    assert (page.next_cursor, page.is_closed) == (outcome.stream_ids[2], False)


async def test_strictly_behind(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    only = await append(engine, handle, b"a")
    ms, seq = only.stream_id.split("-")
    peek = await backend.streams.tail_stream(handle.execution_id, 0, after=only.stream_id)
    assert peek.frames == ()
    if seq == "0":
        peek = await backend.streams.tail_stream(handle.execution_id, 0, after=ms)
        assert peek.frames == ()


async def test_a_peek_does_not_wait(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    async with asyncio.timeout(5):
        page = await backend.streams.tail_stream(handle.execution_id, 0)
    assert (page.frames, page.next_cursor, page.is_closed) == ((), "0-0", False)


async def test_timeout_is_no_error(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    started = time.monotonic()
    page = await backend.streams.tail_stream(handle.execution_id, 0, block_ms=200)
    assert 0.2 <= time.monotonic() - started < 2
    assert (page.frames, page.next_cursor, page.is_closed) == ((), "0-0", False)


async def test_a_wait_longer_than_the_request_timeout(engine: Engine) -> None:
    """The client's general time limit does not cut a tail."""
    handle, started = await engine.running(), time.monotonic()
    page = await engine.backend.streams.tail_stream(handle.execution_id, 0, block_ms=7000)
    assert 7.0 <= time.monotonic() - started < 8
    assert (page.frames, page.is_closed) == ((), False)
