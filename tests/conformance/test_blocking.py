"""block_execution_for_admission, block_route and unblock_execution."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Blocked, Rejected, Unblocked
from flowfabric.core.state import BlockingReason, EligibilityState, PublicState
from flowfabric.engine.api.admission import Block
from tests.support.engine import LANE, TTL, Engine, refused, unchanged
from tests.support.executions import BACKOFF, DEADLINE, POLICY, Case, expire_deadline

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
REASONS = {
    "waiting_for_budget": ("blocked_by_budget", "rate_limited", "blocked_budget"),
    "waiting_for_quota": ("blocked_by_quota", "rate_limited", "blocked_quota"),
    "waiting_for_capable_worker": ("blocked_by_route", "waiting", "blocked_route"),
    "paused_by_operator": ("blocked_by_operator", "waiting", "blocked_operator"),
    "paused_by_policy": ("blocked_by_lane_state", "waiting", "blocked_lane"),
}


async def counts(engine: Engine) -> dict[str, int]:
    return (await engine.backend.listings.count_lanes([LANE]))[LANE]


async def held_back(engine: Engine, reason: str = "paused_by_operator", **fields: Any) -> Any:
    execution_id = await engine.create(**fields)
    outcome = await engine.backend.claims.block_execution_for_admission(execution_id, reason)
    assert outcome == Blocked(execution_id, reason)
    return execution_id


@pytest.mark.parametrize("reason", REASONS)
async def test_a_blocked_execution_is_not_handed_out(engine: Engine, reason: str) -> None:
    eligibility, public, counted = REASONS[reason]
    execution_id = await engine.create()
    blocked = await engine.backend.claims.block_execution_for_admission(
        execution_id, reason, "because", retry_at=5_000_000_000_000
    )
    assert blocked == Blocked(execution_id, reason)
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert (snapshot.public_state, snapshot.blocking_reason) == (public, reason)
    assert (snapshot.blocking_detail, snapshot.retry_at) == ("because", 5_000_000_000_000)
    assert (await engine.vector(execution_id)).eligibility_state == eligibility
    assert (await counts(engine))[counted] == 1
    assert await engine.claim_all() == []
    why = await engine.backend.reads.explain_execution(execution_id)
    assert (why.blocking_reason, why.retry_at) == (reason, 5_000_000_000_000)

    assert await engine.backend.claims.unblock_execution(execution_id) == Unblocked(
        execution_id, PublicState.WAITING
    )
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert (snapshot.blocking_reason, snapshot.blocking_detail) == ("waiting_for_worker", None)
    assert snapshot.retry_at is None
    assert (await engine.claim()).execution_id == execution_id


async def test_block_route_names_the_missing_worker(engine: Engine) -> None:
    execution_id = await engine.create()
    outcome = await engine.backend.claims.block_route(execution_id, reason_detail="no gpu")
    assert outcome == Blocked(execution_id, "waiting_for_capable_worker")
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.state_vector.eligibility_state is EligibilityState.BLOCKED_BY_ROUTE
    assert info.blocking_detail == "no gpu"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("active", "execution_not_eligible"),
        ("lease_expired", "execution_not_eligible"),
        ("waiting_children", "execution_not_eligible"),
        ("delayed", "execution_not_eligible"),
        ("retry_delayed", "execution_not_eligible"),
        ("completed", "execution_not_active"),
        ("cancelled", "execution_not_active"),
    ],
)
async def test_only_claimable_work_can_be_blocked(engine: Engine, state: str, code: str) -> None:
    case = await Case.make(engine, state)
    block = engine.backend.claims.block_execution_for_admission
    answer = await unchanged(engine, lambda: block(case.execution_id, "waiting_for_budget"))
    assert answer == Rejected(code)


async def test_the_checks_in_order(engine: Engine) -> None:
    claims = engine.backend.claims
    block = claims.block_execution_for_admission
    assert await block(engine.new_id(), "nonsense") == Rejected("execution_not_found")
    ended = await Case.make(engine, "completed")
    assert await block(ended.execution_id, "nonsense") == Rejected("execution_not_active")
    running = await Case.make(engine, "active")
    assert await block(running.execution_id, "nonsense") == Rejected("execution_not_eligible")
    delayed = await Case.make(engine, "delayed")
    rejected = Rejected("invalid_blocking_reason")
    assert await block(delayed.execution_id, "nonsense") == rejected
    assert await block(delayed.execution_id, "paused_by_flow_cancel") == rejected
    waiting = await engine.create()
    error = await refused(block(waiting, "paused_by_policy", lane_id="other"), "invalid_input")
    assert "lane_mismatch" in error.detail


async def test_a_live_grant_protects_from_a_block(engine: Engine) -> None:
    execution_id = await engine.create()
    claims = engine.backend.claims
    grant = await claims.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=1000)
    block = claims.block_execution_for_admission
    answer = await unchanged(engine, lambda: block(execution_id, "waiting_for_quota"))
    assert answer == Rejected("execution_not_eligible")
    await engine.advance(1001)
    assert isinstance(await block(execution_id, "waiting_for_quota"), Blocked)
    claiming = claims.claim_execution(grant, **WORKER, lease_ttl_ms=TTL)
    await refused(claiming, "execution_not_leaseable")


async def test_a_second_block_is_refused_and_changes_nothing(engine: Engine) -> None:
    execution_id = await held_back(engine, "waiting_for_budget")
    block = engine.backend.claims.block_execution_for_admission
    answer = await unchanged(engine, lambda: block(execution_id, "paused_by_operator"))
    assert answer == Rejected("execution_not_eligible")


async def test_unblock_checks_in_order(engine: Engine) -> None:
    unblock = engine.backend.claims.unblock_execution
    await refused(unblock(engine.new_id()), "execution_not_found")
    for state in ("active", "waiting", "delayed", "completed", "waiting_children"):
        case = await Case.make(engine, state)
        answer = await unchanged(engine, lambda case=case: unblock(case.execution_id))
        assert answer.code == "execution_not_eligible"
    for expected in ("waiting_for_quota", "nonsense", "waiting_for_worker"):
        execution_id = await held_back(engine, "waiting_for_budget")
        answer = await unchanged(
            engine,
            lambda expected=expected, execution_id=execution_id: unblock(
                execution_id, expected_blocking_reason=expected
            ),
        )
        assert answer.code == "execution_not_eligible"
    await unblock(execution_id, expected_blocking_reason="waiting_for_budget")


@pytest.mark.parametrize("state", ["retry_waiting", "paused_waiting", "replayed"])
async def test_the_attempt_survives_a_block(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    before = (await engine.vector(case.execution_id)).attempt_state
    await engine.backend.claims.block_execution_for_admission(
        case.execution_id, "waiting_for_budget"
    )
    assert (await engine.vector(case.execution_id)).attempt_state is before
    await engine.backend.claims.unblock_execution(case.execution_id)
    vector = await engine.vector(case.execution_id)
    assert (vector.attempt_state, vector.blocking_reason) == (
        before,
        BlockingReason.WAITING_FOR_WORKER,
    )


@pytest.mark.parametrize("reason", REASONS)
async def test_blocked_work_can_be_cancelled_and_expires(engine: Engine, reason: str) -> None:
    first = await held_back(engine, reason)
    await engine.backend.executions.cancel_execution(first)
    assert await engine.backend.reads.read_execution_state(first) is PublicState.CANCELLED
    second = await held_back(engine, reason, policy=POLICY)
    await engine.advance(DEADLINE)
    assert await expire_deadline(engine, second) == "expired"
    assert (await counts(engine))[REASONS[reason][2]] == 0


async def test_unblocked_work_returns_to_its_old_place(engine: Engine) -> None:
    first = await engine.create()
    await engine.advance(BACKOFF)
    second = await engine.create()
    await engine.backend.claims.block_execution_for_admission(first, "waiting_for_budget")
    await engine.advance(BACKOFF)
    await engine.backend.claims.unblock_execution(first)
    assert [claim.execution_id for claim in await engine.claim_all()] == [first, second]


async def test_only_operator_holds_are_events(engine: Engine) -> None:
    quiet = await held_back(engine, "waiting_for_quota")
    await engine.backend.claims.unblock_execution(quiet)
    assert await engine.events(quiet) == []
    held = await engine.create()
    await engine.backend.claims.block_execution_for_admission(
        held, "paused_by_operator", "until Monday"
    )
    await engine.backend.claims.unblock_execution(held)
    events = await engine.events(held)
    assert [event.type for event in events] == ["operator_blocked", "operator_unblocked"]
    assert [event.get("reason_detail") for event in events] == ["until Monday"] * 2


async def test_batches_answer_per_execution(engine: Engine) -> None:
    admission = engine.backend.admission
    first, second = await engine.create(), await engine.create()
    running = await engine.running(priority=9)
    tag = first.tag
    blocks = [
        Block(execution_id=each, reason="waiting_for_quota")
        for each in (first, running.execution_id, second)
    ]
    outcomes = await admission.block_many(tag, blocks)
    assert [None if each is None else each.code for each in outcomes] == [
        *(None, "execution_not_eligible", None),
    ]
    outcomes = await admission.unblock_many(
        tag, [first, running.execution_id, second], "waiting_for_quota"
    )
    assert [None if each is None else each.code for each in outcomes] == [
        *(None, "execution_not_eligible", None),
    ]
    assert len(await engine.claim_all()) == 2
