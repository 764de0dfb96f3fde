"""Followers and writers: a stream from its first to its last frame, over lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import AppendOutcome, Frame
from flowfabric.core.errors import EngineError, ValidationError
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.streams import FrameWriter, StreamFollower, Streams
from tests.support.engine import Engine, refused
from tests.support.streams import append, frames, payloads


async def collect(follower: StreamFollower) -> list[bytes]:
    return [frame.payload async for frame in follower]


async def test_a_closed_stream_is_drained(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    ids: list[str] = []
    for first in range(0, 1250, 250):
        batch = frames(*(str(n) for n in range(first, first + 250)))
        ids += (await backend.streams.append_frames(handle, batch)).stream_ids
    await backend.executions.complete(handle)
    follower = backend.streams.follow_stream(handle.execution_id, 0)
    assert await collect(follower) == [b"%d" % n for n in range(1250)]
    half = backend.streams.follow_stream(handle.execution_id, 0, after=ids[-2])
    assert await collect(half) == [b"1249"]
    with pytest.raises(StopAsyncIteration):
        await anext(half)


async def test_hidden_frames_are_passed_over_to_the_end(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    await append(engine, handle, b"a")
    await backend.streams.append_frames(handle, frames(*(b"x",) * 200), mode="best_effort")
    await append(engine, handle, b"b")
    await backend.streams.append_frames(handle, frames(*(b"x",) * 200), mode="best_effort")
    await backend.executions.complete(handle)
    follower = backend.streams.follow_stream(
        handle.execution_id, 0, visibility="exclude_best_effort"
    )
    assert await collect(follower) == [b"a", b"b"]
    assert follower.closed_reason == "attempt_success"


async def test_gaps_are_told(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    for number in range(9):
        await append(engine, handle, str(number), retention_maxlen=3)
    await backend.executions.complete(handle)
    follower = backend.streams.follow_stream(handle.execution_id, 0)
    assert await collect(follower) == [b"6", b"7", b"8"]
    assert follower.truncated


async def test_a_bad_position_is_refused(engine: Engine) -> None:
    for after in ("start", "end", "", "x"):
        with pytest.raises(ValidationError):
            engine.backend.streams.follow_stream(engine.new_id(), 0, after=after)
    with pytest.raises(EngineError):
        await anext(engine.backend.streams.follow_stream(engine.new_id(), -1))


# --- writing ------------------------------------------------------------------------------------


class Recorder:
    """Passes appends on, and keeps how many frames each had."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.sizes: list[int] = []

    async def append_frames(
        self, handle: Handle, frames: Sequence[Frame], **options: Any
    ) -> AppendOutcome:
        self.sizes.append(len(frames))
        return await self._backend.streams.append_frames(handle, frames, **options)


async def test_bursts_leave_in_batches(engine: Engine) -> None:
    handle = await engine.running()
    recorder = Recorder(engine.backend)
    writer = FrameWriter(cast("Streams", recorder), handle)
    for number in range(1000):
        await writer.write(Frame(payload=b"%d" % number))
    await writer.flush()
    assert await payloads(engine, handle) == [b"%d" % n for n in range(1000)]
    assert len(recorder.sizes) <= 10
    assert max(recorder.sizes) <= 256
    await writer.flush()


async def test_batches_stay_under_the_byte_limit(engine: Engine) -> None:
    handle = await engine.running()
    writer = FrameWriter(engine.backend.streams, handle)
    for _ in range(40):
        await writer.write(Frame(payload=bytes(60_000)))
    await writer.flush()
    assert len(await payloads(engine, handle)) == 40


async def test_much_to_write_makes_writers_wait(engine: Engine) -> None:
    handle = await engine.running()
    writer = FrameWriter(engine.backend.streams, handle)
    most = 0
    for _ in range(5000):
        await writer.write(Frame(payload=b"x"))
        most = max(most, len(writer._waiting))  # pyright: ignore[reportPrivateUsage]
    await writer.flush()
    assert most <= 1025
    assert len(await payloads(engine, handle)) == 5000


async def test_every_frame_has_its_own_outcome(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    writer = FrameWriter(backend.streams, handle)
    outcomes = await asyncio.gather(*(writer.append(frame) for frame in frames(*"abcdef")))
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [o.stream_ids for o in outcomes] == [(frame.id,) for frame in page.frames]
    assert [o.frame_count for o in outcomes] == [1, 2, 3, 4, 5, 6]


async def test_modes_keep_their_order(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    writer = FrameWriter(backend.streams, handle)
    modes: list[Any] = ["durable", "durable", "summary", "summary", "best_effort", "durable"]
    outcomes = await asyncio.gather(
        *(writer.append(Frame(payload=b"{}"), mode=mode) for mode in modes)
    )
    page = await backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.mode for frame in page.frames] == modes
    assert [o.summary_version for o in outcomes] == [None, None, 1, 2, None, None]


async def test_a_bad_frame_fails_alone(engine: Engine) -> None:
    handle = await engine.running()
    writer = FrameWriter(engine.backend.streams, handle)
    good = asyncio.ensure_future(writer.append(Frame(payload=b"good")))
    bad = asyncio.ensure_future(writer.append(Frame(payload=bytes(65_537))))
    patches = [
        asyncio.ensure_future(writer.append(Frame(payload=text), mode="summary"))
        for text in (b"{}", b"[]", b'{"a":1}')
    ]
    await asyncio.wait([good, bad, *patches])
    assert (await good).frame_count == 1
    await refused(bad, "retention_limit_exceeded")
    await refused(patches[1], "invalid_input")
    assert (await patches[2]).summary_version == 2


async def test_numbers_go_on_after_a_resume(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    writer = FrameWriter(backend.streams, handle)
    for frame in frames("a", "b", "c"):
        await writer.append(frame)
    await backend.executions.delay(handle, 1)
    resumed = (await engine.claim()).handle
    outcome = await FrameWriter(backend.streams, resumed).append(frames("d")[0])
    assert (outcome.duplicate, outcome.frame_count) == (False, 4)
    assert await payloads(engine, resumed) == [b"a", b"b", b"c", b"d"]


async def test_a_lost_lease_is_told_by_every_later_call(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    writer = FrameWriter(backend.streams, handle)
    await writer.write(frames("in time")[0])
    await writer.flush()
    await backend.leases.revoke_lease(handle.execution_id)
    await writer.write(frames("late")[0])
    for _ in range(2):
        await refused(writer.flush(), "stale_owner_cannot_append")
        await refused(writer.write(frames("later")[0]), "stale_owner_cannot_append")
    await refused(writer.append(frames("later")[0]), "stale_owner_cannot_append")
    assert await payloads(engine, handle) == [b"in time"]
