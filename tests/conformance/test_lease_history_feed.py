"""Following lease history over all partitions, with a cursor that outlives the process (12 §11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.engine.api.events import EventFilter, LeaseEvent, Subscription
from flowfabric.engine.events.cursor import FeedCursor
from tests.support.engine import LANE, TTL, Engine, refused
from tests.support.lease_history import LANES, RETRY, following, lived, nothing_more, take
from tests.support.leases import mark, reclaim


async def test_every_kind_of_event_in_the_order_of_commits(engine: Engine) -> None:
    backend = engine.backend
    async with following(backend) as history:
        handle = await engine.running(policy=RETRY)
        execution_id = handle.execution_id
        await backend.executions.fail(handle, "boom", "transient")
        await engine.advance(10)
        await backend.upkeep.promote_delayed(execution_id.tag, LANE, [execution_id])
        retried = (await engine.claim()).handle
        await engine.advance(TTL + 1)
        await mark(engine, [execution_id])
        first = (await reclaim(engine, execution_id)).handle
        await backend.leases.revoke_lease(execution_id, reason="ops")
        again = (await reclaim(engine, execution_id)).handle
        await backend.executions.complete(again, b"r")
        await backend.executions.replay_execution(execution_id)
        events = await take(history, 9)
    assert [(event.type, event.reason) for event in events] == [
        ("acquired", None),
        ("released", "failed_retry_scheduled"),
        ("acquired", None),
        ("expired", None),
        ("reclaimed", None),
        ("revoked", "ops"),
        ("reclaimed", None),
        ("released", "completed"),
        ("replay_initiated", None),
    ]
    assert {event.execution_id for event in events} == {execution_id}
    assert [event.lease_epoch for event in events[:8]] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [event.attempt_index for event in events[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert events[2].lease_id == events[3].lease_id == retried.lease_id
    assert events[4].lease_id == first.lease_id
    assert (events[3].prev_owner, events[3].new_owner) == ("w-1", None)
    assert (events[0].prev_owner, events[0].new_owner) == (None, "w-1")
    assert events[5].revoked_by == "operator"
    assert (events[7].outcome, events[8].branch) == ("success", "normal")
    assert len({event.event_id for event in events}) == len(events)


async def test_one_subscription_covers_all_partitions(engine: Engine) -> None:
    async with following(engine.backend) as history:
        ids = [await lived(engine, lane) for lane in LANES * 3]
        events = await take(history, 18)
    assert len({execution_id.tag for execution_id in ids}) == 3
    for execution_id in ids:
        mine = [event.type for event in events if event.execution_id == execution_id]
        assert mine == ["acquired", "released"]
    for lane in LANES:
        told = [event.execution_id for event in events if event.lane_id == lane]
        assert told[::2] == [each for each in ids if each.tag == told[0].tag]


# --- starting and resuming ------------------------------------------------------------------------


async def test_now_is_the_moment_of_subscribing(engine: Engine) -> None:
    await lived(engine)
    history = await engine.backend.events.subscribe_lease_history()
    after = await lived(engine)
    assert [event.execution_id for event in await take(history, 2)] == [after, after]
    await history.aclose()


async def test_start_is_the_oldest_that_is_kept(engine: Engine) -> None:
    ids = [await lived(engine, lane) for lane in LANES]
    async with following(engine.backend, "start") as history:
        events = await take(history, 6)
        assert {event.execution_id for event in events} == set(ids)
        await nothing_more(history, engine)


async def test_a_time_starts_with_what_happened_then(engine: Engine) -> None:
    before = await lived(engine)
    (last,) = (await engine.events(before))[-1:]
    moment = int(last.event_id.partition("/")[2].partition("-")[0])
    async with following(engine.backend, moment) as history:
        events = await take(history, 1)
    # The release itself, or more when the acquisition fell into the same millisecond.
    assert events[0].execution_id == before
    async with following(engine.backend, moment + 60_000) as history:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(history)


async def test_every_cursor_goes_on_exactly_behind_its_event(engine: Engine) -> None:
    for lane in LANES * 2:
        await lived(engine, lane)
    async with following(engine.backend, "start") as history:
        events = await take(history, 12)
    for count, event in enumerate(events, 1):
        async with following(engine.backend, event.cursor) as history:
            rest = await take(history, 12 - count)
            seen = {each.event_id for each in events[:count]}
            assert {each.event_id for each in rest} == {e.event_id for e in events} - seen
    async with following(engine.backend, events[-1].cursor) as history:
        await nothing_more(history, engine)


async def test_one_partition_alone(engine: Engine) -> None:
    here = engine.new_id("alpha").partition
    mine, _ = await lived(engine, "alpha"), await lived(engine, "beta")
    async with following(engine.backend, "start", partitions=[here]) as history:
        events = await take(history, 1)
        assert events[0].execution_id == mine
        assert len(history.cursor) == 17
        kept = history.cursor
    async with following(engine.backend, kept, partitions=[here]) as history:
        assert [event.type for event in await take(history, 1)] == ["released"]
    await refused(engine.backend.events.subscribe_lease_history(kept), "invalid_cursor")
    async with following(engine.backend, partitions=[here]) as history:
        after = await lived(engine, "alpha")
        assert [event.execution_id for event in await take(history, 2)] == [after, after]


@pytest.mark.parametrize(
    ("cursor", "code"),
    [
        ("!", "invalid_cursor"),
        ("AAAA", "invalid_cursor"),
        (b"\x02" + b"\0" * 8, "invalid_cursor"),
        (b"\x11", "invalid_cursor"),
        (FeedCursor(5).encode() + b"\0", "invalid_cursor"),
        (FeedCursor(5, {"fp:3": (6, 0)}).encode()[:-1], "invalid_cursor"),
        (b"\x11" + b"\0" * 8 + b"\0\1" + b"\7" + b"\0" * 18, "invalid_cursor"),
        (FeedCursor(5, {"fp:300": (6, 0)}).encode(), "invalid_cursor"),
        (0, "invalid_input"),
        (True, "invalid_input"),
        (None, "invalid_input"),
        (1.5, "invalid_input"),
    ],
)
async def test_what_is_no_cursor_is_refused_at_once(engine: Engine, cursor: Any, code: str) -> None:
    await refused(engine.backend.events.subscribe_lease_history(cursor), code)


@pytest.mark.parametrize("partitions", [[], [256], [-1], ["x"], [True]])
async def test_partitions_that_do_not_exist(engine: Engine, partitions: Any) -> None:
    call = engine.backend.events.subscribe_lease_history(partitions=partitions)
    await refused(call, "invalid_input")


# --- filters --------------------------------------------------------------------------------------


async def read_up_to(history: Subscription[LeaseEvent], end: FeedCursor) -> None:
    """Wait until a subscription that returns nothing has read as far as this cursor."""
    async with asyncio.timeout(10):
        while any(  # noqa: ASYNC110
            FeedCursor.decode(history.cursor).position(feed) < at
            for feed, at in end.positions.items()
        ):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (EventFilter(namespace="mine"), ["acquired", "released"]),
        (EventFilter(namespace="nobody"), []),
        (EventFilter(lane="alpha", namespace="mine"), ["acquired", "released"]),
        (EventFilter(lane="beta", namespace="mine"), []),
        (EventFilter(kind="special"), ["acquired", "released"]),
        (EventFilter(types=["acquired"], namespace="mine"), ["acquired"]),
        (EventFilter(types=["released"], namespace="mine"), ["released"]),
        (EventFilter(types=["completion"], namespace="mine"), ["released"]),
        (EventFilter(outcome="success", namespace="mine"), ["released"]),
        (EventFilter(outcome="failed", namespace="mine"), []),
        (EventFilter(flow_id="x"), []),
        (EventFilter(tags={"app.a": "1"}), ["acquired", "released"]),
        (EventFilter(tags={"app.a": "1", "app.b": "2"}), []),
        (EventFilter(tags={"app.a": "2"}), []),
    ],
)
async def test_a_filter_lets_nothing_else_through(
    engine: Engine, where: EventFilter, expected: list[str]
) -> None:
    await lived(engine, "alpha")
    mine = await lived(
        engine, "alpha", namespace="mine", execution_kind="special", tags={"app.a": "1"}
    )
    await lived(engine, "beta", namespace="theirs", tags={"app.b": "2"})
    async with following(engine.backend, "start") as history:
        await take(history, 6)
        end = FeedCursor.decode(history.cursor)
    async with following(engine.backend, "start", where) as history:
        events = await take(history, len(expected))
        assert [event.type for event in events] == expected
        assert {event.execution_id for event in events} <= {mine}
        waiting = asyncio.create_task(take(history, 1))
        await read_up_to(history, end)
        assert not waiting.done()
        waiting.cancel()
        # What was passed over is behind the cursor.
        kept = history.cursor
    async with following(engine.backend, kept) as history:
        await nothing_more(history, engine)


async def test_a_filter_on_one_execution(engine: Engine) -> None:
    ids = [await lived(engine) for _ in range(3)]
    for spelling in (ids[1], ids[1].compact):
        where = EventFilter(execution_id=spelling)
        async with following(engine.backend, "start", where) as history:
            assert {event.execution_id for event in await take(history, 2)} == {ids[1]}


async def test_a_filter_is_a_filter(engine: Engine) -> None:
    wrong: Any = {"lane": "x"}
    await refused(engine.backend.events.subscribe_lease_history(where=wrong), "invalid_input")
