"""A process that dies between admission, claim, confirmation and return leaks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Claim
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import quota_partition
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.returns import Returns
from flowfabric.scheduler.admission import Admissions
from tests.support.admission import (
    budget,
    claimed,
    limited,
    needing,
    quota,
    slots,
    worker,
)
from tests.support.engine import TTL, Engine
from tests.support.flows import without_followups
from tests.support.scanning import idle


async def owed(engine: Engine, tag: str) -> int:
    count: Any = await engine.backend.transport.call("ZCARD", keys.index(tag, "returns"))
    return count


async def one_running(engine: Engine, policy: str) -> Claim:
    await limited(engine, quota=policy)
    (claim,) = await worker(engine).claim_many(1)
    return claim


async def test_between_admission_and_claim(engine: Engine) -> None:
    policy = await quota(engine, rate=5, cap=1)
    execution_id = await limited(engine, quota=policy)
    candidates = await needing(engine)
    await Admissions(engine.backend).decide(candidates, slot_ttl_ms=5000)
    assert await slots(engine, policy) == 1
    # The next try of the same execution reuses the admission.
    assert await claimed(engine) == [execution_id]
    status = await engine.backend.quotas.get_quota_status(policy)
    assert (status.window_count, status.slots_held) == (1, 1)


async def test_an_admission_without_a_claim_ends_by_itself(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    await limited(engine, quota=policy)
    await Admissions(engine.backend).decide(await needing(engine), slot_ttl_ms=5000)
    await engine.advance(6000)
    assert await slots(engine, policy) == 0


@pytest.mark.corrupts
async def test_what_cannot_be_given_back_stays_owed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.valkey.returns._PAGE", 1)
    policy = await quota(engine, cap=1)
    claim, tag = await one_running(engine, policy), engine.new_id().tag
    place = f"{{q:{quota_partition(policy, engine.backend.counts)}}}"
    limit = (keys.quota(place, policy), "active_concurrency_cap")
    await engine.backend.transport.call("HSET", *limit, "no number")
    await engine.backend.executions.complete(claim.handle)
    await engine.backend.drains.finish()
    # More than a page may wait, and yet nobody tries again at once.
    assert await engine.backend.admission.deliver_returns(tag) == 0
    assert await owed(engine, tag) == 1
    await engine.backend.transport.call("HSET", *limit, "1")
    await engine.backend.admission.deliver_returns(tag)
    assert (await owed(engine, tag), await slots(engine, policy)) == (0, 0)


async def test_what_is_owed_is_announced_by_the_call_that_owes_it(engine: Engine) -> None:
    announced: list[Sequence[str]] = []
    claim = await one_running(engine, await quota(engine, cap=1))
    engine.backend.calls.on_returns = announced.append
    await engine.backend.executions.complete(claim.handle)
    await engine.create()
    assert announced == [[claim.execution_id.tag]]


async def test_between_claim_and_confirmation(engine: Engine) -> None:
    """The slot of a run whose confirmation was lost is confirmed by the reconciler."""
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    admissions = Admissions(engine.backend)
    decision = await admissions.decide(await needing(engine), slot_ttl_ms=5000)
    assert len(decision.admitted) == 1
    args = ("default", "w w-1", "", TTL, 1, new_uuid()[:32], new_uuid()[:32], execution_id, 1)
    await engine.backend.calls.fcall("ff_claim_admitted", execution_id.tag, args, op="test")
    partition = quota_partition(policy, engine.backend.counts)
    await engine.backend.quotas.reconcile_quota_counters(partition)
    await engine.advance(6000)
    assert await slots(engine, policy) == 1


async def test_between_the_end_of_a_run_and_its_return(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await one_running(engine, policy)
    tag = claim.execution_id.tag
    await engine.backend.executions.complete(claim.handle)
    assert (await slots(engine, policy), await owed(engine, tag)) == (1, 1)
    await idle(engine).scan_once("unblock")
    assert (await slots(engine, policy), await owed(engine, tag)) == (0, 0)


async def test_a_return_that_was_not_delivered_serves_the_next_run(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await one_running(engine, policy)
    await engine.backend.executions.delay(claim.handle, 1)
    assert await owed(engine, claim.execution_id.tag) == 1
    assert await claimed(engine) == [claim.execution_id]
    await engine.backend.admission.deliver_returns(claim.execution_id.tag)
    assert await owed(engine, claim.execution_id.tag) == 0
    assert await slots(engine, policy) == 1


class Interrupted:
    """Quotas whose release happens late: what `meanwhile` does comes before it."""

    def __init__(self, engine: Engine, meanwhile: Any) -> None:
        self._quotas = engine.backend.quotas
        self._meanwhile = meanwhile

    async def release_many(
        self, policy: str, ids: Sequence[ExecutionId], *, runs: Sequence[int]
    ) -> None:
        await self._meanwhile()
        await self._quotas.release_many(policy, ids, runs=runs)


async def test_a_late_return_does_not_take_the_slot_of_a_new_run(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await one_running(engine, policy)
    await engine.backend.executions.delay(claim.handle, 1)

    async def claim_again() -> None:
        assert await claimed(engine) == [claim.execution_id]

    late: Any = Interrupted(engine, claim_again)
    await Returns(engine.backend.calls, engine.backend.budgets, late).deliver(
        claim.execution_id.tag
    )
    await engine.advance(10_000)
    assert await slots(engine, policy) == 1


async def test_between_a_return_and_its_removal(engine: Engine) -> None:
    """A second delivery changes nothing."""
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await one_running(engine, policy)
    await engine.backend.executions.complete(claim.handle)
    await engine.backend.quotas.release_many(policy, [claim.execution_id])
    other = await limited(engine, quota=policy)
    assert await claimed(engine) == [other]
    await engine.backend.admission.deliver_returns(claim.execution_id.tag)
    assert await slots(engine, policy) == 1


async def test_what_a_lease_held_of_a_budget_comes_back_with_its_end(engine: Engine) -> None:
    await without_followups(engine)
    budget_id = await budget(engine, 100)
    budgets = engine.backend.budgets
    for leave in ("complete", "revoke", "reclaim"):
        handle = await engine.running()
        await budgets.reserve(handle, budget_id, {"tokens": 60}, new_uuid())
        assert (await budgets.get_budget_status(budget_id)).reserved == {"tokens": 60}
        if leave == "complete":
            await engine.backend.executions.complete(handle)
        elif leave == "revoke":
            await engine.backend.leases.revoke_lease(handle.execution_id)
        else:
            await engine.advance(TTL)
            await engine.backend.upkeep.mark_lease_expired_if_due(
                handle.execution_id.tag, [handle.execution_id]
            )
            again = await engine.claim(worker="v", instance="v-1")
            assert again.handle.kind == "reclaimed"
        assert await owed(engine, handle.execution_id.tag) == 1, leave
        await engine.backend.admission.deliver_returns(handle.execution_id.tag)
        assert not any((await budgets.get_budget_status(budget_id)).reserved.values()), leave
        if leave != "complete":
            await engine.backend.executions.cancel_execution(handle.execution_id)


async def test_an_old_return_leaves_the_holds_of_a_new_lease(engine: Engine) -> None:
    await without_followups(engine)
    budget_id = await budget(engine, 100)
    budgets = engine.backend.budgets
    first = await engine.running()
    await budgets.reserve(first, budget_id, {"tokens": 10}, new_uuid())
    await engine.backend.executions.delay(first, 1)
    again = await engine.claim()
    await budgets.reserve(again.handle, budget_id, {"tokens": 25}, new_uuid())
    await engine.backend.admission.deliver_returns(first.execution_id.tag)
    assert (await budgets.get_budget_status(budget_id)).reserved == {"tokens": 25}


async def test_what_was_held_is_given_back_once(engine: Engine) -> None:
    await without_followups(engine)
    budget_id = await budget(engine, 100)
    first = await engine.running()
    await engine.backend.budgets.reserve(first, budget_id, {"tokens": 10}, new_uuid())
    await engine.backend.executions.delay(first, 1)
    await engine.backend.admission.deliver_returns(first.execution_id.tag)
    again = await engine.claim()
    await engine.backend.executions.complete(again.handle)
    assert await owed(engine, first.execution_id.tag) == 0


async def test_a_malformed_entry_hides_no_others(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await one_running(engine, policy)
    key = keys.index(claim.execution_id.tag, "returns")
    for entry in (b"x", b"q|x|y", b"b|", b"\xff\xfe", f"b|{policy}|x|{claim.execution_id}"):
        await engine.backend.transport.call("ZADD", key, 0, entry)
    await engine.backend.executions.complete(claim.handle)
    await engine.backend.admission.deliver_returns(claim.execution_id.tag)
    assert await owed(engine, claim.execution_id.tag) == 0
    assert await slots(engine, policy) == 0


async def test_very_many_returns_are_delivered(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=600)
    for _ in range(600):
        await limited(engine, quota=policy)
    claims = await worker(engine, 600).claim_many(600)
    while len(claims) < 600:
        claims += await worker(engine, 600).claim_many(600)
    await engine.backend.executions.complete_many([Completion(each.handle) for each in claims])
    assert await owed(engine, claims[0].execution_id.tag) == 600
    await idle(engine).scan_once("unblock")
    assert await owed(engine, claims[0].execution_id.tag) == 0
    assert await slots(engine, policy) == 0
