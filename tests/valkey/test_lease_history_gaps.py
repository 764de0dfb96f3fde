"""Lease history over trimmed feeds, damaged entries and lost connections (12 §11.3)."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from flowfabric.core.errors import CorruptionError, EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.events import LeaseEvent, Subscription
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.events import reader
from flowfabric.engine.events.cursor import FeedCursor
from flowfabric.engine.events.subscription import FeedSubscription
from flowfabric.engine.valkey import keys, library
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine, refused
from tests.support.lease_history import following, lived, nothing_more, take
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.storage import until_blocked
from tests.valkey.mutation import private_engine, private_server

__all__ = ["private_engine", "private_server"]

# --- trimmed feeds --------------------------------------------------------------------------------


async def after_two(engine: Engine) -> tuple[bytes, ExecutionId]:
    """A cursor behind the first two events of a feed that has more."""
    execution_id = await lived(engine)
    async with following(engine.backend, "start") as history:
        events = await take(history, 2)
    for _ in range(3):
        await lived(engine)
    return events[-1].cursor, execution_id


async def expired(history: Subscription[LeaseEvent]) -> EngineError:
    async with asyncio.timeout(10):
        return await refused(anext(history), "cursor_expired")


async def test_events_that_were_trimmed_unread_are_never_passed_over_in_silence(
    engine: Engine,
) -> None:
    cursor, execution_id = await after_two(engine)
    feed = keys.events(execution_id.tag)
    await engine.backend.transport.call("XTRIM", feed, "MAXLEN", 3, key=feed)
    async with following(engine.backend, cursor) as history:
        error = await expired(history)
    # The detail is where to go on.
    async with following(engine.backend, error.details[0]) as history:
        assert len(await take(history, 3)) == 3
        await nothing_more(history, engine)


async def test_a_feed_trimmed_to_nothing(engine: Engine) -> None:
    cursor, execution_id = await after_two(engine)
    await engine.backend.upkeep.trim_events(execution_id.tag, 2**45)
    async with following(engine.backend, cursor) as history:
        error = await expired(history)
    async with following(engine.backend, error.details[0]) as history:
        await nothing_more(history, engine)


async def test_trimming_what_was_read_is_no_gap(engine: Engine) -> None:
    await lived(engine)
    async with following(engine.backend, "start") as history:
        kept = (await take(history, 2))[-1].cursor
    await engine.backend.upkeep.trim_events(engine.new_id().tag, 2**45)
    later = await lived(engine)
    async with following(engine.backend, kept) as history:
        assert [event.execution_id for event in await take(history, 2)] == [later, later]


async def server_ms(backend: ValkeyBackend) -> int:
    reply: Any = await backend.transport.call("TIME")
    seconds, micros = map(int, reply)
    return seconds * 1000 + micros // 1000


@pytest.mark.parametrize("missed", [False, True])
async def test_an_old_trim_is_a_gap_only_for_a_cursor_from_before_it(
    engine: Engine, missed: bool
) -> None:
    backend = engine.backend
    (last,) = (await engine.events(await lived(engine)))[-1:]
    newest = int(last.event_id.partition("/")[2].partition("-")[0])
    while await server_ms(backend) <= newest + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await backend.upkeep.trim_events(engine.new_id().tag, newest + 1)
    later = await lived(engine)
    # The feed is not named in the cursor: it stands at the cursor's time.
    cursor = FeedCursor(newest - 1 if missed else newest + 1).encode()
    async with following(backend, cursor) as history:
        if missed:
            await expired(history)
        else:
            assert [event.execution_id for event in await take(history, 2)] == [later, later]


async def test_a_slow_reader_that_was_overtaken_gets_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_QUEUE", 2)
    async with following(engine.backend) as history:
        for _ in range(4):
            await lived(engine)
        await take(history, 1)
        feed = keys.events(engine.new_id().tag)
        await engine.backend.transport.call("XTRIM", feed, "MAXLEN", 2, key=feed)
        await take(history, 1)
        await expired(history)


async def test_a_subscriber_that_reads_too_slowly_is_warned(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader, "_QUEUE", 2)
    await lived(engine)
    await engine.trim_feed(engine.new_id())
    async with following(engine.backend) as history:
        oldest = await engine.now() + 60_000
        feed, call = keys.events(engine.new_id().tag), engine.backend.transport.call
        for after_ms in (0, 1, 2, 3, 100_000):
            entry = ("t", "acquired", "id", engine.new_id(), "k", "job")
            await call("XADD", feed, f"{oldest + after_ms}-1", *entry, key=feed)
        await take(history, 5)
    assert [vars(r)["action"] for r in caplog.records] == ["stream_backpressure"]


async def test_no_more_is_read_than_a_subscriber_may_hold(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_QUEUE", 6)
    async with following(engine.backend) as history:
        ids = [await lived(engine, lane) for lane in ("alpha", "beta", "gamma") for _ in range(8)]
        events: list[LeaseEvent] = []
        while len(events) < 48:
            events += await take(history, 1)
            # One read returns at most the queue, and one entry of each other feed.
            assert len(cast("FeedSubscription[LeaseEvent]", history)._ready) <= 6 + 3
    for execution_id in ids:
        mine = [event.type for event in events if event.execution_id == execution_id]
        assert mine == ["acquired", "released"]


async def test_a_feed_is_as_long_as_the_loaded_library_says(private_engine: Engine) -> None:
    """Whatever this process would have loaded: another one may have set another length."""
    engine = private_engine
    code = library._assemble(cluster=False, events_maxlen=100)
    await engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)
    await lived(engine)
    await engine.backend.upkeep.trim_events(engine.new_id().tag, 2**45)
    await lived(engine)
    async with following(engine.backend, "start") as history:
        kept = (await take(history, 2))[-1].cursor
    for _ in range(200):
        await lived(engine)
    async with following(engine.backend, kept) as history:
        await expired(history)


async def test_batches_keep_a_feed_short(private_engine: Engine) -> None:
    """Only the first entry of a call trims: a feed exceeds its length by what one call appends."""
    engine = private_engine
    code = library._assemble(cluster=False, events_maxlen=100)
    await engine.backend.transport.call("FUNCTION", "LOAD", "REPLACE", code)
    feed = keys.events(engine.new_id().tag)
    for _ in range(6):
        for _ in range(100):
            await engine.create()
        claimed = await engine.backend.claims.claim_many(engine.want(), engine.new_id().tag, 100)
        done = [Completion(claim.handle, None) for claim in claimed.claims]
        assert len(done) == 100
        await engine.backend.executions.complete_many(done)
    length: Any = await engine.backend.transport.call("XLEN", feed, key=feed)
    # The server drops whole nodes of 100 entries.
    assert 100 < length <= 400


async def test_start_skips_trimmed_entries(engine: Engine) -> None:
    _, execution_id = await after_two(engine)
    feed = keys.events(execution_id.tag)
    await engine.backend.transport.call("XTRIM", feed, "MAXLEN", 3, key=feed)
    async with following(engine.backend, "start") as history:
        assert len(await take(history, 3)) == 3


async def test_start_of_a_long_feed_that_was_trimmed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_QUEUE", 2)
    _, execution_id = await after_two(engine)
    feed = keys.events(execution_id.tag)
    await engine.backend.transport.call("XTRIM", feed, "MAXLEN", 5, key=feed)
    async with following(engine.backend, "start") as history:
        assert len(await take(history, 5)) == 5


async def test_a_cursor_ahead_of_its_feed_continues_at_the_end(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await lived(engine)
    async with following(engine.backend, "start") as history:
        kept = FeedCursor.decode((await take(history, 2))[-1].cursor)
    ahead = {partition: (ms + 3_600_000, 0) for partition, (ms, _) in kept.positions.items()}
    async with following(engine.backend, FeedCursor(kept.base, ahead).encode()) as history:
        waiting = asyncio.create_task(take(history, 1))
        await until_blocked(engine.backend)
        later = await lived(engine)
        (event,) = await waiting
    assert event.execution_id == later
    assert [vars(r)["action"] for r in caplog.records] == ["feed_behind_cursor"]


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.corrupts
async def test_a_damaged_entry_is_one_item_and_the_rest_follows(engine: Engine) -> None:
    tag = engine.new_id().tag
    feed = keys.events(tag)
    call = engine.backend.transport.call
    await call("XADD", feed, "*", "t", "acquired", "L", "no-number", key=feed)
    await call("XADD", feed, "*", "t", b"\xff\xfe", key=feed)
    after = await lived(engine)
    async with following(engine.backend, "start") as history, asyncio.timeout(10):
        bad = [await anext(history), await anext(history)]
        assert [type(each) for each in bad] == [CorruptionError, CorruptionError]
        assert f"fp:{after.partition}/" in str(bad[0])
        events = await take(history, 2)
    assert [event.execution_id for event in events] == [after, after]


async def test_a_lost_connection_ends_it_with_the_cursor(
    engine: Engine, valkey: TestServer
) -> None:
    await lived(engine)
    with FaultProxy(valkey.socket_path) as proxy:
        other = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=1.0)
        async with other, following(other, "start") as history:
            await take(history, 1)
            await take(history, 1)
            waiting = asyncio.create_task(take(history, 1))
            await until_blocked(engine.backend)
            proxy.cut()
            with pytest.raises(EngineError) as caught:
                await waiting
            assert caught.value.code == "stream_disconnected"
            assert caught.value.retryable
            with pytest.raises(StopAsyncIteration):
                await anext(history)
    later = await lived(engine)
    async with following(engine.backend, caught.value.details[0]) as history:
        assert [event.execution_id for event in await take(history, 2)] == [later, later]


async def test_giving_up_on_one_event_loses_none(engine: Engine) -> None:
    async with following(engine.backend) as history:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(history)
        execution_id = await lived(engine)
        assert [event.execution_id for event in await take(history, 2)] == [execution_id] * 2


async def test_after_closing_there_is_nothing(engine: Engine) -> None:
    async with following(engine.backend, "start") as history:
        await lived(engine)
        await history.aclose()
        assert [event async for event in history] == []


async def test_reading_writes_nothing(engine: Engine) -> None:
    await lived(engine)
    before = await engine.dump()
    async with following(engine.backend, "start") as history:
        await take(history, 2)
    assert await engine.dump() == before
