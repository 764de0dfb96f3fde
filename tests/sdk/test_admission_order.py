"""When limits open: the order of starts, jitter, and what a late call undoes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Candidate, ClaimGrant
from flowfabric.core.contracts.quotas import Admitted, AlreadyAdmitted, RateExceeded
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.api.admission import FOR_BUDGET, FOR_QUOTA, Block
from flowfabric.scheduler.grants import WorkerGrants
from tests.support.admission import budget, claimed, limited, quota, slots
from tests.support.engine import LANE, Engine
from tests.support.scanning import idle

WINDOW, JITTER = 10_000, 5_000


async def jittery(engine: Engine, rate: int) -> str:
    policy = new_uuid()
    await engine.backend.quotas.create_quota_policy(
        policy, window_seconds=WINDOW // 1000, max_requests_per_window=rate, jitter_ms=JITTER
    )
    return policy


async def retry_at(engine: Engine, execution_id: ExecutionId) -> int:
    found = await engine.backend.reads.describe_execution(execution_id)
    assert found is not None
    assert found.retry_at is not None
    return found.retry_at


async def test_jitter_is_added_to_the_retry_time(engine: Engine) -> None:
    await engine.freeze(await engine.now())
    policy = await jittery(engine, 1)
    assert isinstance(
        await engine.backend.quotas.check_admission(policy, engine.new_id()), Admitted
    )
    answers = [
        await engine.backend.quotas.check_admission(policy, engine.new_id()) for _ in range(50)
    ]
    waits = [each.retry_after_ms for each in answers if isinstance(each, RateExceeded)]
    assert len(waits) == 50
    assert all(WINDOW <= wait <= WINDOW + JITTER for wait in waits)
    assert len(set(waits)) > 1


async def test_each_starts_at_its_own_time(engine: Engine) -> None:
    start = await engine.now()
    await engine.freeze(start)
    policy = await jittery(engine, 8)
    ids = [await limited(engine, quota=policy) for _ in range(16)]
    first = await claimed(engine)
    assert len(first) == 8
    times = {each: await retry_at(engine, each) for each in ids if each not in first}
    started: list[ExecutionId] = []
    for at in sorted(set(times.values())):
        await engine.freeze(at)
        again = await engine.backend.admission.open_quota(policy)
        started += await claimed(engine)
        assert set(started) == {each for each, due in times.items() if due <= at}
        later = [due for due in times.values() if due > at]
        assert again == (min(later) - at if later else None)


async def test_a_window_that_moves_on_after_a_release_keeps_each_time(engine: Engine) -> None:
    """A release that finds the window full has this process come back when it has a place."""
    quotas, policy = engine.backend.quotas, new_uuid()
    await quotas.create_quota_policy(
        policy,
        window_seconds=1,
        max_requests_per_window=1,
        max_concurrent=1,
        jitter_ms=10**9,
    )
    first = await limited(engine, quota=policy)
    assert await claimed(engine) == [first]
    waiting = await limited(engine, quota=policy)
    assert await claimed(engine) == []
    told, opened = asyncio.Event(), quotas.on_quota_opened
    assert opened is not None

    async def observed(quota_policy_id: str, headroom: int | None) -> None:
        await opened(quota_policy_id, headroom)
        told.set()

    quotas.on_quota_opened = observed
    await quotas.release_admission(policy, first)
    async with asyncio.timeout(10):
        await told.wait()
    state = await engine.backend.reads.read_execution_state(waiting)
    assert state is PublicState.RATE_LIMITED
    # At its own time, it starts.
    await engine.freeze(await retry_at(engine, waiting))
    await engine.backend.admission.open_quota(policy)
    assert await claimed(engine) == [waiting]


async def test_a_raised_limit_does_not_wait_for_the_jitter(engine: Engine) -> None:
    policy = await jittery(engine, 1)
    ids = [await limited(engine, quota=policy) for _ in range(3)]
    (first,) = await claimed(engine)
    await engine.backend.quotas.update_quota_policy(policy, max_requests_per_window=5)
    assert set(await claimed(engine)) == set(ids) - {first}


async def test_the_weight_of_the_lane_decides_who_is_let_go(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=1000)
    policy = await quota(engine, cap=1)
    (running,) = [await limited(engine, quota=policy)]
    assert await claimed(engine) == [running]
    old = await limited(engine, quota=policy)
    await engine.advance(60_000)
    urgent = await limited(engine, quota=policy, priority=5)
    found = await engine.backend.admission.read_candidates([old, urgent])
    scores = [each.score for each in found if isinstance(each, Candidate)]
    # Five seconds ahead do not make up for a minute of waiting.
    assert scores[1] - scores[0] == pytest.approx(55_000, abs=1000)


async def test_a_new_priority_counts_for_what_waits_for_a_quota(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    running = await limited(engine, quota=policy)
    assert await claimed(engine) == [running]
    ids: list[ExecutionId] = []
    for _ in range(4):
        ids.append(await limited(engine, quota=policy, priority=1))
        await engine.advance(1)
    assert await claimed(engine) == []
    await engine.backend.executions.change_priority(ids[3], 9)
    await engine.backend.executions.change_priority(ids[0], 0)
    for expected in (ids[3], ids[1], ids[2], ids[0]):
        await engine.backend.quotas.release_admission(policy, running)
        (running,) = await claimed(engine)
        assert running == expected


async def test_a_new_weight_counts_for_what_waits_for_a_quota(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    running = await limited(engine, quota=policy)
    assert await claimed(engine) == [running]
    old = await limited(engine, quota=policy)
    await engine.advance(120_000)
    urgent = await limited(engine, quota=policy, priority=1)
    assert await claimed(engine) == []
    await engine.backend.lanes.set_lane_config(LANE, priority_weight_ms=60_000)
    await idle(engine).scan_once("unblock")
    for expected in (old, urgent):
        await engine.backend.quotas.release_admission(policy, running)
        (running,) = await claimed(engine)
        assert running == expected


async def test_a_new_priority_of_one_that_was_let_go_leaves_no_note(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    running = await limited(engine, quota=policy)
    assert await claimed(engine) == [running]
    waiting = await limited(engine, quota=policy)
    assert await claimed(engine) == []
    # The quota opened just before the new place is noted.
    await engine.backend.quotas.release_admission(policy, running)
    await engine.backend.quotas.move_blocked(policy, {waiting: 1})
    assert (await engine.backend.quotas.blocked(policy)).entries == ()


async def test_a_late_caller_does_not_take_the_slot_of_a_run(engine: Engine) -> None:
    policy = await quota(engine, cap=1, window=1)
    running = await limited(engine, quota=policy)
    assert await claimed(engine) == [running]
    # The window is over. A scheduler that saw the execution before it was claimed asks for it.
    await engine.advance(5_000)
    (late,) = await engine.backend.quotas.admit_many(policy, [running])
    assert isinstance(late, AlreadyAdmitted)
    assert await slots(engine, policy) == 1
    await limited(engine, quota=policy)
    assert await claimed(engine) == []
    await engine.advance(60_000)
    assert await slots(engine, policy) == 1


async def test_a_rollback_leaves_the_slot_of_a_run(engine: Engine) -> None:
    """An operator claimed what a scheduler had admitted: the scheduler's claim is refused."""
    quotas, policy = engine.backend.quotas, await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    (admitted,) = await quotas.admit_many(policy, [execution_id])
    assert isinstance(admitted, Admitted)
    await quotas.confirm_admission(policy, execution_id)
    await quotas.release_many(policy, [execution_id], rollback=admitted.request_id)
    assert await slots(engine, policy) == 1


