"""Damage everywhere: each stored field in turn, each read over it (02 §16).

A read answers, or raises `corruption` with `<context>: <field>: <why>`. A listing leaves out the
damaged record and keeps the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import CorruptionError, KeyStoreError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, TTL, Engine
from tests.support.leases import paused, running
from tests.support.suspension import Waits

pytestmark = pytest.mark.corrupts

WORKER: Any = {"worker_id": "w", "lanes": [LANE], "capabilities": ["gpu"]}
TAGS = {"app.team": "blue"}
HEALTHY_WORKER = "w-2"
BAD_VALUES = (b"soon", b"\xff\xfe", b"")


class World(msgspec.Struct, frozen=True):
    """One of everything that is stored, and who to ask about it."""

    engine: Engine
    waiting: ExecutionId
    healthy: ExecutionId
    retried: ExecutionId
    ended: ExecutionId
    parked: Handle
    healthy_parked: ExecutionId
    resumed: Handle
    lapsed: ExecutionId
    healthy_lapsed: ExecutionId
    waitpoint_id: str
    healthy_waitpoint: str
    signal_id: str
    sentinel: ExecutionId

    @property
    def ids(self) -> tuple[ExecutionId, ...]:
        ids = (self.waiting, self.retried, self.ended, self.parked.execution_id)
        return (*ids, self.resumed.execution_id, self.lapsed)


async def lapsed(engine: Engine) -> ExecutionId:
    return (await running(engine)).execution_id


@pytest.fixture
async def world(engine: Engine, caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.ERROR, "flowfabric")
    waits, backend = await Waits.open(engine), engine.backend
    await backend.lanes.set_lane_config(LANE, reclaim_grace_ms=1)
    policy = {"retry_policy": {"max_retries": 3}, "timeout_policy": {"attempt_timeout_ms": 10**9}}
    retried = await running(engine, policy=policy, tags=TAGS)
    await backend.streams.append_frame(retried, Frame(payload=b"x", correlation_id="c"))
    await backend.streams.append_frame(retried, Frame(payload=b"{}"), mode="summary")
    await backend.executions.progress(retried, 5, "half")
    await backend.executions.fail(retried, "boom", "transient")
    ended = await running(engine, tags=TAGS, payload_encoding="json", input_payload=b"1")
    await backend.executions.complete(ended, b"2", "json")
    asked: dict[str, Any] = {"timeout_at": await engine.now() + 10**9, "prompt": "Go?"}
    parked = await waits.park(handle=await running(engine), details={"a": 1}, **asked)
    outcome = await waits.send(parked, "other", payload=b"1", source_identity="ada")
    assert isinstance(outcome, Accepted)
    other = await waits.park(handle=await running(engine))
    await waits.send(await waits.park(handle=await running(engine)), payload=b'"yes"')
    resumed = (await engine.claim()).handle
    await paused(engine)
    gone = [await lapsed(engine) for _ in range(2)]
    await engine.advance(TTL + 1)
    await backend.upkeep.mark_lease_expired_if_due(gone[0].tag, gone)
    routed = policy | {"routing_requirements": {"required_capabilities": ["gpu"]}}
    waiting = await engine.create(tags=TAGS, policy=routed, priority=3)
    healthy = await engine.create(tags=TAGS)
    for instance in ("w-1", HEALTHY_WORKER):
        await backend.workers.register_worker(worker_instance_id=instance, **WORKER)
    sentinel = (await running(engine)).execution_id
    return World(
        engine=engine,
        waiting=waiting,
        healthy=healthy,
        retried=retried.execution_id,
        ended=ended.execution_id,
        parked=parked.handle,
        healthy_parked=other.handle.execution_id,
        resumed=resumed,
        lapsed=gone[0],
        healthy_lapsed=gone[1],
        waitpoint_id=parked.details.waitpoint_id,
        healthy_waitpoint=other.details.waitpoint_id,
        signal_id=outcome.signal_id,
        sentinel=sentinel,
    )


def reads(world: World) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every read of the engine, about everything in the world."""
    b = world.engine.backend
    parked = world.parked.execution_id
    found: dict[str, Callable[[], Awaitable[Any]]] = {
        "context": lambda: b.reads.read_execution_context(world.ended),
        "policy": lambda: b.reads.read_execution_policy(world.waiting),
        "result": lambda: b.reads.get_execution_result(world.ended),
        "outcome": lambda: b.reads.read_outcome(world.ended),
        "tag": lambda: b.reads.get_execution_tag(world.waiting, "app.team"),
        "find": lambda: b.listings.find_executions(world.waiting.uuid[:8]),
        "lanes": b.lanes.list_lanes,
        "lane": lambda: b.lanes.get_lane(LANE),
        "partitions": b.lanes.busiest_partitions,
        "eligible": lambda: b.claims.scan_eligible_executions(LANE, world.waiting.tag, 100),
        "observe": lambda: b.waitpoints.observe_signals(world.resumed),
        "signal": lambda: b.waitpoints.read_signal(parked, world.signal_id),
        "token": lambda: b.signals.read_waitpoint_token(parked, world.waitpoint_id),
        "kids": lambda: b.secrets.list_waitpoint_hmac_kids(parked.partition),
        "stream": lambda: b.streams.read_stream(world.retried, 0),
        "tail": lambda: b.streams.tail_stream(world.retried, 0, block_ms=1),
        "quiet stream": lambda: b.streams.read_stream(world.lapsed, 0),
        "summary": lambda: b.streams.read_summary(world.retried, 0),
    }
    for eid in world.ids:
        found |= {
            f"info {eid}": lambda eid=eid: b.reads.read_execution_info(eid),
            f"state {eid}": lambda eid=eid: b.reads.read_execution_state(eid),
            f"describe {eid}": lambda eid=eid: b.reads.describe_execution(eid),
            f"namespace {eid}": lambda eid=eid: b.reads.get_execution_namespace(eid),
            f"fields {eid}": lambda eid=eid: b.reads.read_exec_core_fields(eid, ["state"]),
            f"attempts {eid}": lambda eid=eid: b.reads.read_attempts(eid),
            f"history {eid}": lambda eid=eid: b.reads.read_execution_history(eid),
            f"explain {eid}": lambda eid=eid: b.reads.explain_execution(eid),
            f"steps {eid}": lambda eid=eid: b.steps.read_steps(eid),
            f"waits {eid}": lambda eid=eid: b.waitpoints.read_waits(eid, "k"),
        }
    return found


