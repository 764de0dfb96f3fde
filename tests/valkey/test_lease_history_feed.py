"""Following lease history over all partitions, with a cursor that outlives the process (12 §11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.engine.api.events import Event, EventFilter, LeaseEvent, Subscription
from flowfabric.engine.events import subscription
from flowfabric.engine.events.cursor import FeedCursor, cursor_text
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import decode_entry
from flowfabric.valkey.address import parse_url
from tests.support.engine import LANE, Engine
from tests.support.lease_history import LANES, following, lived, nothing_more, take
from tests.support.server import TestServer
from tests.support.storage import until_blocked


async def test_a_live_event_arrives_while_the_subscriber_waits(engine: Engine) -> None:
    async with following(engine.backend) as history:
        waiting = asyncio.create_task(take(history, 1))
        # It has read once and waits at the server now.
        await until_blocked(engine.backend)
        began = asyncio.get_running_loop().time()
        handle = await engine.running(lane="beta")
        (event,) = await waiting
        assert asyncio.get_running_loop().time() - began < 0.5
        assert (event.execution_id, event.type) == (handle.execution_id, "acquired")


async def test_a_cursor_survives_the_process_as_text_too(
    engine: Engine, valkey: TestServer
) -> None:
    await lived(engine, "alpha")
    async with following(engine.backend, "start") as history:
        await take(history, 1)
        kept = cursor_text(history.cursor)
    later = await lived(engine, "beta")
    other = await ValkeyBackend.connect(parse_url(valkey.url))
    async with other, following(other, kept) as history:
        events = await take(history, 3)
    assert [event.type for event in events if event.lane_id == "alpha"] == ["released"]
    assert {event.execution_id for event in events if event.lane_id == "beta"} == {later}


async def test_idle_feeds_take_no_room_in_a_cursor(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "CLOCK_SLACK_MS", 0)
    monkeypatch.setattr(subscription, "_BASE_EVERY_S", 0.0)
    monkeypatch.setattr(subscription, "_WAIT_S", 0.01)
    for lane in LANES:
        await lived(engine, lane)
    async with following(engine.backend, "start") as history:
        await take(history, 6)
        assert len(FeedCursor.decode(history.cursor).positions) == 3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(history)
        kept = history.cursor
    assert FeedCursor.decode(kept).positions == {}
    async with following(engine.backend, kept) as history:
        await nothing_more(history, engine)


async def test_a_completion_matches_by_the_tags_it_carries(engine: Engine) -> None:
    """Also when the execution is gone; other events of it match nothing any longer."""
    execution_id = await lived(engine, tags={"app.a": "1", "app.b": "2"})
    await engine.backend.transport.call("DEL", keys.tags(execution_id.tag, execution_id))
    async with following(engine.backend, "start", EventFilter(tags={"app.a": "1"})) as history:
        (event,) = await take(history, 1)
        assert (event.type, event.outcome) == ("released", "success")
    async with following(engine.backend, "start", EventFilter(tags={"app.a": "2"})) as history:
        await nothing(history)


async def nothing(history: Subscription[LeaseEvent]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await anext(history)


async def test_a_filter_on_a_flow(engine: Engine) -> None:
    flow_id = "11111111-2222-4333-8444-555555555555"
    await lived(engine)
    execution_id = await engine.create()
    core = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HSET", core, "flow_id", flow_id)
    await engine.backend.executions.complete((await engine.claim()).handle)
    assert {event.get("flow_id") for event in await engine.events(execution_id)} == {flow_id}
    async with following(engine.backend, "start", EventFilter(flow_id=flow_id)) as history:
        assert {event.execution_id for event in await take(history, 2)} == {execution_id}


@pytest.mark.parametrize("where", [None, EventFilter(tags={"app.a": "1"}), EventFilter(lane=LANE)])
async def test_entries_that_name_no_execution_are_passed_over(
    engine: Engine, where: EventFilter | None
) -> None:
    """As flows, workers and budgets will write them: they are not unreadable."""
    feed = keys.events(engine.new_id().tag)
    entry = ("t", "flow_finished", "f", "11111111-2222-4333-8444-555555555555", "state", "failed")
    await engine.backend.transport.call("XADD", feed, "*", *entry, key=feed)
    execution_id = await engine.create(tags={"app.a": "1"})
    ended = asyncio.create_task(engine.backend.events.wait_ended(execution_id))
    await until_blocked(engine.backend)
    async with following(engine.backend, "start", where) as history:
        handle = (await engine.claim()).handle
        await engine.backend.transport.call("XADD", feed, "*", *entry, key=feed)
        await engine.backend.executions.complete(handle)
        assert [event.type for event in await take(history, 2)] == ["acquired", "released"]
    async with asyncio.timeout(5):
        await ended


def test_an_entry_that_names_no_execution() -> None:
    flat = [b"t", b"budget_breached", b"budget_id", b"b-1", b"at", b"7"]
    event = decode_entry("fp:3", b"5-0", flat)
    assert event == Event("fp:3/5-0", "budget_breached", 7, None, None, None, None, event.fields)
    assert event.fields == {"budget_id": "b-1"}


async def test_a_waiter_notes_the_end_of_the_feed_before_it_reads_the_state(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other order a completion between the two would be missed."""
    transport, sent = engine.backend.transport, list[str]()
    call = transport.call

    def spied(*args: Any, **options: Any) -> Any:
        sent.append(args[0])
        return call(*args, **options)

    execution_id = await lived(engine)
    monkeypatch.setattr(transport, "call", spied)
    await engine.backend.events.wait_ended(execution_id)
    assert sent[:2] == ["XREVRANGE", "HGETALL"]
