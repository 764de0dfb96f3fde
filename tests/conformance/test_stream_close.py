"""Closing: every way an attempt ends, with and without output, and what is left after a purge."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.contracts.leases import Handle
from tests.support.engine import Engine, refused
from tests.support.executions import Case
from tests.support.streams import ENDINGS, SECOND, append, payloads


async def prepared(engine: Engine, name: str, *, wrote: bool) -> Handle:
    """An attempt just before it ends."""
    ending = ENDINGS[name]
    handle = await engine.running(policy=ending.policy)
    if wrote:
        await append(engine, handle, b"output")
    if ending.before is not None:
        await ending.before(engine, handle)
    return handle


@pytest.mark.parametrize("wrote", [True, False], ids=["with output", "silent"])
@pytest.mark.parametrize("name", sorted(ENDINGS))
async def test_the_end_of_an_attempt_closes_its_stream(
    engine: Engine,
    name: str,
    wrote: bool,
) -> None:
    backend, ending = engine.backend, ENDINGS[name]
    handle = await prepared(engine, name, wrote=wrote)
    execution_id = handle.execution_id
    open_before = await backend.streams.read_stream(execution_id, 0)
    assert open_before.is_closed is (name in SECOND)
    earliest = await engine.now()
    await ending.end(engine, handle)
    page = await backend.streams.read_stream(execution_id, 0)
    assert page.closed_reason == ending.reason
    assert page.closed_at is not None
    assert earliest <= page.closed_at <= await engine.now()
    assert [frame.payload for frame in page.frames] == ([b"output"] if wrote else [])
    code = "stale_owner_cannot_append"
    if (await engine.vector(execution_id)).lifecycle_phase != "active":
        code = "stream_closed"
    await refused(append(engine, handle, b"late"), code)
    # A closed stream with nothing behind the position does not make anybody wait.
    async with asyncio.timeout(5):
        tail = await backend.streams.tail_stream(
            execution_id, 0, after=page.next_cursor if wrote else "0-0", block_ms=30_000
        )
    assert (tail.frames, tail.closed_at, tail.closed_reason) == (
        (),
        page.closed_at,
        page.closed_reason,
    )


# --- closed stays closed ------------------------------------------------------------------------


async def test_a_pending_retry_does_not_change_the_reason(engine: Engine) -> None:
    handle = await prepared(engine, "fail with a retry", wrote=True)
    await ENDINGS["fail with a retry"].end(engine, handle)
    first = await engine.backend.streams.read_stream(handle.execution_id, 0)
    await engine.advance(10)
    await engine.backend.executions.cancel_execution(handle.execution_id, "enough")
    second = await engine.backend.streams.read_stream(handle.execution_id, 0)
    assert (second.closed_at, second.closed_reason) == (first.closed_at, "attempt_failure")


@pytest.mark.parametrize("wrote", [True, False], ids=["with output", "silent"])
async def test_a_replay_leaves_the_old_attempt_closed(engine: Engine, wrote: bool) -> None:
    for name in ("complete", "fail", "cancel by an operator", "deadline", "reclaim over the cap"):
        handle = await prepared(engine, name, wrote=wrote)
        await ENDINGS[name].end(engine, handle)
        before = await engine.backend.streams.read_stream(handle.execution_id, 0)
        await engine.backend.executions.replay_execution(handle.execution_id)
        after = await engine.backend.streams.read_stream(handle.execution_id, 0)
        assert (after.closed_at, after.closed_reason) == (before.closed_at, before.closed_reason)
        new = (await engine.claim()).handle
        await append(engine, new, b"again")
        assert not (await engine.backend.streams.read_stream(handle.execution_id, 1)).is_closed
        await engine.backend.executions.complete(new)


async def test_operations_that_do_not_end_the_attempt_leave_it_open(engine: Engine) -> None:
    for state in ("paused_delayed", "paused_waiting", "waiting_children"):
        case = await Case.make(engine, state)
        page = await engine.backend.streams.read_stream(case.execution_id, 0)
        assert not page.is_closed, state
        await engine.backend.executions.cancel_execution(case.execution_id, "done")
    handle = await engine.running()
    await append(engine, handle, b"x")
    await engine.backend.leases.renew(handle)
    await engine.backend.executions.progress(handle, 5, "five")
    assert not (await engine.backend.streams.read_stream(handle.execution_id, 0)).is_closed


# --- races --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["complete", "fail", "cancel by an operator", "revoke"])
async def test_an_append_and_the_end_are_serial(engine: Engine, name: str) -> None:
    """Either the frame is in before the close, or the append is refused; never both or neither."""
    backend = engine.backend
    for first in ("append", "end"):
        handle = await engine.running(policy=ENDINGS[name].policy)
        await append(engine, handle, b"x")
        work = {
            "append": lambda h=handle: append(engine, h, b"y"),
            "end": lambda h=handle: ENDINGS[name].end(engine, h),
        }
        order = [first, *(set(work) - {first})]
        results = dict(
            zip(
                order,
                await asyncio.gather(*(work[k]() for k in order), return_exceptions=True),
                strict=True,
            )
        )
        stored = await payloads(engine, handle)
        assert (b"y" in stored) is not isinstance(results["append"], Exception)
        page = await backend.streams.read_stream(handle.execution_id, 0)
        assert page.is_closed
        if name == "revoke":
            await backend.executions.cancel_execution(handle.execution_id, "done")


async def test_a_zombie_does_not_touch_the_new_attempt(engine: Engine) -> None:
    handle = await prepared(engine, "reclaim", wrote=True)
    new = (await engine.claim(instance="w-2")).handle
    await append(engine, new, b"new")
    await refused(append(engine, handle, b"zombie"), "stale_owner_cannot_append")
    assert await payloads(engine, new) == [b"new"]
    assert await payloads(engine, handle) == [b"output"]


async def test_a_close_after_the_frames_were_seen_is_not_missed(engine: Engine) -> None:
    """The bell of a close that happened before anybody waited is still heard."""
    handle, backend = await engine.running(), engine.backend
    await append(engine, handle, b"x")
    page = await backend.streams.tail_stream(handle.execution_id, 0, block_ms=1000)
    await append(engine, handle, b"y")
    await backend.executions.complete(handle)
    rest = await backend.streams.tail_stream(
        handle.execution_id, 0, after=page.next_cursor, block_ms=20_000
    )
    assert [frame.payload for frame in rest.frames] == [b"y"]
    assert rest.closed_reason == "attempt_success"
