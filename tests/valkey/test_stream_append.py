"""Appending frames: what is stored, who may write, limits, retention."""

from __future__ import annotations

import pytest

from tests.support.engine import Engine, unchanged
from tests.support.storage import length, meta, stream_key
from tests.support.streams import append, frames, payloads


async def test_counters_and_ids(engine: Engine) -> None:
    handle = await engine.running()
    outcomes = [
        await append(engine, handle, b"12345"),
        await engine.backend.streams.append_frames(handle, frames("a", "bb", "ccc")),
        await append(engine, handle, b""),
    ]
    assert [outcome.frame_count for outcome in outcomes] == [1, 4, 5]
    assert not any(outcome.duplicate or outcome.summary_version for outcome in outcomes)
    ids = [entry for outcome in outcomes for entry in outcome.stream_ids]
    page = await engine.backend.streams.read_stream(handle.execution_id, 0)
    assert [frame.id for frame in page.frames] == ids
    assert [tuple(map(int, i.split("-"))) for i in ids] == sorted(
        {tuple(map(int, i.split("-"))) for i in ids}
    )
    stored = await meta(engine, handle)
    assert (stored["frame_count"], stored["total_bytes"], stored["last_sequence"]) == (
        "5",
        "11",
        ids[-1],
    )
    assert stored["attempt"] == handle.attempt


async def test_appending_changes_nothing_else(engine: Engine) -> None:
    handle = await engine.running()
    before = await engine.dump()
    await append(engine, handle, b"one")
    first = await engine.dump()
    own = {stream_key(handle).encode(), stream_key(handle, ":meta").encode()}
    assert set(first) - set(before) == own
    await append(engine, handle, b"two")
    second = await engine.dump()
    assert {name for name in second if second[name] != first[name]} == own


@pytest.mark.corrupts
async def test_a_closed_stream_is_closed_for_its_owner_too(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"x")
    await engine.backend.transport.call(
        "HSET", stream_key(handle, ":meta"), "closed_at", 1, "closed_reason", "attempt_interrupted"
    )
    for mode in ("durable", "best_effort", "summary"):
        error = await unchanged(engine, lambda m=mode: append(engine, handle, b"{}", mode=m))
        assert error.code == "stream_closed"
    page = await engine.backend.streams.read_stream(handle.execution_id, 0)
    assert (page.closed_at, page.closed_reason) == (1, "attempt_interrupted")


# --- retention ----------------------------------------------------------------------------------


async def test_exact_retention(engine: Engine) -> None:
    handle = await engine.running()
    counts = [
        (await append(engine, handle, str(number), retention_maxlen=50)).frame_count
        for number in range(60)
    ]
    assert counts[-1] == 60
    assert await payloads(engine, handle) == [b"%d" % n for n in range(10, 60)]
    assert await length(engine, handle) == 50
    assert (await meta(engine, handle))["retention_maxlen"] == "50"


async def test_default_retention_is_about_ten_thousand(engine: Engine) -> None:
    handle, batch = await engine.running(), frames(*(b"x",) * 250)
    for _ in range(44):
        await engine.backend.streams.append_frames(handle, batch)
    assert 10_000 <= await length(engine, handle) <= 10_100


@pytest.mark.parametrize(("given", "kept"), [(None, 5), (7, 7), (0, 20)])
async def test_the_policy_sets_the_default(engine: Engine, given: int | None, kept: int) -> None:
    handle = await engine.running(policy={"stream_policy": {"retention_maxlen": 5}})
    for number in range(20):
        await append(engine, handle, str(number), retention_maxlen=given)
    assert await length(engine, handle) == kept
