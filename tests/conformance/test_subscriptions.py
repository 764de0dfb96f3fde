"""The typed subscriptions: each returns its own family, every event once, in order (12 §11)."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.errors import CorruptionError
from flowfabric.engine.api.events import CompletionEvent, Event, EventFilter, Subscription
from flowfabric.engine.events.cursor import cursor_text
from tests.support.engine import Engine, refused
from tests.support.lease_history import lived
from tests.support.leases import mark, reclaim
from tests.support.sdk import until
from tests.support.suspension import GO, Waits

T = TypeVar("T")


async def take(subscription: Subscription[T], count: int) -> list[T]:
    found: list[T] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            event = await anext(subscription)
            assert not isinstance(event, CorruptionError), event
            found.append(event)
    return found


async def test_completions_tell_how_each_execution_ended(engine: Engine) -> None:
    backend = engine.backend
    async with await backend.events.subscribe_completion() as feed:
        done = await engine.running(lane="alpha", tags={"app.a": "1"})
        await backend.executions.complete(done, b"result")
        failed = await engine.running()
        await backend.executions.fail(failed, "boom", "permanent")
        never_ran = await engine.create(namespace="mine")
        await backend.executions.cancel_execution(never_ran, "too late")
        events = {event.execution_id: event for event in await take(feed, 3)}
    success, failure = events[done.execution_id], events[failed.execution_id]
    assert (success.outcome, success.reason, success.result_ref) == ("success", "completed", True)
    assert (success.lane_id, success.tags) == ("alpha", {"app.a": "1"})
    assert (success.lease_id, success.attempt_index) == (done.lease_id, 0)
    assert success.worker_instance_id == "w-1"
    assert (failure.outcome, failure.failure_category) == ("failed", "permanent")
    assert (failure.result_ref, failure.tags) == (False, None)
    cancelled = events[never_ran]
    assert (cancelled.outcome, cancelled.source) == ("cancelled", "operator_override")
    assert (cancelled.namespace, cancelled.lease_id) == ("mine", None)


async def test_signals_tell_what_they_did(engine: Engine) -> None:
    waits = await Waits.open(engine)
    async with await engine.backend.events.subscribe_signal_delivery() as feed:
        parked = await waits.park(GO)
        await waits.send(parked, "other", source_type="person", source_identity="ada")
        await waits.send(parked, "go")
        ignored, accepted = await take(feed, 2)
    waitpoint = parked.details.waitpoints[0].waitpoint_id
    assert (ignored.signal_name, ignored.source_identity) == ("other", "ada")
    assert (ignored.waitpoint_id, ignored.source_type) == (waitpoint, "person")
    assert (accepted.signal_name, accepted.effect) == ("go", "resume_condition_satisfied")
    assert accepted.execution_id == ignored.execution_id == parked.handle.execution_id
    assert accepted.signal_id != ignored.signal_id


async def test_operator_events_are_what_operators_did(engine: Engine) -> None:
    backend, waits = engine.backend, await Waits.open(engine)
    async with await backend.events.subscribe_operator_events() as feed:
        parked = await waits.park(Single("k", "go"))
        execution_id = parked.handle.execution_id
        await backend.suspensions.resume_execution(execution_id)
        other = await engine.create(priority=1)
        await backend.executions.change_priority(other, 7)
        held = (await engine.claim()).handle
        await backend.leases.revoke_lease(held.execution_id, reason="ops")
        await backend.executions.cancel_execution(held.execution_id, "enough")
        await backend.executions.replay_execution(
            held.execution_id, reason="again", requested_by="ada"
        )
        # The work of workers is not the operator's.
        await lived(engine, "beta")
        events = await take(feed, 5)
        marker = await engine.create(lane="beta")
        await backend.executions.cancel_execution(marker, "last")
        (last,) = await take(feed, 1)
    assert [event.type for event in events] == [
        *("resumed", "priority_changed", "revoked", "completion", "replayed"),
    ]
    resumed, changed, revoked, cancelled, replayed = events
    assert resumed.get("suspension_id") == parked.details.suspension_id
    assert (resumed.execution_id, resumed.get("close_reason")) == (execution_id, "resumed")
    assert (changed.get("old_priority"), changed.get("new_priority")) == (1, 7)
    assert (revoked.get("reason"), revoked.get("revoked_by")) == ("ops", "operator")
    assert (cancelled.get("source"), cancelled.get("outcome")) == ("operator_override", "cancelled")
    assert (replayed.get("requested_by"), replayed.get("replay_count")) == ("ada", 1)
    assert last.execution_id == marker


async def test_a_suspension_that_times_out_is_an_operator_event(engine: Engine) -> None:
    waits = await Waits.open(engine)
    async with await engine.backend.events.subscribe_operator_events() as feed:
        for behaviour in ("auto_resume_with_timeout_signal", "escalate"):
            parked = await waits.park(
                GO, timeout_at=await engine.now() + 5, timeout_behavior=behaviour
            )
            await engine.advance(6)
            await waits.expire(parked.handle.execution_id)
        events = await take(feed, 2)
    assert [(event.type, event.get("trigger")) for event in events] == [
        ("resumed", "timeout"),
        ("escalated", "timeout"),
    ]


async def test_worker_events_of_one_namespace(engine: Engine) -> None:
    workers = engine.backend.workers
    await workers.register_worker(worker_id="w", worker_instance_id="w-0", lanes=["l"])
    async with await engine.backend.events.subscribe_worker_events() as feed:
        for instance, namespace in (("w-1", "default"), ("w-2", "other")):
            await workers.register_worker(
                worker_id="w", worker_instance_id=instance, lanes=["l"], namespace=namespace
            )
        await workers.register_worker(worker_id="w", worker_instance_id="w-1", lanes=["l"])
        await workers.mark_worker_dead("w-1", reason="deploy")
        born, dead = await take(feed, 2)
    assert (born.type, born.worker_id, born.worker_instance_id) == ("worker_registered", "w", "w-1")
    assert (dead.type, dead.worker_instance_id, dead.reason) == ("worker_dead", "w-1", "deploy")
    assert (born.namespace, born.reason) == ("default", None)
    assert born.event_id.startswith("worker:default/")
    async with await engine.backend.events.subscribe_worker_events(cursor=born.cursor) as feed:
        assert [event.event_id for event in await take(feed, 1)] == [dead.event_id]
    async with await engine.backend.events.subscribe_worker_events("other", "start") as feed:
        assert [event.worker_instance_id for event in await take(feed, 1)] == ["w-2"]


async def test_worker_events_among_others_resume_strictly_after_their_cursor(
    engine: Engine,
) -> None:
    backend = engine.backend
    for namespace in ("default", "other"):
        await backend.workers.register_worker(
            worker_id="w", worker_instance_id=f"{namespace}-0", lanes=["l"], namespace=namespace
        )
    async with await backend.events.subscribe(["worker", "completion"]) as feed:
        await backend.workers.mark_worker_dead("default-0")
        await backend.workers.mark_worker_dead("other-0", "other")
        cancelled = await engine.create()
        await backend.executions.cancel_execution(cancelled)
        first, *rest = await take(feed, 3)
    assert {(e.type, e.namespace, e.execution_id) for e in (first, *rest)} == {
        ("worker_dead", "default", None),
        ("worker_dead", "other", None),
        ("completion", "default", cancelled),
    }
    async with await backend.events.subscribe(["worker", "completion"], first.cursor) as feed:
        again = await take(feed, 2)
    assert {event.event_id for event in again} == {event.event_id for event in rest}
    # Without worker events, the cursor of a subscription with them fits nothing.
    last = max(event.cursor for event in rest)
    await refused(backend.events.subscribe(["completion"], last), "invalid_cursor")
    await refused(backend.events.subscribe(["worker"], group="g"), "invalid_input")


async def test_an_event_of_two_families_is_delivered_once(engine: Engine) -> None:
    backend = engine.backend
    async with await backend.events.subscribe(["completion", "lease", "operator"]) as feed:
        handle = await engine.running()
        await backend.executions.cancel_execution(handle.execution_id, "stop")
        after = await engine.running(lane="beta")
        events = await take(feed, 3)
    assert all(isinstance(event, Event) for event in events)
    mine = [event.type for event in events if event.execution_id == handle.execution_id]
    assert mine == ["acquired", "completion"]
    assert [e.type for e in events if e.execution_id == after.execution_id] == ["acquired"]
    async with await backend.events.subscribe(["operator"], events[0].cursor) as feed:
        (only,) = await take(feed, 1)
    assert (only.type, only.get("source")) == ("completion", "operator_override")


async def test_every_type_is_in_its_families(engine: Engine) -> None:
    """Reading all families in one subscription passes over nothing that they return alone."""
    waits = await Waits.open(engine)
    policy: dict[str, Any] = {"max_reclaim_count": 9}
    handle = await engine.running(policy=policy)
    await engine.advance(30_001)
    await mark(engine, [handle.execution_id])
    again = (await reclaim(engine, handle.execution_id)).handle
    await waits.send(await waits.park(GO, handle=again))
    await engine.backend.executions.cancel_execution(handle.execution_id, "stop")
    types = [event.type for event in await engine.events(handle.execution_id)]
    families: list[Any] = ["completion", "lease", "signal", "flow", "operator"]
    async with await engine.backend.events.subscribe(families, "start") as feed:
        assert [event.type for event in await take(feed, len(types))] == types


@pytest.mark.parametrize("families", ["completion", ["nothing"], [5], None])
async def test_families_that_there_are_not(engine: Engine, families: Any) -> None:
    await refused(engine.backend.events.subscribe(families), "invalid_input")


async def test_an_unknown_option_is_a_mistake(engine: Engine) -> None:
    wrong: Any = {"groups": "billing"}
    with pytest.raises(TypeError, match="groups"):
        await engine.backend.events.subscribe_completion(**wrong)


async def test_a_filter_fits_every_family(engine: Engine) -> None:
    await lived(engine, namespace="theirs")
    mine = await lived(engine, namespace="mine", tags={"app.a": "1"})
    for where in (EventFilter(namespace="mine"), EventFilter(tags={"app.a": "1"})):
        async with await engine.backend.events.subscribe_completion("start", where=where) as feed:
            assert [event.execution_id for event in await take(feed, 1)] == [mine]


# --- groups -----------------------------------------------------------------------------------

LANES = [f"lane-{n}" for n in range(24)]


async def collect(subscription: Subscription[CompletionEvent], into: list[str]) -> None:
    """Process every event until the subscription is closed."""
    async for event in subscription:
        assert isinstance(event, CompletionEvent)
        into.append(str(event.execution_id))
        await subscription.ack(event.event_id)


async def test_members_of_a_group_share_the_events(engine: Engine) -> None:
    events = engine.backend.events
    seen: dict[str, list[str]] = {"a": [], "b": []}
    feeds = [await events.subscribe_completion(group="billing", member=name) for name in seen]
    reading = [
        asyncio.create_task(collect(feed, into))
        for feed, into in zip(feeds, seen.values(), strict=True)
    ]
    # The first member had taken everything; it returns what belongs to the second.
    await until(
        lambda: feeds[1].cursor != feeds[0].cursor and len(feeds[1].cursor) > 500, timeout=20
    )
    ids = {str(await lived(engine, lane)) for lane in LANES}
    await until(lambda: len(seen["a"]) + len(seen["b"]) >= len(ids), timeout=20)
    for feed in feeds:
        await feed.aclose()
    await asyncio.wait(reading)
    assert set(seen["a"]) | set(seen["b"]) == ids
    assert len(seen["a"]) + len(seen["b"]) == len(ids)
    assert seen["a"]
    assert seen["b"]


async def test_a_group_continues_after_what_it_acknowledged(engine: Engine) -> None:
    events = engine.backend.events
    async with await events.subscribe_completion(group="g") as feed:
        ids = [await lived(engine) for _ in range(3)]
        first, second = await take(feed, 2)
        await feed.ack(first.event_id)
    assert [first.execution_id, second.execution_id] == ids[:2]
    # Whatever the start of a later member: the group has its position.
    async with await events.subscribe_completion("now", group="g") as feed:
        repeated = await take(feed, 2)
        await feed.ack(repeated[-1].event_id)
    assert [event.execution_id for event in repeated] == ids[1:]
    async with await events.subscribe_completion("start", group="g") as feed:
        after = await lived(engine)
        assert [event.execution_id for event in await take(feed, 1)] == [after]
    async with await events.subscribe_completion("start", group="other") as feed:
        assert [event.execution_id for event in await take(feed, 4)] == [*ids, after]


async def test_another_member_gets_what_a_crashed_one_did_not_acknowledge(engine: Engine) -> None:
    events = engine.backend.events
    lost = await events.subscribe_completion(group="g", member="crashed")
    execution_id = await lived(engine)
    await take(lost, 1)
    stop_without_leaving(lost)
    feed = await events.subscribe_completion(group="g", member="other")
    waiting = asyncio.create_task(take(feed, 1))
    await engine.advance(30_001)
    assert [event.execution_id for event in await waiting] == [execution_id]
    await feed.aclose()
    await lost.aclose()


def stop_without_leaving(subscription: Any) -> None:
    """As a process that was killed: nothing renews its leases, nothing returns them."""
    subscription._member._keeping.cancel()


async def test_a_member_that_restarts_under_its_name_keeps_its_feeds(engine: Engine) -> None:
    events = engine.backend.events
    lost = await events.subscribe_completion(group="g", member="m")
    execution_id = await lived(engine)
    await take(lost, 1)
    stop_without_leaving(lost)
    async with await events.subscribe_completion(group="g", member="m") as feed:
        assert [event.execution_id for event in await take(feed, 1)] == [execution_id]
    await lost.aclose()


async def test_what_a_filter_drops_is_processed(engine: Engine) -> None:
    events, where = engine.backend.events, EventFilter(namespace="mine")
    async with await events.subscribe_completion(group="g", where=where) as feed:
        await lived(engine)
        mine = await lived(engine, namespace="mine")
        (event,) = await take(feed, 1)
        await feed.ack(event.event_id)
        await lived(engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(feed)
    assert event.execution_id == mine
    async with await events.subscribe_completion(group="g") as feed:
        later = await lived(engine)
        assert [event.execution_id for event in await take(feed, 1)] == [later]


async def test_a_group_is_told_of_a_gap_once(engine: Engine) -> None:
    backend = engine.backend
    async with await backend.events.subscribe_completion(group="g") as feed:
        await lived(engine)
        (first,) = await take(feed, 1)
        await feed.ack(first.event_id)
    await lived(engine)
    await engine.trim_feed(first.execution_id)
    left = await lived(engine)
    async with await backend.events.subscribe_completion(group="g") as feed:
        await refused(anext(feed), "cursor_expired")
        assert [event.execution_id for event in await take(feed, 1)] == [left]


async def test_only_members_of_a_group_acknowledge(engine: Engine) -> None:
    async with await engine.backend.events.subscribe_completion() as feed:
        await lived(engine)
        (event,) = await take(feed, 1)
        await refused(feed.ack(event.event_id), "invalid_input")
        kept = cursor_text(event.cursor)
    async with await engine.backend.events.subscribe_completion(kept) as feed:
        after = await lived(engine)
        assert [event.execution_id for event in await take(feed, 1)] == [after]
