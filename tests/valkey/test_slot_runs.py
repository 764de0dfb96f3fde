"""A slot belongs to one run: what arrives late about an earlier run does not touch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Candidate, Claim, ClaimGrant
from flowfabric.core.contracts.quotas import Admitted
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import quota_partition
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.claims import claim_args, read_claims
from flowfabric.engine.valkey.returns import Returns
from flowfabric.scheduler.admission import Admissions
from flowfabric.scheduler.grants import WorkerGrants
from tests.support import lua_keys
from tests.support.admission import claimed, limited, needing, quota, settled, slots, worker
from tests.support.engine import LANE, TTL, Engine
from tests.support.flows import without_followups
from tests.support.quotas import used
from tests.support.scanning import idle

OTHER = "other"


def tag_of(engine: Engine, policy: str) -> str:
    return f"{{q:{quota_partition(policy, engine.backend.counts)}}}"


async def running(engine: Engine, policy: str) -> Claim:
    await limited(engine, quota=policy)
    (claim,) = await worker(engine).claim_many(1)
    return claim


async def claimed_only(engine: Engine, candidates: Sequence[Candidate]) -> Claim:
    """The claim of admitted work by a process that ends before it confirms the slot."""
    tag = candidates[0].execution_id.tag
    given = [part for each in candidates for part in (each.execution_id, each.run)]
    args = (*claim_args(engine.want(), 1, new_uuid()), *given)
    reply = await engine.backend.calls.fcall("ff_claim_admitted", tag, args, op="test")
    (claim,) = read_claims(engine.want(), reply[2])
    return claim


async def test_a_return_between_admission_and_claim(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await running(engine, policy)
    other = await limited(engine, quota=policy, lane=OTHER)
    await engine.backend.executions.delay(claim.handle, 1)
    admissions = Admissions(engine.backend)
    decision = await admissions.decide(candidates := await needing(engine), slot_ttl_ms=5000)
    assert len(decision.admitted) == 1
    await engine.backend.admission.deliver_returns(claim.execution_id.tag)
    assert await claimed(engine, lane=OTHER) == []
    again = await engine.backend.claims.claim_admitted(
        engine.want(), claim.execution_id.tag, candidates
    )
    assert [each.execution_id for each in again] == [claim.execution_id]
    assert await slots(engine, policy) == 1
    await engine.backend.executions.complete(again[0].handle)
    await idle(engine).scan_once("unblock")
    assert await claimed(engine, lane=OTHER) == [other]


async def test_a_deliverer_that_dies_before_it_removes_the_entry(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await running(engine, policy)
    await engine.backend.executions.delay(claim.handle, 1)

    class Dying:
        async def release_many(
            self, policy: str, ids: Sequence[ExecutionId], *, runs: Sequence[int]
        ) -> None:
            assert await claimed(engine) == [claim.execution_id]
            await engine.backend.quotas.release_many(policy, ids, runs=runs)
            raise InterruptedError

    quotas: Any = Dying()
    with pytest.raises(InterruptedError):
        await Returns(engine.backend.calls, engine.backend.budgets, quotas).deliver(
            claim.execution_id.tag
        )
    await limited(engine, quota=policy, lane=OTHER)
    assert await claimed(engine, lane=OTHER) == []
    assert await slots(engine, policy) == 1


async def test_a_grant_that_was_cancelled_and_replayed(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    grant = await WorkerGrants(engine.backend).claim_for_worker(LANE, "w", "w-1")
    assert isinstance(grant, ClaimGrant)
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.backend.executions.replay_execution(execution_id)
    admitted = await Admissions(engine.backend).decide(
        candidates := await needing(engine), slot_ttl_ms=5000
    )
    assert len(admitted.admitted) == 1
    # The slot of the unused grant is given back now.
    await engine.backend.admission.deliver_returns(execution_id.tag)
    assert await slots(engine, policy) == 1
    await claimed_only(engine, candidates)
    await limited(engine, quota=policy, lane=OTHER)
    assert await claimed(engine, lane=OTHER) == []


async def test_an_admission_serves_only_its_own_run(engine: Engine) -> None:
    """A scheduler that was slow must not start a run with the slot of the run before."""
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    await limited(engine, quota=policy)
    stale = await needing(engine)
    (claim,) = await worker(engine).claim_many(1)
    await engine.backend.executions.delay(claim.handle, 1)
    late = await Admissions(engine.backend).decide(stale, slot_ttl_ms=5000)
    assert len(late.admitted) == 1
    claims, tag = engine.backend.claims, claim.execution_id.tag
    assert await claims.claim_admitted(engine.want(), tag, stale) == []
    await engine.backend.admission.deliver_returns(tag)
    assert await slots(engine, policy) == 0


async def test_a_late_confirm_leaves_the_admission_of_the_next_run(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1, window=1)
    claim = await running(engine, policy)
    await engine.backend.executions.delay(claim.handle, 1)
    await engine.advance(2000)
    await Admissions(engine.backend).decide(await needing(engine), slot_ttl_ms=60_000)
    # The window is over, the slot is not: it still knows its run.
    await engine.advance(2000)
    other = engine.new_id()
    await engine.backend.quotas.admit_many(policy, [other], runs=[1])
    quotas = engine.backend.quotas
    await quotas.confirm_many(policy, [claim.execution_id], runs=[claim.run])
    await quotas.release_many(policy, [claim.execution_id], runs=[claim.run])
    assert await slots(engine, policy) == 1
    await quotas.release_many(policy, [claim.execution_id], runs=[claim.run + 1])
    assert await slots(engine, policy) == 0


async def test_a_guard_without_a_window_entry_ends_with_its_slot(engine: Engine) -> None:
    policy = await quota(engine, cap=5, window=1)
    first, second = engine.new_id(), engine.new_id()
    quotas = engine.backend.quotas
    await quotas.admit_many(policy, [first], slot_ttl_ms=10_000)
    await engine.advance(2000)
    await quotas.admit_many(policy, [second])
    await engine.advance(20_000)
    await idle(engine).scan_once("quota_reconciler")
    found = await engine.backend.transport.call("KEYS", f"*{policy}*")
    assert found == [keys.quota(tag_of(engine, policy), policy).encode()]


# --- rollback -------------------------------------------------------------------------------------


async def test_a_rollback_keeps_a_start_that_happened(engine: Engine) -> None:
    policy = await quota(engine, rate=2)
    claim = await running(engine, policy)
    await engine.backend.executions.delay(claim.handle, 1)
    await settled(engine)
    started = (await engine.backend.quotas.get_quota_status(policy)).oldest_entry_at
    await engine.advance(1000)
    admissions = Admissions(engine.backend)
    decision = await admissions.decide(await needing(engine), slot_ttl_ms=5000)
    await admissions.undo(decision, [claim.execution_id])
    status = await engine.backend.quotas.get_quota_status(policy)
    assert (status.window_count, status.oldest_entry_at) == (1, started)
    for _ in range(2):
        await limited(engine, quota=policy, lane=OTHER)
    assert len(await claimed(engine, lane=OTHER)) == 1
    # Its next try is a new start, which needs a place in the window.
    assert await claimed(engine) == []


async def test_a_rollback_restores_no_start_that_left_the_window(engine: Engine) -> None:
    policy = await quota(engine, rate=2)
    claim = await running(engine, policy)
    await engine.backend.executions.delay(claim.handle, 1)
    await settled(engine)
    admissions = Admissions(engine.backend)
    await engine.advance(59_000)
    decision = await admissions.decide(await needing(engine), slot_ttl_ms=5000)
    assert len(decision.recorded) == 1
    await engine.advance(2000)
    await admissions.undo(decision, [claim.execution_id])
    window = lua_keys.quota_window(tag_of(engine, policy), policy)
    assert await engine.backend.transport.call("ZCARD", window) == 0


async def test_a_late_return_leaves_the_next_admission_to_its_rollback(engine: Engine) -> None:
    policy = await quota(engine, rate=5, cap=1)
    execution_id, quotas = engine.new_id(), engine.backend.quotas
    (answer,) = await quotas.admit_many(policy, [execution_id], runs=[2])
    assert isinstance(answer, Admitted)
    await quotas.release_many(policy, [execution_id], runs=[1])
    assert await used(engine, policy) == (1, 1)
    await quotas.release_many(policy, [execution_id], rollback=answer.request_id)
    assert await used(engine, policy) == (0, 0)


async def test_a_rollback_leaves_what_an_earlier_request_recorded(engine: Engine) -> None:
    """The first admission may have been followed by a start whose confirm was lost."""
    policy = await quota(engine, rate=2, cap=1)
    execution_id, quotas = engine.new_id(), engine.backend.quotas
    await quotas.admit_many(policy, [execution_id], runs=[1])
    await engine.advance(6000)
    (again,) = await quotas.admit_many(policy, [execution_id], runs=[1])
    assert isinstance(again, Admitted)
    await quotas.release_many(policy, [execution_id], rollback=again.request_id)
    assert await used(engine, policy) == (1, 0)


async def test_the_next_run_counts_whether_or_not_the_last_was_given_back(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, rate=2, cap=5)
    claim = await running(engine, policy)
    await engine.advance(20_000)
    await engine.backend.executions.delay(claim.handle, 1)
    assert await claimed(engine) == [claim.execution_id]
    # The first start leaves the window, the second one does not.
    await engine.advance(45_000)
    for _ in range(2):
        await limited(engine, quota=policy, lane=OTHER)
    assert len(await claimed(engine, lane=OTHER)) == 1


# --- renewals -------------------------------------------------------------------------------------


async def test_a_renewal_confirms_the_slot(engine: Engine) -> None:
    """The process that claimed it died before it could."""
    policy = await quota(engine, cap=1)
    await limited(engine, quota=policy)
    candidates = await needing(engine)
    await Admissions(engine.backend).decide(candidates, slot_ttl_ms=5000)
    claim = await claimed_only(engine, candidates)
    await engine.advance(6000)
    assert await slots(engine, policy) == 0
    await engine.backend.leases.renew_many([claim.handle])
    await settled(engine)
    assert await slots(engine, policy) == 1
    await engine.backend.quotas.release_admission(policy, claim.execution_id)
    await engine.backend.leases.renew_lease(claim.execution_id, claim.handle, TTL)
    await settled(engine)
    assert await slots(engine, policy) == 1


async def test_a_replayed_run_keeps_its_slot_when_it_is_renewed(engine: Engine) -> None:
    policy = await quota(engine, cap=1)
    claim = await running(engine, policy)
    await engine.backend.executions.complete(claim.handle)
    await engine.backend.executions.replay_execution(claim.execution_id)
    (again,) = await worker(engine).claim_many(1)
    assert again.run == claim.run + 2
    await engine.backend.leases.renew_many([again.handle])
    await settled(engine)
    await engine.backend.executions.complete(again.handle)
    await settled(engine)
    assert await slots(engine, policy) == 0


async def test_a_cap_that_is_set_later_counts_what_runs(engine: Engine) -> None:
    policy = await quota(engine, rate=100)
    claim = await running(engine, policy)
    await engine.backend.quotas.update_quota_policy(policy, max_concurrent=1)
    await engine.backend.leases.renew_many([claim.handle])
    await settled(engine)
    await limited(engine, quota=policy)
    assert await claimed(engine) == []


@pytest.mark.corrupts
async def test_a_quota_that_fails_loses_no_claim_and_no_renewal(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    policy = await quota(engine, cap=1)
    key = keys.quota_slots(tag_of(engine, policy), policy)
    await limited(engine, quota=policy)
    candidates = await needing(engine)
    await engine.backend.transport.call("SET", key, "x")
    tag = candidates[0].execution_id.tag
    (claim,) = await engine.backend.claims.claim_admitted(engine.want(), tag, candidates)
    (renewed,) = await engine.backend.leases.renew_many([claim.handle])
    await settled(engine)
    failures = [r for r in caplog.records if getattr(r, "action", "") == "confirm_failed"]
    assert (len(failures), renewed.lease_epoch) == (2, 1)  # pyright: ignore[reportAttributeAccessIssue]
    await engine.backend.transport.call("DEL", key)
    await engine.backend.leases.renew_many([claim.handle])
    await settled(engine)
    assert await slots(engine, policy) == 1


async def test_a_reclaim_gives_no_slot_back(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    claim = await running(engine, policy)
    tag = claim.execution_id.tag
    await engine.backend.leases.revoke_lease(claim.execution_id)
    # The next owner has not confirmed it yet.
    args = claim_args(engine.want(worker="v", instance="v-1"), 1, new_uuid())
    reply = await engine.backend.calls.fcall("ff_claim_many", tag, args, op="test")
    assert len(reply[2]) == 1
    await engine.backend.admission.deliver_returns(tag)
    assert await slots(engine, policy) == 1


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_a_reclaimed_run_takes_over_the_slot(engine: Engine, how: str) -> None:
    policy = await quota(engine, cap=1)
    claim = await running(engine, policy)
    if how == "revoked":
        await engine.backend.leases.revoke_lease(claim.execution_id)
    else:
        await engine.advance(TTL)
        await engine.backend.upkeep.mark_lease_expired_if_due(
            claim.execution_id.tag, [claim.execution_id]
        )
    (again,) = await worker(engine, worker="v", instance="v-1").claim_many(1)
    assert (again.handle.kind, again.run) == ("reclaimed", claim.run + 1)
    await engine.backend.quotas.release_many(policy, [claim.execution_id], runs=[claim.run])
    assert await slots(engine, policy) == 1
    await engine.backend.executions.complete(again.handle)
    await settled(engine)
    assert await slots(engine, policy) == 0