async def executions(world: World) -> None:
    page = await world.engine.backend.listings.list_executions(limit=100)
    listed = {row.execution_id for row in page.executions}
    assert {world.healthy, world.healthy_parked} <= listed


async def by_tag(world: World) -> None:
    where = Filter(tags=TAGS)
    page = await world.engine.backend.listings.list_executions(limit=100, where=where)
    assert world.healthy in {row.execution_id for row in page.executions}


async def eligible(world: World) -> None:
    partition = world.healthy.partition
    page = await world.engine.backend.listings.list_lane(
        LANE, "eligible", partition=partition, limit=100
    )
    assert world.healthy in {row.execution_id for row in page.executions}


async def suspended(world: World) -> None:
    page = await world.engine.backend.suspensions.list_suspended()
    lane_lost = any(f"lane {LANE}: has a key" in each for each in page.damaged)
    assert lane_lost or world.healthy_parked in {row.execution_id for row in page.entries}


async def leases(world: World) -> None:
    page = await world.engine.backend.leases.list_expired_leases()
    assert world.healthy_lapsed in {row.execution_id for row in page.entries}


async def workers(world: World) -> None:
    listed = {row.worker_instance_id for row in await world.engine.backend.workers.list_workers()}
    assert HEALTHY_WORKER in listed


