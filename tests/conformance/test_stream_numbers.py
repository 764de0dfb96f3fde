"""Numbered appends: a repeat writes nothing, from any writer."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.engine import Engine, refused, unchanged
from tests.support.streams import append, frames, holder, payloads


async def test_a_repeated_number_writes_nothing(engine: Engine) -> None:
    handle = await engine.running()
    first = await append(engine, handle, b"a", seq=5)
    again = await unchanged(engine, lambda: append(engine, handle, b"other", seq=5))
    assert again == msgspec.structs.replace(first, duplicate=True)
    older = await unchanged(engine, lambda: append(engine, handle, b"other", seq=4))
    assert (older.duplicate, older.stream_ids, older.stream_id, older.frame_count) == (
        True,
        (),
        "",
        1,
    )
    later = await append(engine, handle, b"b", seq=900)
    assert (later.duplicate, later.frame_count) == (False, 2)
    assert await payloads(engine, handle) == [b"a", b"b"]


async def test_frames_without_a_number_do_not_disturb(engine: Engine) -> None:
    handle = await engine.running()
    numbered = await append(engine, handle, b"a", seq=1)
    await append(engine, handle, b"b")
    again = await append(engine, handle, b"a", seq=1)
    assert (again.duplicate, again.stream_id, again.frame_count) == (True, numbered.stream_id, 2)


@pytest.mark.parametrize("numbers", [(0, 1), (9, 10), (2**53, 2**53 + 1), (2**64 - 2, 2**64 - 1)])
async def test_numbers_are_exact(engine: Engine, numbers: tuple[int, int]) -> None:
    handle = await engine.running()
    low, high = numbers
    for seq, duplicate in ((low, False), (low, True), (high, False), (low, True), (high, True)):
        assert (await append(engine, handle, b"x", seq=seq)).duplicate is duplicate


async def test_a_repeated_batch_has_its_ids(engine: Engine) -> None:
    handle, batch = await engine.running(), frames("a", "b", "c")
    await append(engine, handle, b"before")
    first = await engine.backend.streams.append_frames(handle, batch, seq=3)
    again = await unchanged(
        engine, lambda: engine.backend.streams.append_frames(handle, batch, seq=3)
    )
    assert len(first.stream_ids) == 3
    assert again == msgspec.structs.replace(first, duplicate=True)


async def test_a_repeated_patch_is_not_merged_again(engine: Engine) -> None:
    handle = await engine.running()
    first = await append(engine, handle, b'{"n":1}', mode="summary", seq=1)
    again = await unchanged(
        engine, lambda: append(engine, handle, b'{"n":1}', mode="summary", seq=1)
    )
    assert again == msgspec.structs.replace(first, duplicate=True)
    assert first.summary_version == 1


async def test_a_repeat_is_fenced_like_any_append(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"x", seq=1)
    await refused(append(engine, holder(handle, epoch=3), b"x", seq=1), "stale_owner_cannot_append")
