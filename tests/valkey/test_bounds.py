"""No call keeps the server busy for long, whatever it is given: limits, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.conditions import AllOf, Single
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import UsePending
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import parse_policy
from flowfabric.core.state import ExpireReason
from flowfabric.engine.api.executions import PART, Completion
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.claims import claim_many
from tests.support.engine import LANE, Engine
from tests.support.server_time import ONCE_US, assert_short, command, times
from tests.support.suspension import Waits

SIGNATURES = 128
PAGE = 100
MB = 1_048_576


def requiring(*tokens: str) -> dict[str, Any]:
    return {"routing_requirements": {"required_capabilities": list(tokens)}}


def new(engine: Engine, policy: dict[str, Any] | None = None, payload: bytes = b"") -> NewExecution:
    return NewExecution(
        execution_id=engine.new_id(),
        execution_kind="job",
        input_payload=payload,
        policy=None if policy is None else parse_policy(policy),
    )


async def signatures(engine: Engine) -> int:
    return len(await engine.backend.calls.signatures(engine.new_id().tag, LANE))


# --- requirement signatures of a lane ---------------------------------------------


async def test_a_signature_leaves_with_its_last_execution(engine: Engine) -> None:
    first = await engine.create(policy=requiring("gpu"))
    second = await engine.create(policy=requiring("gpu"))
    assert await signatures(engine) == 1
    await engine.backend.executions.cancel_execution(first, source="operator_override")
    assert await signatures(engine) == 1
    await engine.backend.executions.cancel_execution(second, source="operator_override")
    assert await signatures(engine) == 0
    await engine.backend.executions.create_many(
        [new(engine, requiring(f"c{n % 3}")) for n in range(9)]
    )
    assert await signatures(engine) == 3
    assert len(await engine.claim_all(9, capabilities=["c0", "c1"])) == 6
    assert await signatures(engine) == 1


async def test_a_reclaimed_execution_takes_its_signature_along(engine: Engine) -> None:
    await engine.create(policy=requiring("gpu"))
    claim = await engine.claim(capabilities=["gpu"], ttl=1000)
    assert await signatures(engine) == 0
    await engine.advance(2000)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        claim.execution_id.tag, [claim.execution_id]
    )
    assert await signatures(engine) == 1
    await engine.claim_all(2, capabilities=["gpu"])
    assert await signatures(engine) == 0


async def test_a_lane_has_a_limited_number_of_signatures(engine: Engine) -> None:
    await engine.create(policy=requiring("first"))
    many = [new(engine, requiring(f"c{n}")) for n in range(SIGNATURES)]
    assert len(many) <= PART, "one call must fill the lane"
    outcomes = await engine.backend.executions.create_many(many)
    refused = [each for each in outcomes if isinstance(each, EngineError)]
    assert [(each.code, each.details) for each in refused] == [
        ("signature_limit_exceeded", (str(SIGNATURES),))
    ]
    with pytest.raises(EngineError, match="signature_limit_exceeded"):
        await engine.create(policy=requiring("one", "more"))
    assert not await engine.backend.transport.call(
        "EXISTS", keys.core(many[-1].execution_id.tag, many[-1].execution_id)
    )
    await engine.create(policy=requiring("c7"))
    await engine.create()


async def test_namespaces_do_not_use_up_the_limit(engine: Engine) -> None:
    """A worker finds the work of its own among very many, and one of all serves each in turn."""
    for n in range(600):
        await engine.create(namespace=f"n{n:03}")
    for n in range(570, 600):
        assert (await engine.claim(namespaces=[f"n{n}"])).namespace == f"n{n}"
    served: set[str] = set()
    while claims := await engine.claim_all(256):
        served.update(claim.namespace for claim in claims)
    assert len(served) == 570


async def test_a_call_that_announces_many_bells(engine: Engine) -> None:
    """However many listen, and however many bells there are."""
    for n in range(1000):
        await command(engine, "ZADD", lua_keys.LISTENERS, 2**45 + n, f"listener-{n}")
        await command(engine, "ZADD", lua_keys.BELLS, 1, f"old\x1f{n}")

    async def create() -> None:
        await engine.backend.executions.create_many(
            [new(engine, requiring(f"c{n}")) for n in range(SIGNATURES)]
        )

    async def forget() -> None:
        indexes = await command(engine, "KEYS", "ff:idx:{fp:*")
        await command(engine, "DEL", lua_keys.BELLS, *indexes)

    await assert_short(engine, "ff_create", create, forget)
    ears = await command(engine, "KEYS", keys.wake("\x1f*"))
    assert len(ears) == 1000
    await command(engine, "DEL", *await command(engine, "KEYS", "ff:exec:*"), *ears)
    await forget()


async def test_listening_to_many_bells(engine: Engine) -> None:
    for n in range(1000):
        await command(engine, "ZADD", lua_keys.BELLS, n, f"default\x1fc{n}")

    async def listen() -> None:
        listener = engine.backend.wakeups.listen([LANE])
        await listener.wait(0.001)
        await listener.aclose()

    await assert_short(engine, "ff_listen", listen)


async def test_a_claim_from_very_many_signatures(engine: Engine) -> None:
    capabilities = [f"c{n}" for n in range(SIGNATURES)]
    created: list[ExecutionId] = []
    claimed: list[ExecutionId] = []

    async def fill() -> None:
        for _ in range(4):
            items = [new(engine, requiring(token)) for token in capabilities]
            created.extend(item.execution_id for item in items)
            await engine.backend.executions.create_many(items)

    async def claim() -> None:
        claims = await engine.claim_all(256, capabilities=capabilities)
        assert claims
        claimed.extend(each.execution_id for each in claims)

    await assert_short(engine, "ff_claim_many", claim, fill)
    while await signatures(engine):
        await claim()
    assert sorted(claimed) == sorted(created)


async def left_to_others(engine: Engine, tasks: list[str], **options: Any) -> None:
    """One execution of each task; only workers that know it see it."""
    for start in range(0, len(tasks), PART):
        items = [
            NewExecution(execution_id=engine.new_id(), execution_kind=task, **options)
            for task in tasks[start : start + PART]
        ]
        await engine.backend.executions.create_many(items)
    while (await claim_many(engine, tasks=["none"])).unknown_tasks:
        pass


async def test_a_claim_of_a_worker_with_very_many_tasks(engine: Engine) -> None:
    """It sees a part of them at a time, and takes as many as it asks for."""
    tasks, claimed = [f"task {n}" for n in range(1000)], set[ExecutionId]()
    await left_to_others(engine, tasks)
    want, tag = engine.want(tasks=tasks), engine.new_id().tag

    async def claim() -> int:
        found = await engine.backend.claims.claim_many(want, tag, 64)
        claimed.update(each.execution_id for each in found.claims)
        assert len(claimed) == 1000 or len(found.claims) == 64
        return found.remaining

    await assert_short(engine, "ff_claim_many", claim)
    while await claim():
        pass
    assert len(claimed) == 1000


async def test_very_many_tasks_of_others_hide_no_work_for_a_capability(engine: Engine) -> None:
    await left_to_others(engine, [f"task {n}" for n in range(600)])
    for token in "abcdef":
        execution_id = await engine.create(policy=requiring(token))
        (claim,) = await engine.claim_all(capabilities=[token, "more"])
        assert claim.execution_id == execution_id


async def test_what_a_claim_does_not_see_counts_as_left(engine: Engine) -> None:
    tasks = [f"task {n}" for n in range(200)]
    await left_to_others(engine, tasks)
    first = await claim_many(engine, 256, tasks=tasks)
    assert (100 < len(first.claims) < 200, first.remaining) == (True, 1)
    assert len((await claim_many(engine, 256, tasks=tasks)).claims) == 200 - len(first.claims)


async def test_no_task_of_very_many_starves(engine: Engine) -> None:
    """Each has urgent work; whatever part a claim sees always has other work, too."""
    tasks = [f"task {n}" for n in range(200)]
    await left_to_others(engine, tasks, priority=9)
    for _ in range(3):
        await left_to_others(engine, tasks)
    urgent: set[ExecutionId] = set()
    for _ in range(50):
        await engine.advance(33)
        for claim in await engine.claim_all(8, tasks=tasks):
            info = await engine.backend.reads.read_execution_info(claim.execution_id)
            urgent.update({claim.execution_id} if info.priority == 9 else ())
    assert len(urgent) == 200


@pytest.mark.corrupts
@pytest.mark.parametrize("stray", ["gpu", "acme gpu"])
async def test_a_claim_forgets_a_signature_without_work(engine: Engine, stray: str) -> None:
    execution_id = await engine.create()
    await command(engine, "SADD", keys.lane(execution_id.tag, LANE, "sigs"), stray)
    await engine.claim(capabilities=["gpu"])
    assert await signatures(engine) == 0


@pytest.mark.corrupts
async def test_more_signatures_than_allowed_slow_nothing_down(engine: Engine) -> None:
    execution_id = await engine.create(policy=requiring("gpu"))
    await engine.create()
    tag = execution_id.tag
    for start in range(0, 100_000, 10_000):
        strays = [f"stray{n}" for n in range(start, start + 10_000)]
        await engine.backend.transport.call("SADD", keys.lane(tag, LANE, "sigs"), *strays)

    async def claim() -> None:
        await engine.backend.claims.claim_many(engine.want(capabilities=["gpu"]), tag, 1)

    async def reconcile() -> None:
        await engine.backend.upkeep.reconcile_execution_index(tag, [execution_id])

    await assert_short(engine, "ff_claim_many", claim)
    await assert_short(engine, "ff_reconcile", reconcile)


@pytest.mark.parametrize("max_n", [1, 64, 256])
async def test_a_claim_that_leaves_all_to_others(engine: Engine, max_n: int) -> None:
    """A long backlog in which every execution is of another task that the worker does not know."""
    known, kinds = [f"known {n}" for n in range(1000)], iter(range(100_000))

    async def fill() -> None:
        for _ in range(4):
            await engine.backend.executions.create_many(
                [
                    NewExecution(execution_id=engine.new_id(), execution_kind=f"task {next(kinds)}")
                    for _ in range(256)
                ]
            )

    async def claim() -> None:
        assert await engine.claim_all(max_n, tasks=known) == []

    await assert_short(engine, "ff_claim_many", claim, fill)
    assert await signatures(engine) > SIGNATURES


@pytest.mark.parametrize("max_n", [1, 64, 256])
async def test_a_claim_leaves_a_limited_number_to_others(engine: Engine, max_n: int) -> None:
    many = [
        NewExecution(execution_id=engine.new_id(), execution_kind=f"task {n}") for n in range(600)
    ]
    await engine.backend.executions.create_many(many)
    assert await engine.claim_all(max_n, tasks=["known"]) == []
    assert 0 < await signatures(engine) <= 256


async def test_reconciling_a_page_on_a_lane_with_all_its_signatures(engine: Engine) -> None:
    many = [new(engine, requiring(f"c{n}")) for n in range(SIGNATURES)]
    await engine.backend.executions.create_many(many)
    ids = [each.execution_id for each in many[:100]]

    async def reconcile() -> None:
        verdicts = await engine.backend.upkeep.reconcile_execution_index(ids[0].tag, ids)
        assert set(verdicts) == {"consistent"}

    await assert_short(engine, "ff_reconcile", reconcile)


# --- bytes ------------------------------------------------------------------------


async def test_large_payloads_travel_in_parts(engine: Engine) -> None:
    held: list[Claim] = []

    async def create() -> None:
        items = [new(engine, payload=b"x" * MB) for _ in range(12)]
        outcomes = await engine.backend.executions.create_many(items)
        assert not [each for each in outcomes if isinstance(each, EngineError)]

    async def claim() -> None:
        claims = await engine.claim_all(64)
        assert len(claims) == 4
        held.extend(claims)

    async def complete() -> None:
        # A repeat is answered again, but first it travels.
        items = [Completion(each.handle, b"y" * MB) for each in held[:4] * 3]
        outcomes = await engine.backend.executions.complete_many(items)
        assert not [each for each in outcomes if isinstance(each, EngineError)]

    await assert_short(engine, "ff_create", create)
    await assert_short(engine, "ff_claim_many", claim, create)
    await assert_short(engine, "ff_complete", complete)


async def test_completing_and_claiming_sends_large_results_in_parts(engine: Engine) -> None:
    for _ in range(12):
        await engine.create()
    claims = await engine.claim_all(11)
    items = [Completion(each.handle, b"y" * MB) for each in claims]
    tag = claims[0].execution_id.tag

    async def complete() -> None:
        outcomes, claimed = await engine.backend.claims.complete_and_claim(
            tag, items, engine.want(), 5
        )
        assert (outcomes, len(claimed.claims)) == ([None] * 11, 1)

    assert len(await times(engine, "ff_complete", complete)) == 3
    for each in claims:
        assert (
            await engine.backend.transport.call("EXISTS", keys.result(tag, each.execution_id)) == 1
        )


@pytest.mark.parametrize(("frames", "size"), [(320, 65_536), (10_000, 10)])
async def test_reading_a_long_stream(engine: Engine, frames: int, size: int) -> None:
    handle = await engine.running()
    batch = [Frame(payload=b"x" * size)] * min(256, max(1, MB // size))
    for _ in range(0, frames, len(batch)):
        await engine.backend.streams.append_frames(handle, batch)

    async def read() -> None:
        page = await engine.backend.streams.read_stream(handle.execution_id, 0, count_limit=10_000)
        assert len(page.frames) >= frames

    await assert_short(engine, "ff_stream_read", read)


# --- waitpoints and signals -------------------------------------------------------


@pytest.mark.corrupts
async def test_an_execution_has_a_limited_number_of_waitpoints(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    tag, execution_id = handle.execution_id.tag, handle.execution_id
    call = engine.backend.transport.call
    first = await engine.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    stored = keys.waitpoint(tag, first.waitpoint_id)
    others = [f"00000000-0000-4000-8000-{n:012d}" for n in range(9_998)]
    await call("SADD", lua_keys.waitpoints(tag, execution_id), *others)
    for other in others:
        await call("COPY", stored, keys.waitpoint(tag, other))

    async def read() -> None:
        assert len(await engine.backend.waitpoints.read_waits(execution_id, "k")) == 9_999

    await assert_short(engine, "ff_read_waits", read)
    await engine.backend.waitpoints.create_waitpoint(handle, "k2", 60_000)
    with pytest.raises(EngineError, match=r"waitpoint_limit_exceeded: 10000"):
        await engine.backend.waitpoints.create_waitpoint(handle, "k3", 60_000)
    with pytest.raises(EngineError, match=r"waitpoint_limit_exceeded: 10000"):
        await waits.park(handle=handle)


async def test_signals_of_a_token_and_of_an_execution_have_limited_bytes(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    payload = b"x" * 65_536
    for number in range(5):
        waitpoint = await engine.backend.waitpoints.create_waitpoint(handle, f"k{number}", 60_000)
        for _ in range(64 if number < 4 else 0):
            await waits.signal(handle.execution_id, waitpoint, "nope", payload=payload)
        with pytest.raises(EngineError, match=r"signal_bytes_exceeded") as caught:
            await waits.signal(handle.execution_id, waitpoint, "nope", payload=payload)
        assert caught.value.details == ("4194304" if number < 3 else "16777216",)
        await waits.signal(handle.execution_id, waitpoint, "without a payload")


@pytest.mark.corrupts
async def test_signals_and_a_suspension_at_their_limits(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    waitpoint = await engine.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    for number in range(999):
        await waits.signal(handle.execution_id, waitpoint, f"s{number}")

    async def signal() -> None:
        await waits.signal(handle.execution_id, waitpoint, "last")

    assert max(await times(engine, "ff_signal", signal)) <= ONCE_US
    with pytest.raises(EngineError, match="signal_limit_exceeded"):
        await signal()

    async def suspend() -> None:
        pending = UsePending(waitpoint.waitpoint_id)
        await engine.backend.suspensions.suspend(
            handle, condition=Single("k", "never"), waitpoints=[pending]
        )

    assert max(await times(engine, "ff_suspend", suspend)) <= ONCE_US

    async def park() -> None:
        await waits.park(AllOf(tuple(Single(f"k{n}") for n in range(64))))

    await assert_short(engine, "ff_suspend", park)


# --- batches of items -------------------------------------------------------------


async def test_batches_of_leases(engine: Engine) -> None:
    for _ in range(256):
        await engine.create(policy={"timeout_policy": {"execution_deadline_ms": 60_000}})
    claims = await engine.claim_all(256)
    assert len(claims) == 256
    ids = [each.execution_id for each in claims]
    tag = ids[0].tag

    async def renew() -> None:
        await engine.backend.leases.renew_many([each.handle for each in claims])

    async def append() -> None:
        await engine.backend.streams.append_frames(
            claims[0].handle, [Frame(payload=b"x" * 4096)] * 256
        )

    await assert_short(engine, "ff_renew", renew)
    await assert_short(engine, "ff_append", append)
    await engine.advance(40_000)
    marked = await engine.backend.upkeep.mark_lease_expired_if_due(tag, ids[:PAGE])
    assert marked == ["marked_expired"] * PAGE
    await engine.advance(40_000)

    async def mark() -> None:
        await engine.backend.upkeep.mark_lease_expired_if_due(tag, ids[:PAGE])

    async def expire() -> None:
        await engine.backend.upkeep.expire_execution(
            tag, ExpireReason.EXECUTION_DEADLINE, ids[:PAGE]
        )
        del ids[:PAGE]

    async def trim() -> None:
        await engine.backend.upkeep.trim_retention(tag, LANE, ended[:PAGE])

    ended = ids[:]
    await assert_short(engine, "ff_mark_expired", mark)
    assert max(await times(engine, "ff_expire", expire)) <= ONCE_US
    while ids:
        await expire()
    await engine.advance(90_000_000)
    assert max(await times(engine, "ff_trim", trim)) <= ONCE_US