async def waitpoints(world: World) -> None:
    page = await world.engine.backend.waitpoints.list_pending_waitpoints(world.healthy_parked)
    assert len(page.entries) == 1
    await world.engine.backend.waitpoints.list_pending_waitpoints(world.parked.execution_id)


async def events(world: World) -> None:
    """Damaged entries are items of their own; the last event still comes."""
    partition = world.sentinel.partition
    async with (
        asyncio.timeout(5),
        await world.engine.backend.events.subscribe_lease_history(
            "start", partitions=[partition]
        ) as history,
    ):
        async for event in history:
            if isinstance(event, CorruptionError):
                assert_named(event)
            elif event.execution_id == world.sentinel:
                return


LISTINGS = (executions, by_tag, eligible, suspended, leases, workers, waitpoints)


def assert_named(error: CorruptionError) -> None:
    context, _, rest = error.detail.partition(": ")
    field, _, why = rest.partition(": ")
    assert context, error
    assert field, error
    assert why, error


Restore = Callable[[], Awaitable[None]]


async def damages(world: World, name: bytes, kind: str) -> AsyncIterator[tuple[str, bool]]:
    """Each way to damage one key, undone afterwards; whether the key as a whole is unreadable."""
    call = world.engine.backend.transport.call
    kept: Any = await call("DUMP", name)

    async def undo() -> None:
        await call("RESTORE", name, 0, kept, "REPLACE")

    if kind == "hash":
        fields: Any = await call("HKEYS", name)
        for field in fields:
            # Without their entries, neither the worker nor the lane is registered.
            if field not in (HEALTHY_WORKER.encode(), f"{world.healthy.partition} {LANE}".encode()):
                await call("HDEL", name, field)
                yield f"{field!r} missing", False
            for bad in BAD_VALUES:
                await call("HSET", name, field, bad)
                yield f"{field!r} = {bad!r}", False
            await undo()
    for junk in (b"junk", b"\xff", b"\x93\xa1\xff", b"\x92\x01"):
        if kind == "list":
            await call("LSET", name, 0, junk)
        elif kind == "set":
            await call("SADD", name, junk)
        elif kind == "zset":
            await call("ZADD", name, 0, junk)
        elif kind == "string":
            await call("SET", name, junk)
        else:
            break
        yield f"{junk!r} in it", False
        await undo()
    other: tuple[Any, ...] = ("SET", name, "text")
    if kind == "string":
        other = ("LPUSH", name, "text")
    await call("DEL", name)
    await call(*other)
    yield "wrong type", True
    await call("DEL", name)
    await undo()


async def stored_keys(world: World) -> list[tuple[bytes, str]]:
    call = world.engine.backend.transport.call
    names: Any = [each for each in await call("KEYS", "ff:*") if await call("PTTL", each) < 0]
    kinds: Any = await asyncio.gather(*(call("TYPE", name) for name in names))
    return sorted((name, kind.decode()) for name, kind in zip(names, kinds, strict=True))


def family(name: bytes) -> str:
    return name.split(b":")[1].decode()


async def check(world: World, story: str, *, whole: bool, found: list[str]) -> None:
    async def one(name: str, work: Callable[[], Awaitable[Any]], *, listing: bool) -> None:
        try:
            await work()
        except CorruptionError as error:
            if listing and not whole:
                found.append(f"{name}, {story}: hidden by {error}")
            try:
                assert_named(error)
            except AssertionError:
                found.append(f"{name}, {story}: {error}")
        except KeyStoreError:
            assert name == "token"
        except Exception as error:  # noqa: BLE001 - this is what the test looks for
            found.append(f"{name}, {story}: {error!r}")

    await asyncio.gather(
        *(one(name, work, listing=False) for name, work in reads(world).items()),
        *(one(each.__name__, lambda each=each: each(world), listing=True) for each in LISTINGS),
    )


