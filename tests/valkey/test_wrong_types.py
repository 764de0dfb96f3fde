"""A key of the wrong type, under each name in turn: listings and scanners still see the rest."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import CorruptionError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.upkeep import Index, SurveyRequest
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.suspension import Waits

pytestmark = pytest.mark.corrupts

HOUR, DAY = 3_600_000, 86_400_000
UUID = re.compile(r"[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}")


class Side(msgspec.Struct):
    """One execution in each state that a listing or scanner handles, all on one lane."""

    lane: str
    delayed: ExecutionId
    parked: ExecutionId
    timed_out: ExecutionId
    lapsed: ExecutionId
    finished: ExecutionId
    waitpoint: str
    others: tuple[str, ...]

    @property
    def ids(self) -> tuple[ExecutionId, ...]:
        return (self.delayed, self.parked, self.timed_out, self.lapsed, self.finished)

    def owns(self, key: str) -> bool:
        own = (*self.ids, self.waitpoint, *self.others)
        return any(each in key for each in (*own, f":lane:{self.lane}:", f":{self.lane}:leases"))


async def populated(engine: Engine, lane: str) -> Side:
    """All in one partition, whatever the lane."""
    waits, backend = Waits(engine), engine.backend

    async def running(ttl: int = 3 * DAY, **options: Any) -> Handle:
        eid = await engine.create(lane=lane, execution_id=engine.new_id(), **options)
        want = engine.want(lane=lane, instance=lane, ttl=ttl)
        (claim,) = (await backend.claims.claim_many(want, eid.tag, 1)).claims
        return claim.handle

    timed_out = await running(policy={"timeout_policy": {"attempt_timeout_ms": HOUR}})
    finished = await running(tags={"app.team": "blue"}, input_payload=b"1")
    await backend.streams.append_frame(finished, Frame(payload=b"x"))
    used = await backend.waitpoints.create_waitpoint(finished, "k", HOUR)
    await waits.signal(finished.execution_id, used, payload=b"1")
    await backend.steps.record_step(finished.execution_id, finished, "s", result=b"3")
    await backend.executions.complete(finished, b"2")
    parked = await waits.park(handle=await running(), timeout_at=await engine.now() + HOUR)
    await waits.send(parked, "other", payload=b"1")
    lapsed = await running(ttl=HOUR)
    pending = await backend.waitpoints.create_waitpoint(lapsed, "k", HOUR)
    await waits.signal(lapsed.execution_id, pending, payload=b"1")
    due = await engine.now() + HOUR
    delayed = await engine.create(lane=lane, execution_id=engine.new_id(), delay_until=due)
    return Side(
        lane=lane,
        delayed=delayed,
        parked=parked.handle.execution_id,
        timed_out=timed_out.execution_id,
        lapsed=lapsed.execution_id,
        finished=finished.execution_id,
        waitpoint=pending.waitpoint_id,
        others=(used.waitpoint_id, parked.details.waitpoint_id),
    )


class World(msgspec.Struct):
    engine: Engine
    bad: Side
    good: Side

    @property
    def tag(self) -> str:
        return self.good.parked.tag


TIMERS = {
    "lease_expiry": "lapsed",
    "attempt_timeout": "timed_out",
    "suspension_timeout": "parked",
    "pending_waitpoint_expiry": "waitpoint",
}


async def scan_due(w: World) -> None:
    timers = {Index(w.tag, index): name for index, name in TIMERS.items()}
    lanes = [Index(w.tag, "delayed", side.lane) for side in (w.bad, w.good)]
    found = await w.engine.backend.upkeep.scan_due([*timers, *lanes], 100)
    due = found.due
    for index, name in timers.items():
        assert getattr(w.good, name) in due.get(index, ())
    assert due.get(lanes[1]) == [w.good.delayed]


async def survey(w: World) -> None:
    request = SurveyRequest(w.tag, [w.bad.lane, w.good.lane])
    (found,) = await w.engine.backend.upkeep.survey_indexes([request])
    wanted = {Index(w.tag, "lease_expiry"), Index(w.tag, "delayed", w.good.lane)}
    assert wanted <= set(found.indexes)


async def reconcile(w: World) -> None:
    upkeep, lanes = w.engine.backend.upkeep, [w.bad.lane, w.good.lane]
    audit = await upkeep.audit_indexes(w.tag, (*w.bad.ids, *w.good.ids), lanes, "check")
    assert audit.verdicts[-len(w.good.ids) :] == ["consistent"] * len(w.good.ids)


async def ring(w: World) -> None:
    await w.engine.backend.wakeups.ring_waiting({w.tag: [w.good.lane]})


async def idle(w: World) -> None:
    lanes = ["none", w.bad.lane, w.good.lane]
    reply = await w.engine.backend.calls.fcall("ff_idle_lanes", w.tag, lanes, op="test")
    assert reply[2] == [b"none"]


async def list_suspended(w: World) -> None:
    page = await w.engine.backend.suspensions.list_suspended()
    assert w.good.parked in {row.execution_id for row in page.entries}
    assert len(page.entries) + len(page.damaged) == 2


async def list_executions(w: World) -> None:
    page = await w.engine.backend.listings.list_executions(limit=100)
    assert set(w.good.ids) <= {row.execution_id for row in page.executions}


async def read_waits(w: World) -> None:
    for side in (w.bad, w.good):
        for eid in side.ids:
            await w.engine.backend.waitpoints.read_waits(eid)


OWN = {b":core": read_waits, b":waitpoints": read_waits}
"""What a read of one execution cannot do without."""


async def promote(w: World) -> None:
    for side in (w.bad, w.good):
        ids = [side.delayed]
        verdicts = await w.engine.backend.upkeep.promote_delayed(w.tag, side.lane, ids)
    assert verdicts == ["promoted"]


async def expire_waitpoints(w: World) -> None:
    ids = [w.bad.waitpoint, w.good.waitpoint]
    assert (await w.engine.backend.suspensions.expire_waitpoints(w.tag, ids))[-1] == "closed"


async def expire_suspensions(w: World) -> None:
    ids = [w.bad.parked, w.good.parked]
    assert (await w.engine.backend.suspensions.expire_suspension(w.tag, ids))[-1] == "fail"


async def expire(w: World) -> None:
    ids, reason = [w.bad.timed_out, w.good.timed_out], ExpireReason.ATTEMPT_TIMEOUT
    assert (await w.engine.backend.upkeep.expire_execution(w.tag, reason, ids))[-1] == "expired"


async def mark_expired(w: World) -> None:
    ids = [w.bad.lapsed, w.good.lapsed]
    verdicts = await w.engine.backend.upkeep.mark_lease_expired_if_due(w.tag, ids)
    assert verdicts[-1] == "marked_expired"


async def trim(w: World) -> None:
    for side in (w.bad, w.good):
        ids = [side.finished]
        verdicts = await w.engine.backend.upkeep.trim_retention(w.tag, side.lane, ids)
    assert verdicts == ["purged"]


async def purge(w: World) -> None:
    backlog = keys.index(w.tag, "purge_backlog")
    await w.engine.backend.transport.call("HSET", backlog, w.bad.parked, 1, w.good.parked, 1)
    while await w.engine.backend.upkeep.purge(w.tag):
        pass


READS = (scan_due, survey, reconcile, ring, idle, list_suspended, list_executions, read_waits)
WRITES = (promote, expire_waitpoints, expire_suspensions, expire, mark_expired, trim, purge)


async def test_a_wrong_type_hides_nothing_else(engine: Engine) -> None:
    await Waits.open(engine)
    world = World(engine, await populated(engine, "default"), await populated(engine, "other"))
    await engine.advance(DAY + HOUR)
    call = engine.backend.transport.call
    names: Any = await call("KEYS", "ff:*")
    kept: dict[bytes, Any] = {
        name: await call("DUMP", name) for name in names if await call("PTTL", name) < 0
    }
    problems: list[str] = []
    # One of each family, on the bad side where both have it.
    families = {UUID.sub("*", n.decode()): n for n in sorted(kept, key=lambda n: owned(world, n))}
    for victim in families.values():
        own = owned(world, victim)
        await call("FLUSHALL")
        await asyncio.gather(*(call("RESTORE", name, 0, dump) for name, dump in kept.items()))
        wrong = ("LPUSH", victim, "x") if await call("TYPE", victim) == b"string" else None
        await call("DEL", victim)
        await call(*(wrong or ("SET", victim, "x")))
        if victim.decode() in {keys.CONFIG_PARTITIONS, keys.LANES, keys.PARTITIONS}:
            continue
        for probe in READS + WRITES:
            if any(victim.endswith(end) and probe is needs for end, needs in OWN.items()):
                continue
            problem = await failure(probe, world, own=own)
            if problem:
                problems.append(f"{victim.decode()}: {probe.__name__}: {problem}")
    assert not problems, "\n".join(problems)


def owned(world: World, name: bytes) -> bool:
    return world.bad.owns(name.decode()) and not world.good.owns(name.decode())


async def failure(
    probe: Callable[[World], Awaitable[None]], world: World, *, own: bool
) -> str | None:
    """What a probe misses. Only a key of its own may stop a probe, and is then named."""
    try:
        await probe(world)
    except (AssertionError, CorruptionError) as error:
        return repr(error) if own else None
    return None
