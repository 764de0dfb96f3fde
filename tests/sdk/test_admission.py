"""Claims within budgets and quotas, by workers that claim for themselves."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from flowfabric.core.contracts.budgets import BudgetChange
from flowfabric.core.contracts.flows import FlowGraph, GraphEdge, GraphNode, Submitted
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.errors import CorruptionError, TransportError, ValidationError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import budget_partition
from flowfabric.core.policy import ExecutionPolicy
from flowfabric.core.state import PublicState
from flowfabric.engine import metrics
from flowfabric.engine.api.executions import Completion
from flowfabric.scheduler.admission import Admissions
from tests.support.admission import (
    budget,
    claimed,
    limited,
    needing,
    quota,
    settled,
    slots,
    worker,
)
from tests.support.engine import LANE, TTL, Engine, refused
from tests.support.sdk import until


async def blocking(engine: Engine, execution_id: ExecutionId) -> tuple[str, str | None, str | None]:
    found = await engine.backend.reads.describe_execution(execution_id)
    assert found is not None
    return found.public_state.value, found.blocking_reason, found.blocking_detail


async def test_an_execution_names_its_limits(engine: Engine) -> None:
    first, second, policy = new_uuid(), new_uuid(), new_uuid()
    execution_id = await limited(engine, second, first, second, quota=policy)
    fields = await engine.backend.reads.read_exec_core_fields(
        execution_id, ["budget_ids", "quota_policy_id"]
    )
    assert fields == {"budget_ids": f"{second},{first}", "quota_policy_id": policy}


async def test_open_limits_admit(engine: Engine) -> None:
    ids = [
        await limited(engine, await budget(engine)),
        await limited(engine, quota=await quota(engine, rate=5, cap=5)),
        await limited(engine, await budget(engine), await budget(engine), quota=new_uuid()),
        await limited(engine, new_uuid()),
        await engine.create(),
    ]
    assert sorted(await claimed(engine)) == sorted(ids)


async def test_no_claim_hands_out_what_needs_admission(engine: Engine) -> None:
    execution_id = await limited(engine, await budget(engine))
    assert await engine.claim_all() == []
    assert [each.execution_id for each in await needing(engine)] == [execution_id]
    await refused(
        engine.backend.claims.issue_claim_grant(
            execution_id, worker_id="w", worker_instance_id="w-1"
        ),
        "execution_not_eligible",
    )


async def test_a_claim_takes_no_more_than_it_may(engine: Engine) -> None:
    """Candidates and claims together fill the permits, best first."""
    limit = await budget(engine)
    first = [await limited(engine, limit, priority=9) for _ in range(2)]
    plain = [await engine.create() for _ in range(3)]
    want, tag = engine.want(), plain[0].tag
    found = await engine.backend.claims.claim_many(want, tag, 4)
    assert sorted(each.execution_id for each in found.needing) == sorted(first)
    assert len(found.claims) == 2
    assert found.remaining == 1


async def test_candidates_are_named_once(engine: Engine) -> None:
    """A claim that looks further sees those in front again."""
    limit = await budget(engine)
    first = await limited(engine, limit, priority=9)
    for _ in range(2):
        held = await engine.create(priority=5)
        await engine.backend.claims.issue_claim_grant(held, worker_id="x", worker_instance_id="x-1")
    ids = [first, *[await limited(engine, limit) for _ in range(4)]]
    found = [each.execution_id for each in await needing(engine, 3)]
    assert len(found) == len(set(found)) == 3
    assert set(found) <= set(ids)


async def test_an_exhausted_budget_holds_work_back(engine: Engine) -> None:
    spent = await budget(engine, 10, spent=10)
    held = await limited(engine, await budget(engine), spent)
    free = await limited(engine, await budget(engine))
    assert await claimed(engine) == [free]
    detail = f"budget {spent}: tokens 10/10"
    assert await blocking(engine, held) == ("rate_limited", "waiting_for_budget", detail)
    await engine.backend.budgets.reset_budget(spent)
    assert await claimed(engine) == [held]


@pytest.mark.parametrize("how", ["raise", "warn", "delete"])
async def test_whatever_opens_a_budget_lets_work_go_at_once(engine: Engine, how: str) -> None:
    budgets, spent = engine.backend.budgets, await budget(engine, 10, spent=10)
    ids = sorted([await limited(engine, spent) for _ in range(3)])
    assert await claimed(engine) == []
    if how == "raise":
        await budgets.update_budget_limits(spent, BudgetChange(hard_limits={"tokens": 11}))
    elif how == "warn":
        await budgets.update_budget_limits(spent, BudgetChange(enforcement_mode="warn"))
    else:
        await refused(budgets.delete_budget(spent), "budget_attach_conflict")
        await budgets.delete_budget(spent, force=True)
    assert sorted(await claimed(engine)) == ids


async def test_a_full_window_holds_work_back_until_it_moves_on(engine: Engine) -> None:
    policy = await quota(engine, rate=2, window=10)
    ids = [await limited(engine, quota=policy) for _ in range(3)]
    first = await claimed(engine)
    assert len(first) == 2
    (held,) = set(ids) - set(first)
    detail = f"quota {policy}: rate limit (2 per 10 s)"
    assert await blocking(engine, held) == ("rate_limited", "waiting_for_quota", detail)
    snapshot = await engine.backend.reads.describe_execution(held)
    assert snapshot is not None
    assert snapshot.retry_at is not None
    assert 0 < snapshot.retry_at - await engine.now() <= 10_000
    await engine.advance(10_001)
    assert await engine.backend.admission.open_quota(policy) is None
    assert await claimed(engine) == [held]


async def test_a_worker_comes_back_for_all_that_a_full_window_held_back(engine: Engine) -> None:
    policy = await quota(engine, rate=1, window=1)
    ids = [await limited(engine, quota=policy) for _ in range(3)]
    claims, started = worker(engine), list[ExecutionId]()

    async def all_started() -> bool:
        started.extend(claim.execution_id for claim in await claims.claim_many(10))
        return len(started) == len(ids)

    await until(all_started)
    await claims.admissions.aclose()
    assert sorted(started) == sorted(ids)


@pytest.mark.parametrize("how", ["complete", "fail", "cancel", "delay", "suspend"])
async def test_a_slot_follows_the_run(engine: Engine, how: str) -> None:
    policy = await quota(engine, cap=1)
    first = await limited(engine, quota=policy)
    worker_claims = worker(engine)
    (claim,) = await worker_claims.claim_many(5)
    second = await limited(engine, quota=policy)
    assert await claimed(engine) == []
    assert await slots(engine, policy) == 1
    assert (await blocking(engine, second))[0] == "rate_limited"
    await leave(engine, claim, how)
    await settled(engine)
    assert await slots(engine, policy) == 0
    assert (await blocking(engine, second))[0] == "waiting"
    assert second in await claimed(engine, 1) or first in await claimed(engine, 1)


async def leave(engine: Engine, claim: Claim, how: str) -> None:
    executions, handle = engine.backend.executions, claim.handle
    match how:
        case "complete":
            await executions.complete(handle)
        case "fail":
            await executions.fail(handle, "no", "permanent")
        case "cancel":
            await executions.cancel_execution(handle.execution_id)
        case "delay":
            await executions.delay(handle, await engine.now() + 60_000)
        case _:
            await engine.backend.leases.revoke_lease(handle.execution_id)
            await executions.cancel_execution(handle.execution_id)


async def test_stuck_work_in_front_hides_nothing(engine: Engine) -> None:
    spent = await budget(engine, 1, spent=1)
    stuck = [await limited(engine, spent, priority=5) for _ in range(100)]
    plain = await engine.create()
    assert await claimed(engine, 1) == [plain]
    states = {await engine.backend.reads.read_execution_state(each) for each in stuck}
    assert states == {PublicState.RATE_LIMITED}


async def spoil(engine: Engine, budget_id: str) -> None:
    tag = f"{{b:{budget_partition(budget_id, engine.backend.counts)}}}"
    key = f"ff:budget:{tag}:{budget_id}:limits"
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "damaged")


@pytest.mark.corrupts
async def test_an_unreadable_budget_stops_only_its_own_work(engine: Engine) -> None:
    damaged = await budget(engine)
    await spoil(engine, damaged)
    held = [await limited(engine, damaged, priority=5) for _ in range(3)]
    other = await limited(engine, await budget(engine))
    assert await claimed(engine, 1) == [other]
    for each in held:
        state, reason, detail = await blocking(engine, each)
        assert (state, reason) == ("rate_limited", "waiting_for_budget")
        assert detail == f"budget {damaged} cannot be read: corruption"
    # Nothing else is found, so the fault is raised.
    await limited(engine, damaged)
    with pytest.raises(CorruptionError):
        await claimed(engine)


@pytest.mark.corrupts
async def test_an_unreadable_quota_stops_only_its_own_work(engine: Engine) -> None:
    damaged = await quota(engine, rate=1)
    (key,) = await engine.backend.transport.call("KEYS", f"ff:quota:{{q:*}}:{damaged}")
    await engine.backend.transport.call("HSET", key, "max_requests_per_window", "no number")
    held = await limited(engine, quota=damaged, priority=5)
    other = await limited(engine, quota=await quota(engine, rate=1))
    assert await claimed(engine, 1) == [other]
    state, reason, detail = await blocking(engine, held)
    assert (state, reason) == ("rate_limited", "waiting_for_quota")
    assert detail == f"quota policy {damaged} cannot be read: corruption"


async def test_a_reclaim_needs_no_admission(engine: Engine) -> None:
    limit, policy = await budget(engine, 5), await quota(engine, cap=1)
    execution_id = await limited(engine, limit, quota=policy)
    assert await claimed(engine) == [execution_id]
    await engine.backend.budgets.report_usage_admin(limit, {"tokens": 5})
    await engine.advance(TTL)
    await engine.backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
    assert await slots(engine, policy) == 1
    (claim,) = await engine.claim_all(worker="v", instance="v-1")
    assert (claim.execution_id, claim.handle.kind) == (execution_id, "reclaimed")
    await settled(engine)
    assert await slots(engine, policy) == 1
    await engine.backend.executions.complete(claim.handle)
    await settled(engine)
    assert await slots(engine, policy) == 0


@pytest.mark.parametrize("how", ["resume", "retry"])
async def test_resumes_and_retries_pass_admission_again(engine: Engine, how: str) -> None:
    limit = await budget(engine, 5)
    retry = {"retry_policy": {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 1}}}
    execution_id = await limited(engine, limit, policy=retry)
    (claim,) = await worker(engine).claim_many(1)
    if how == "resume":
        await engine.backend.executions.delay(claim.handle, 1)
    else:
        await engine.backend.executions.fail(claim.handle, "no", "transient")
        await engine.advance(5)
        await engine.backend.upkeep.promote_delayed(execution_id.tag, LANE, [execution_id])
    await engine.backend.budgets.report_usage_admin(limit, {"tokens": 5})
    assert await claimed(engine) == []
    assert (await blocking(engine, execution_id))[1] == "waiting_for_budget"
    await engine.backend.budgets.reset_budget(limit)
    (again,) = await worker(engine).claim_many(1)
    assert again.handle.kind == ("resumed" if how == "resume" else "fresh")


async def test_an_operator_takes_work_without_admission(engine: Engine) -> None:
    spent, policy = await budget(engine, 1, spent=1), await quota(engine, cap=1)
    execution_id = await limited(engine, spent, quota=policy)
    claim = await engine.backend.claims.issue_grant_and_claim(execution_id, lease_duration_ms=TTL)
    assert claim.execution_id == execution_id
    # Running work always counts.
    assert await slots(engine, policy) == 1


async def test_a_candidate_that_another_worker_took_keeps_its_admission(engine: Engine) -> None:
    policy = await quota(engine, rate=5, cap=5)
    execution_id = await limited(engine, quota=policy)
    first, second = Admissions(engine.backend), Admissions(engine.backend)
    candidates = await needing(engine)
    one = await first.decide(candidates, slot_ttl_ms=5000)
    two = await second.decide(candidates, slot_ttl_ms=5000)
    assert (len(one.recorded), len(two.recorded)) == (1, 0)
    want, tag = engine.want(worker="v", instance="v-1"), execution_id.tag
    claims = engine.backend.claims.claim_admitted
    assert len(await claims(want, tag, candidates)) == 1
    assert await claims(engine.want(), tag, candidates) == []
    await first.undo(one, [execution_id])
    await second.undo(two, [execution_id])
    status = await engine.backend.quotas.get_quota_status(policy)
    assert (status.window_count, status.slots_held) == (1, 1)


async def test_an_admission_is_undone_when_the_claim_is_refused(engine: Engine) -> None:
    policy = await quota(engine, rate=5, cap=5)
    await limited(engine, quota=policy)
    candidates = await needing(engine)
    await engine.backend.lanes.set_lane_state(LANE, "paused")
    admissions = Admissions(engine.backend)
    outcome = await admissions.claim(
        engine.want(), candidates[0].execution_id.tag, candidates, new_uuid()
    )
    assert outcome.claims == []
    assert admissions.counts.rolled_back == 1
    status = await engine.backend.quotas.get_quota_status(policy)
    assert (status.window_count, status.slots_held) == (0, 0)


@pytest.mark.parametrize("count", [1, 2])
async def test_what_is_admitted_keeps_its_order(engine: Engine, count: int) -> None:
    policies = [None, *[await quota(engine, cap=9) for _ in range(count)]]
    some = [policies[n % len(policies)] for n in range(9, 0, -1)]
    ids = [await limited(engine, await budget(engine), quota=policy) for policy in some]
    candidates = sorted(await needing(engine), key=lambda each: ids.index(each.execution_id))
    decision = await Admissions(engine.backend).decide(candidates, slot_ttl_ms=5000)
    assert [each.execution_id for each in decision.admitted] == ids


async def test_an_admission_is_undone_when_the_claim_fails(engine: Engine) -> None:
    policy = await quota(engine, rate=5, cap=5)
    await limited(engine, quota=policy)
    admissions = Admissions(engine.backend)
    outcome = await admissions.claim(engine.want(), "{fp:999}", await needing(engine), new_uuid())
    assert isinstance(outcome.fault, ValidationError)
    assert (outcome.claims, outcome.unanswered) == ([], False)
    status = await engine.backend.quotas.get_quota_status(policy)
    assert (status.window_count, status.slots_held) == (0, 0)


async def test_an_admission_stays_when_the_claim_may_have_been_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = await quota(engine, rate=5, cap=5)
    execution_id = await limited(engine, quota=policy)
    candidates, fcall = await needing(engine), engine.backend.transport.fcall

    async def losing_the_reply(name: str, *args: Any, **options: Any) -> Any:
        reply = await fcall(name, *args, **options)
        if name == "ff_claim_admitted":
            raise TransportError("transport", "the connection was lost", ambiguous=True)
        return reply

    monkeypatch.setattr(engine.backend.transport, "fcall", losing_the_reply)
    outcome = await Admissions(engine.backend).claim(
        engine.want(), execution_id.tag, candidates, new_uuid()
    )
    assert (outcome.claims, outcome.unanswered) == ([], True)
    status = await engine.backend.quotas.get_quota_status(policy)
    assert (status.window_count, status.slots_held) == (1, 1)


async def test_decisions_are_counted(engine: Engine) -> None:
    meter = metrics.enable()
    spent = await budget(engine, 1, spent=1)
    full = await quota(engine, rate=1)
    capped = await quota(engine, cap=1)
    await limited(engine, spent)
    for _ in range(2):
        await limited(engine, quota=full)
        await limited(engine, quota=capped)
    claims = worker(engine)
    assert len(await claims.claim_many(10)) == 2
    assert claims.admissions.counts.admitted == 2
    assert meter.numbers["ff_budget_hit_total"] == {("tokens",): 1}
    assert meter.numbers["ff_quota_hit_total"] == {("rate",): 1, ("concurrency",): 1}
    assert meter.numbers["ff_admission_faults_total"] == {}
    await claims.admissions.aclose()


@pytest.mark.corrupts
async def test_faults_are_counted(engine: Engine) -> None:
    meter = metrics.enable()
    broken = await budget(engine)
    await spoil(engine, broken)
    await limited(engine, broken)
    claims = worker(engine)
    with contextlib.suppress(CorruptionError):
        await claims.claim_many(10)
    assert meter.numbers["ff_admission_faults_total"] == {("budget",): 1}
    await claims.admissions.aclose()


async def test_a_completing_call_leaves_admission_to_the_scheduler(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    first, second = [await limited(engine, quota=policy) for _ in range(2)]
    claims = worker(engine, 1)
    (claim,) = await claims.claim_many(1)
    assert claim.execution_id in (first, second)
    await engine.backend.executions.complete(claim.handle)
    await settled(engine)
    held = await engine.running(priority=9)
    claims.lanes[LANE].add(held.execution_id.tag)
    outcomes, tasks = await claims.complete(
        LANE, held.execution_id.tag, [Completion(held)], lambda: False
    )
    claims.release()
    assert (outcomes, tasks()) == ([None], [])
    (other,) = await claims.claim_many(1)
    assert {claim.execution_id, other.execution_id} == {first, second}


async def test_a_member_that_needs_admission_is_not_handed_over(engine: Engine) -> None:
    limit = await budget(engine)
    nodes = (
        GraphNode(key="a", execution_kind="job"),
        GraphNode(key="b", execution_kind="job", policy=ExecutionPolicy(budget_ids=(limit,))),
    )
    outcome = await engine.backend.flows.submit_flow(
        FlowGraph(
            flow_id=new_uuid(), flow_kind="t", nodes=nodes, edges=(GraphEdge(frm="a", to="b"),)
        )
    )
    assert isinstance(outcome, Submitted)
    tag = outcome.nodes["a"].tag
    found = await engine.backend.claims.claim_many(engine.want(), tag, 1)
    _, after = await engine.backend.claims.complete_and_claim(
        tag, [Completion(found.claims[0].handle)], engine.want(), 1
    )
    assert after.claims == []
    assert [each.execution_id for each in after.needing] == [outcome.nodes["b"]]


async def test_priority_decides_who_is_let_go_first(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    (claim,) = await _taken(engine, policy)
    low = [await limited(engine, quota=policy, priority=n) for n in (1, 5, 3)]
    assert await claimed(engine) == []
    await engine.backend.executions.complete(claim.handle)
    await settled(engine)
    assert (await blocking(engine, low[1]))[0] == "waiting"
    assert [(await blocking(engine, low[n]))[0] for n in (0, 2)] == ["rate_limited"] * 2


async def _taken(engine: Engine, policy: str) -> list[Claim]:
    await limited(engine, quota=policy)
    return await worker(engine).claim_many(1)


@pytest.mark.parametrize("plain", [0, 1])
async def test_a_cancelled_claim_of_admitted_work_is_repeated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, plain: int
) -> None:
    """Its leases lie idle otherwise. What the same claim took without admission is not lost."""
    policy = await quota(engine, cap=1)
    ids = [await limited(engine, quota=policy), *[await engine.create() for _ in range(plain)]]
    claim, made = engine.backend.claims.claim_admitted, asyncio.Event()

    async def never_answered(*args: Any, **options: Any) -> None:
        await claim(*args, **options)
        made.set()
        await asyncio.Event().wait()

    claims = worker(engine, 5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.claims, "claim_admitted", never_answered)
        claiming = asyncio.create_task(claims.claim_many(5))
        await made.wait()
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
    assert claims.free == 5
    found = [*await claims.claim_many(5), *await claims.claim_many(5)]
    assert {(each.execution_id, each.handle.lease_epoch) for each in found} == {
        (each, 1) for each in ids
    }
    await claims.admissions.aclose()


async def test_an_unanswered_claim_of_admitted_work_is_repeated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    claim = engine.backend.claims.claim_admitted

    async def unanswered(*args: Any, **options: Any) -> None:
        await claim(*args, **options)
        raise TransportError("timeout", "no reply", ambiguous=True)

    claims = worker(engine, 5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend.claims, "claim_admitted", unanswered)
        (found,) = await claims.claim_many(5)
    assert (found.execution_id, found.handle.lease_epoch) == (execution_id, 1)
    await claims.admissions.aclose()
