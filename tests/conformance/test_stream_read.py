"""Range reads: pages, bounds, filters, gaps, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import StreamFrames
from tests.support.engine import Engine, refused, unchanged
from tests.support.streams import append, frames, payloads

LARGEST = 2**64 - 1


async def fifty(engine: Engine) -> Handle:
    handle = await engine.running()
    for first in range(0, 50, 10):
        batch = frames(*(f"{n}" for n in range(first, first + 10)))
        await engine.backend.streams.append_frames(handle, batch)
    return handle


async def read(engine: Engine, handle: Handle, **how: Any) -> StreamFrames:
    return await engine.backend.streams.read_stream(
        handle.execution_id, handle.attempt_index, **how
    )


def numbers(page: StreamFrames) -> list[int]:
    return [int(frame.payload) for frame in page.frames]


async def test_page_and_resume(engine: Engine) -> None:
    handle = await fifty(engine)
    first = await read(engine, handle, count_limit=20)
    assert numbers(first) == list(range(20))
    assert first.next_cursor == first.frames[-1].id
    ms, seq = first.next_cursor.split("-")
    rest = await read(engine, handle, from_=f"{ms}-{int(seq) + 1}")
    assert numbers(rest) == list(range(20, 50))
    overlapping = await read(engine, handle, from_=first.next_cursor)
    assert numbers(overlapping) == list(range(19, 50))
    assert not rest.is_closed
    assert not rest.truncated


async def test_bounds_are_inclusive(engine: Engine) -> None:
    handle = await fifty(engine)
    ids = [frame.id for frame in (await read(engine, handle)).frames]
    assert numbers(await read(engine, handle, from_=ids[3], to=ids[5])) == [3, 4, 5]
    assert numbers(await read(engine, handle, from_=ids[3], to=ids[3])) == [3]
    assert numbers(await read(engine, handle, from_=ids[48])) == [48, 49]
    assert numbers(await read(engine, handle, to=ids[1])) == [0, 1]
    backwards = await read(engine, handle, from_=ids[5], to=ids[3])
    assert (backwards.frames, backwards.next_cursor) == ((), ids[5])


async def test_start_and_end_name_entries(engine: Engine) -> None:
    handle = await fifty(engine)
    assert numbers(await read(engine, handle, from_="end")) == [49]
    assert numbers(await read(engine, handle, to="start")) == [0]
    assert numbers(await read(engine, handle, from_="end", to="start")) == []
    empty = await engine.backend.streams.read_stream(engine.new_id(), 0, from_="end", to="start")
    assert (empty.frames, empty.next_cursor) == ((), "end")


async def test_reading_changes_nothing(engine: Engine) -> None:
    handle = await fifty(engine)
    backend, execution_id = engine.backend, handle.execution_id
    await unchanged(engine, lambda: backend.streams.read_stream(execution_id, 0))
    await unchanged(engine, lambda: backend.streams.tail_stream(execution_id, 0))
    await unchanged(engine, lambda: backend.streams.read_stream(execution_id, 1))
    await unchanged(engine, lambda: backend.streams.read_summary(execution_id, 0))


@pytest.mark.parametrize("count", [0, -1, 10_001])
async def test_counts_are_refused_by_the_engine(engine: Engine, count: int) -> None:
    handle = await fifty(engine)
    backend, execution_id = engine.backend, handle.execution_id
    expected = "count_limit_exceeds_hard_cap" if count > 1 else "count_limit must be >= 1"
    for call in (backend.streams.read_stream, backend.streams.tail_stream):
        error = await refused(call(execution_id, 0, count_limit=count), "invalid_input")
        assert error.details == (expected,)
    assert (
        len((await backend.streams.read_stream(execution_id, 0, count_limit=10_000)).frames) == 50
    )


async def test_refusals(engine: Engine) -> None:
    handle = await fifty(engine)
    backend, execution_id = engine.backend, handle.execution_id
    bad: list[dict[str, Any]] = [
        {"from_": "-"},
        {"to": "+"},
        {"from_": ""},
        {"to": "abc"},
        {"from_": str(LARGEST + 1)},
        {"visibility": "none"},
    ]
    for how in bad:
        await refused(backend.streams.read_stream(execution_id, 0, **how), "invalid_input")
    for index in (-1, 2**32, True, 1.5):
        await refused(backend.streams.read_stream(execution_id, index), "invalid_input")  # pyright: ignore[reportArgumentType]
        await refused(backend.streams.read_summary(execution_id, index), "invalid_input")  # pyright: ignore[reportArgumentType]
    for after in ("start", "end"):
        error = await refused(
            backend.streams.tail_stream(execution_id, 0, after=after), "invalid_input"
        )
        assert "0-0" in error.detail
    for block in (30_001, -1, True):
        await refused(backend.streams.tail_stream(execution_id, 0, block_ms=block), "invalid_input")
    await refused(backend.streams.read_stream("nonsense", 0), "invalid_input")  # pyright: ignore[reportArgumentType]


# --- filters ------------------------------------------------------------------------------------


async def mixed(engine: Engine, *runs: tuple[str, int]) -> Handle:
    """Runs of durable (`d`) and best-effort (`b`) frames, numbered throughout."""
    handle, backend = await engine.running(), engine.backend
    number = 0
    for mode, count in runs:
        end = number + count
        while number < end:
            size = min(end - number, 250)
            batch = frames(*(str(n) for n in range(number, number + size)))
            await backend.streams.append_frames(
                handle, batch, mode="durable" if mode == "d" else "best_effort"
            )
            number += size
    return handle


VISIBLE: dict[str, Any] = {"visibility": "exclude_best_effort"}


async def test_a_filtered_read_passes_over_hidden_runs(engine: Engine) -> None:
    handle = await mixed(engine, ("d", 1), ("b", 2300), ("d", 2), ("b", 5))
    everything = await payloads(engine, handle)
    assert len(everything) == 2308
    page = await read(engine, handle, count_limit=2, **VISIBLE)
    assert numbers(page) == [0, 2301]
    assert page.next_cursor == page.frames[-1].id
    page = await read(engine, handle, from_=page.next_cursor, count_limit=2, **VISIBLE)
    assert numbers(page) == [2301, 2302]
    page = await read(engine, handle, from_=page.next_cursor, count_limit=5, **VISIBLE)
    assert numbers(page) == [2302]
    # All up to the end was looked at.
    newest = (await read(engine, handle, from_="end")).frames[0]
    assert page.next_cursor == newest.id


async def test_a_filtered_read_longer_than_one_look(engine: Engine) -> None:
    handle = await mixed(engine, ("d", 1), ("b", 9990))
    await engine.backend.streams.append_frames(handle, frames(*(b"x",) * 250), mode="best_effort")
    await append(engine, handle, b"1", retention_maxlen=20_000)
    page = await read(engine, handle, count_limit=10, **VISIBLE)
    assert numbers(page) == [0, 1]
    tail = await engine.backend.streams.tail_stream(
        handle.execution_id, 0, count_limit=10, **VISIBLE
    )
    assert numbers(tail) == [0, 1]


async def test_a_filtered_tail_makes_progress(engine: Engine) -> None:
    handle, backend = await mixed(engine, ("b", 300)), engine.backend
    page = await backend.streams.tail_stream(handle.execution_id, 0, count_limit=10, **VISIBLE)
    newest = (await read(engine, handle, from_="end")).frames[0]
    assert (page.frames, page.next_cursor) == ((), newest.id)
    await append(engine, handle, b"300")
    page = await backend.streams.tail_stream(
        handle.execution_id, 0, after=page.next_cursor, count_limit=10, **VISIBLE
    )
    assert numbers(page) == [300]


async def test_an_empty_page_keeps_the_position(engine: Engine) -> None:
    handle = await fifty(engine)
    for position in ("999999999999999-0", "999999999999999"):
        assert (await read(engine, handle, from_=position)).next_cursor == position
    tail = await engine.backend.streams.tail_stream(
        handle.execution_id, 0, after="999999999999999-5"
    )
    assert (tail.frames, tail.next_cursor) == ((), "999999999999999-5")
    last = f"{LARGEST}-{LARGEST}"
    tail = await engine.backend.streams.tail_stream(handle.execution_id, 0, after=last)
    assert (tail.frames, tail.next_cursor) == ((), last)


# --- gaps ---------------------------------------------------------------------------------------


async def test_gaps_are_told(engine: Engine) -> None:
    handle, backend = await engine.running(), engine.backend
    ids = [(await append(engine, handle, str(n), retention_maxlen=5)).stream_id for n in range(10)]
    execution_id = handle.execution_id
    assert (await read(engine, handle)).truncated
    assert (await read(engine, handle, from_="0")).truncated
    assert (await read(engine, handle, from_=ids[2])).truncated
    assert (await backend.streams.tail_stream(execution_id, 0)).truncated
    assert (await backend.streams.tail_stream(execution_id, 0, after=ids[2])).truncated
    for position in ids[5:]:
        assert not (await read(engine, handle, from_=position)).truncated
        assert not (await backend.streams.tail_stream(execution_id, 0, after=position)).truncated
    assert not (await read(engine, handle, from_="end")).truncated


async def test_nothing_trimmed_is_no_gap(engine: Engine) -> None:
    handle = await fifty(engine)
    assert not (await read(engine, handle)).truncated
    assert not (await engine.backend.streams.tail_stream(handle.execution_id, 0)).truncated