async def test_a_budget_that_opened_before_its_block_was_noted(engine: Engine) -> None:
    open_now = await budget(engine)
    execution_id = await limited(engine, open_now)
    block = Block(
        execution_id=execution_id, reason=FOR_BUDGET, detail="too late", waits_for=open_now
    )
    assert await engine.backend.admission.block_many(execution_id.tag, [block]) == [None]
    assert await claimed(engine) == [execution_id]


async def test_a_quota_that_opened_before_its_block_was_noted(engine: Engine) -> None:
    open_now = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=open_now)
    block = Block(
        execution_id=execution_id, reason=FOR_QUOTA, detail="too late", waits_for=open_now
    )
    assert await engine.backend.admission.block_many(execution_id.tag, [block]) == [None]
    assert await claimed(engine) == [execution_id]


@pytest.mark.parametrize("jitter", [0, 1])
async def test_when_to_look_again_at_a_quota(engine: Engine, jitter: int) -> None:
    await engine.freeze(at := await engine.now())
    policy = await quota(engine, rate=1)
    await engine.backend.quotas.update_quota_policy(policy, jitter_ms=jitter)
    ids = [await limited(engine, quota=policy) for _ in range(3)]
    assert len(await claimed(engine)) == 1
    look = engine.backend.admission.open_quota
    await engine.freeze(at + 20_000)
    assert await look(policy) == 40_000
    await engine.freeze(at + 60_000 + jitter)
    # One may start now, and has not yet.
    assert await look(policy) == 1000
    states = [await engine.backend.reads.read_execution_state(each) for each in ids]
    assert sorted(states) == ["active", "rate_limited", "waiting"]
    assert len(await claimed(engine)) == 1
    await engine.freeze(at + 120_000 + 2 * jitter)
    assert await look(policy) is None
    assert len(await claimed(engine)) == 1