async def test_a_damaged_past_wait_hides_no_other(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await Waits.open(engine)
    handle, backend = await running(engine), engine.backend
    made = {
        key: await backend.waitpoints.create_waitpoint(handle, key, 10**6) for key in ("bad", "k")
    }
    name = keys.waitpoint(handle.execution_id.tag, made["bad"].waitpoint_id)
    await backend.transport.call("HSET", name, "closed_at", "soon")
    for wanted in ((), ("k",)):
        found = await backend.waitpoints.read_waits(handle.execution_id, *wanted)
        assert [wait.waitpoint_key for wait in found] == ["k"]
    assert "read_waits left out a damaged record" in caplog.text
    assert "closed_at" in caplog.text
    with pytest.raises(CorruptionError, match="closed_at"):
        await backend.waitpoints.read_waits(handle.execution_id, "k", "bad")


UNREAD = ("config", "wake", "leader", "leaders")
"""Families that no read of data looks at."""


@pytest.mark.parametrize("part", ["exec", "idx", "wp", "signal", "stream", "worker", "other"])
async def test_every_read_over_every_damage(world: World, part: str) -> None:
    known = {"exec", "idx", "wp", "signal", "stream", "worker"}
    found: list[str] = []
    damaged = 0
    healthy = (world.healthy, world.healthy_parked, world.healthy_lapsed, HEALTHY_WORKER)
    healthy = (*healthy, world.healthy_waitpoint)
    for name, kind in await stored_keys(world):
        own = family(name)
        if own in UNREAD or (own != part and (part != "other" or own in known)):
            continue
        if any(str(each).encode() in name for each in healthy):
            continue
        if b"{fp:" in name and world.waiting.tag.encode() not in name:
            continue
        async for story, whole in damages(world, name, kind):
            damaged += 1
            await check(world, f"{name.decode()} {story}", whole=whole, found=found)
    assert damaged
    assert not found, f"{len(found)} of {damaged}\n" + "\n".join(found[:40])


@pytest.mark.parametrize(
    "entry",
    [
        ("t", "acquired"),
        ("t", b"\xff"),
        ("junk", "x"),
        ("t", "acquired", "id", "no-id", "k", "job"),
        ("t", "released", "id", "ID", "k", "job", "L", "no-pair"),
        ("t", "released", "id", "ID", "k", b"\xff"),
        ("t", "released", "id", "ID", "k", "job", "du", "soon"),
        ("t", "reclaimed", "id", "ID", "k", "job"),
        ("t", "released", "id", "ID", "k", "job", "at", "soon"),
    ],
)
async def test_a_damaged_event_is_an_item_of_its_own(world: World, entry: tuple[Any, ...]) -> None:
    call = world.engine.backend.transport.call
    feed = keys.events(world.sentinel.tag)
    flat = [world.waiting if part == "ID" else part for part in entry]
    await call("XADD", feed, "*", *flat)
    last = await running(world.engine)
    await events(msgspec.structs.replace(world, sentinel=last.execution_id))


@pytest.mark.parametrize(
    "entry",
    [
        ("t", "log"),
        ("p", "x"),
        ("t", b"\xff", "p", "x"),
        ("t", "log", "p", "x", "m", "q"),
        ("t", "log", "p", "x", "ts", "soon"),
        ("t", "log", "p", "x", "v", "soon"),
        ("t", "log", "p", "x", "e", b"\xff"),
        ("t", "log", "p", "x", "ttl", ""),
    ],
)
async def test_a_damaged_frame_is_named(world: World, entry: tuple[Any, ...]) -> None:
    call, backend = world.engine.backend.transport.call, world.engine.backend
    await call("XADD", keys.stream(world.retried.tag, world.retried, 0), "*", *entry)
    if entry[-1] == "":
        await backend.streams.read_stream(world.retried, 0)
        return
    with pytest.raises(CorruptionError, match="frame "):
        await backend.streams.read_stream(world.retried, 0)
    with pytest.raises(CorruptionError, match="frame "):
        await backend.streams.tail_stream(world.retried, 0)
