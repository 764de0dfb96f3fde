"""Claims without a grant: choice, order, repeats (04 S2, S3, S6, S8, 03 D7)."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import ClaimedMany
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.executions import Completion
from tests.support.claims import BOTH, GPU, claim_many, create_many, ids
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import event_types, lapsed, mark, paused


async def test_order_is_priority_then_age_then_id(engine: Engine) -> None:
    start = await engine.now()
    await engine.freeze(start + 1)
    same_age = await create_many(engine, 3)
    await engine.freeze(start + 2)
    younger = await engine.create()
    urgent = await engine.create(priority=1)
    most_urgent = await engine.create(priority=9000)
    await engine.freeze(start)
    oldest = await engine.create()
    expected = [most_urgent, urgent, oldest, *same_age, younger]
    one_by_one = [(await engine.claim()).execution_id for _ in range(3)]
    rest = ids(await engine.claim_all())
    assert one_by_one + rest == expected


async def test_a_retried_execution_ranks_by_its_original_age(engine: Engine) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 5}}}
    handle = await engine.running(policy=policy)
    await engine.backend.executions.fail(handle, "boom", "transient")
    await engine.advance(10)
    younger = await engine.create()
    await engine.backend.upkeep.promote_delayed(
        handle.execution_id.tag, "default", [handle.execution_id]
    )
    assert ids(await engine.claim_all()) == [handle.execution_id, younger]


async def test_reclaimable_work_ranks_by_priority_and_age(engine: Engine) -> None:
    older = await engine.create(priority=5)
    lost = await engine.claim()
    await engine.advance(TTL + 1)
    await mark(engine, [lost.execution_id])
    urgent, plain = await engine.create(priority=6), await engine.create()
    assert lost.execution_id == older
    assert ids(await engine.claim_all()) == [urgent, older, plain]


async def test_order_holds_across_requirement_signatures(engine: Engine) -> None:
    made: list[ExecutionId] = []
    for policy in (None, GPU, BOTH, None, BOTH, GPU):
        made.append(await engine.create(policy=policy))
        await engine.advance(2)
    claims = await engine.claim_all(capabilities=["gpu", "cuda", "x"])
    assert ids(claims) == made


async def test_no_more_than_asked_and_the_rest_is_counted(engine: Engine) -> None:
    for _ in range(5):
        await engine.create()
    await engine.create(policy=GPU)
    first = await claim_many(engine, 2)
    assert (len(first.claims), first.remaining) == (2, 3)
    second = await claim_many(engine, 3, capabilities=["gpu"])
    assert (len(second.claims), second.remaining) == (3, 1)
    third = await claim_many(engine, 3, capabilities=["gpu"])
    assert (len(third.claims), third.remaining) == (1, 0)
    assert await claim_many(engine) == ClaimedMany([], 0)


@pytest.mark.parametrize("max_n", [0, -1])
async def test_asking_for_nothing_gives_nothing(engine: Engine, max_n: int) -> None:
    await engine.create()
    async with untouched(engine):
        assert await claim_many(engine, max_n) == ClaimedMany([], 0)


async def test_a_large_batch(engine: Engine) -> None:
    made = await create_many(engine, 300)
    claimed = await claim_many(engine, 300)
    assert (len(claimed.claims), claimed.remaining) == (256, 44)
    lease_ids = {claim.handle.lease_id for claim in claimed.claims}
    assert len(lease_ids) == 256
    again = await claim_many(engine, 300)
    assert sorted(ids(claimed.claims) + ids(again.claims)) == made


async def test_lanes_and_partitions_are_separate(engine: Engine) -> None:
    await engine.create(lane="one")
    assert (await claim_many(engine, lane="two")).claims == []
    tag = "{fp:1}" if engine.new_id("one").tag != "{fp:1}" else "{fp:2}"
    claimed = await engine.backend.claims.claim_many(engine.want(lane="one"), tag, 10)
    assert claimed == ClaimedMany([], 0)


async def test_delayed_and_waiting_children_are_not_claimable(engine: Engine) -> None:
    await engine.create(delay_until=await engine.now() + 60_000)
    async with untouched(engine):
        assert await claim_many(engine) == ClaimedMany([], 0)


# --- repeats (D1) --------------------------------------------------------------------


async def test_a_repeated_request_gives_the_same_claims(engine: Engine) -> None:
    await lapsed(engine, input_payload=b"a")
    await paused(engine)
    await engine.advance(2)
    for _ in range(3):
        await engine.create(tags={"a.b": "c"})
    request_id = new_uuid()
    first = await claim_many(engine, 4, request_id=request_id, worker="v", instance="v-1")
    async with untouched(engine):
        again = await claim_many(engine, 4, request_id=request_id, worker="v", instance="v-1")
    assert again == first
    assert [claim.handle.kind for claim in first.claims] == [
        "reclaimed",
        "resumed",
        "fresh",
        "fresh",
    ]


async def test_a_repeat_keeps_the_order_of_many(engine: Engine) -> None:
    """Of a reply that comes when fewer permits are free, a worker runs the first ones."""
    await create_many(engine, 200)
    request_id = new_uuid()
    first = await claim_many(engine, 200, request_id=request_id)
    assert len(first.claims) == 200
    assert (await claim_many(engine, 200, request_id=request_id)).claims == first.claims


async def test_a_repeat_tells_that_a_reclaimed_attempt_was_resumed(engine: Engine) -> None:
    await lapsed(engine)
    claim = await engine.claim()
    await engine.backend.executions.delay(claim.handle, 1)
    await engine.advance(2)
    request_id = new_uuid()
    first = await claim_many(engine, 1, request_id=request_id)
    assert [each.handle.kind for each in first.claims] == ["resumed"]
    assert (await claim_many(engine, 1, request_id=request_id)).claims == first.claims


async def test_a_repeat_after_another_request_gives_the_same_claims(engine: Engine) -> None:
    for _ in range(3):
        await engine.create()
    one, two = new_uuid(), new_uuid()
    first = await claim_many(engine, 1, request_id=one)
    second = await claim_many(engine, 1, request_id=two)
    async with untouched(engine):
        assert (await claim_many(engine, 1, request_id=one)).claims == first.claims
        assert (await claim_many(engine, 1, request_id=two)).claims == second.claims


async def test_many_requests_under_way_are_remembered(engine: Engine) -> None:
    """As many as a worker with a slot each may have: a lost connection loses all their replies."""
    requests = [new_uuid() for _ in range(120)]
    for _ in requests:
        await engine.create()
    first = [(await claim_many(engine, 1, request_id=each)).claims for each in requests]
    async with untouched(engine):
        again = [(await claim_many(engine, 1, request_id=each)).claims for each in requests]
    assert again == first


async def test_a_repeat_leaves_out_what_ended_meanwhile(engine: Engine) -> None:
    for _ in range(4):
        await engine.create()
    request_id = new_uuid()
    first = (await claim_many(engine, 4, request_id=request_id)).claims
    await engine.backend.executions.complete(first[0].handle)
    await engine.backend.executions.delay(first[1].handle, 1)
    await engine.backend.leases.revoke_lease(first[2].execution_id)
    again = await claim_many(engine, 4, request_id=request_id)
    assert again.claims == first[3:]
    await engine.advance(TTL)
    assert (await claim_many(engine, 4, request_id=request_id)).claims == []


async def test_a_request_that_found_nothing_may_find_work_later(engine: Engine) -> None:
    request_id = new_uuid()
    assert (await claim_many(engine, request_id=request_id)).claims == []
    execution_id = await engine.create()
    assert ids((await claim_many(engine, request_id=request_id)).claims) == [execution_id]


async def test_a_request_id_is_a_uuid(engine: Engine) -> None:
    await refused(claim_many(engine, request_id="once"), "invalid_input")


# --- complete and claim (S3) -----------------------------------------------------------


async def test_complete_and_take_the_next(engine: Engine) -> None:
    handles = [await engine.running() for _ in range(3)]
    await engine.backend.executions.cancel_execution(handles[1].execution_id)
    waiting = [await engine.create() for _ in range(3)]
    outcomes, claimed = await engine.backend.claims.complete_and_claim(
        handles[0].execution_id.tag,
        [Completion(handle, b"r") for handle in handles],
        engine.want(),
        2,
    )
    assert [error.code if isinstance(error, EngineError) else error for error in outcomes] == [
        None,
        "execution_not_active",
        None,
    ]
    assert set(ids(claimed.claims)) <= set(waiting)
    assert len(claimed.claims) == 2
    assert claimed.remaining == 1
    assert await engine.backend.reads.get_execution_result(handles[2].execution_id) == b"r"


async def test_repeating_a_completion_gives_the_same_claims(engine: Engine) -> None:
    """A worker whose call was not answered may only want the leases that it took."""
    handle, request_id = await engine.running(), new_uuid()
    done = [Completion(handle, b"r")]
    for _ in range(4):
        await engine.create()
    tag, call = handle.execution_id.tag, engine.backend.claims.complete_and_claim
    _, first = await call(tag, done, engine.want(), 3, request_id=request_id)
    assert len(first.claims) == 3
    for again in (done, []):
        async with untouched(engine):
            outcomes, claimed = await call(tag, again, engine.want(), 3, request_id=request_id)
        assert outcomes == [None] * len(again)
        assert (claimed.claims, claimed.remaining) == (first.claims, 1)


async def test_completions_stand_when_nothing_is_claimed(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.lanes.set_lane_state("default", "paused")
    await engine.create()
    items = [Completion(handle)]
    tag = handle.execution_id.tag
    for max_n in (5, 0):
        outcomes, claimed = await engine.backend.claims.complete_and_claim(
            tag, items, engine.want(), max_n
        )
        assert outcomes == [None]
        assert claimed == ClaimedMany([], 0)
    assert await event_types(engine, handle.execution_id) == ["acquired", "completion"]