async def test_a_shorter_window_counts_for_those_with_a_later_time(engine: Engine) -> None:
    policy, quotas = await quota(engine, rate=1, window=86_400), engine.backend.quotas
    ids = [await limited(engine, quota=policy) for _ in range(2)]
    started = await claimed(engine)
    assert len(started) == 1
    # As if the process that changed the policy had died.
    quotas.on_quota_opened = None
    await quotas.update_quota_policy(policy, window_seconds=1, jitter_ms=1)
    await engine.advance(2000)
    await engine.backend.admission.open_quota(policy)
    assert {*started, *await claimed(engine)} == {*ids}


async def test_a_grant_behind_many_that_are_held_back(engine: Engine) -> None:
    spent = await budget(engine, 1, spent=1)
    for _ in range(40):
        await limited(engine, spent, priority=9)
    plain = await engine.create()
    grant = await WorkerGrants(engine.backend).claim_for_worker(LANE, "w", "w-1")
    assert isinstance(grant, ClaimGrant)
    assert grant.execution_id == plain


async def shared_with_a_paused_lane(engine: Engine, **limits: Any) -> tuple[str, ExecutionId]:
    """A full quota for which many executions of a paused lane wait, and behind them one of another
    lane. Returns the policy and the one that runs under it."""
    policy = new_uuid()
    await engine.backend.quotas.create_quota_policy(policy, max_concurrent=1, **limits)
    running = await limited(engine, quota=policy)
    assert await claimed(engine) == [running]
    for _ in range(20):
        await limited(engine, quota=policy, lane="mails")
    assert await claimed(engine, lane="mails") == []
    await engine.backend.lanes.set_lane_state("mails", "paused")
    return policy, running


@pytest.mark.parametrize("how", ["told", "scanned", "in time"])
async def test_a_paused_lane_keeps_no_room_of_a_quota(engine: Engine, how: str) -> None:
    quotas = engine.backend.quotas
    limits = {"max_requests_per_window": 100, "jitter_ms": 1} if how == "in time" else {}
    policy, running = await shared_with_a_paused_lane(engine, **limits)
    await engine.advance(1)
    waiting = await limited(engine, quota=policy)
    assert await claimed(engine) == []
    if how != "told":
        # As if the process that freed the slot had died before it let anyone go.
        quotas.on_quota_opened = None
    await quotas.release_admission(policy, running)
    if how == "scanned":
        await idle(engine).scan_once("unblock")
    elif how == "in time":
        await engine.advance(10_000)
        await engine.backend.admission.open_quota(policy)
    assert await claimed(engine) == [waiting]


async def test_what_waited_in_a_paused_lane_starts_after_it_is_resumed(engine: Engine) -> None:
    policy, running = await shared_with_a_paused_lane(engine)
    await idle(engine).scan_once("unblock")
    await engine.backend.lanes.set_lane_state("mails", "active")
    await engine.backend.quotas.release_admission(policy, running)
    (started,) = await claimed(engine, lane="mails")
    await engine.backend.quotas.release_admission(policy, started)
    await idle(engine).scan_once("unblock")
    assert len(await claimed(engine, lane="mails")) == 1
