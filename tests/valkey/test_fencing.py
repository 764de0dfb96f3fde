"""The fencing matrix: every worker verb in every situation that ends a lease (02 §2, 03 §9).

A call by somebody whose lease is not current is refused with the right code and changes no byte of
the keyspace. The one side effect allowed is that verbs which mark expiry mark it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from flowfabric.core.contracts.leases import Handle
from tests.conformance.test_fencing import (
    POLICY,
    VERBS,
    completed,
    lapsed_and_marked,
    lapsed_unmarked,
    reclaimed_by_another,
    refusal_of,
    revoked,
)
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import event_types, mark, reclaim, running
from tests.support.storage import indexes

NEVER_MARK = {"cancel", "progress", "create_waitpoint", "record_step", "append_frame"}
MARKS_EXPIRY = set(VERBS) - NEVER_MARK


async def reclaimed_by_the_same_worker(engine: Engine) -> Handle:
    handle = await lapsed_and_marked(engine)
    assert (await engine.claim()).handle.worker_instance_id == handle.worker_instance_id
    return handle


async def reclaimed_and_lapsed_again(engine: Engine) -> Handle:
    handle = await reclaimed_by_another(engine)
    await engine.advance(TTL + 1)
    return handle


async def resumed_by_the_same_worker(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.delay(handle, 1)
    assert (await engine.claim()).handle.attempt_id == handle.attempt_id
    return handle


async def resumed_and_completed(engine: Engine) -> Handle:
    handle = await resumed_by_the_same_worker(engine)
    await engine.backend.executions.complete_execution(
        handle.execution_id, source="operator_override"
    )
    return handle


async def revoked_and_reclaimed(engine: Engine) -> Handle:
    handle = await revoked(engine)
    await reclaim(engine, handle.execution_id)
    return handle


async def cancelled_by_operator(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.cancel_execution(handle.execution_id, "stop")
    return handle


async def failed_and_reclaimed(engine: Engine) -> Handle:
    handle = await failed_with_retry(engine)
    execution_id = handle.execution_id
    await engine.advance(6)
    await engine.backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    assert (await engine.claim()).attempt_index == 1
    return handle


async def failed_with_retry(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.fail(handle, "boom", "transient")
    return handle


async def failed_for_good(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.fail(handle, "boom", "permanent")
    return handle


async def given_back(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.delay(handle, await engine.now() + 60_000)
    return handle


async def given_back_and_cancelled(engine: Engine) -> Handle:
    handle = await given_back(engine)
    await engine.backend.executions.cancel_execution(handle.execution_id)
    return handle


async def given_back_cancelled_and_replayed(engine: Engine) -> Handle:
    handle = await given_back_and_cancelled(engine)
    await engine.backend.executions.replay_execution(handle.execution_id)
    return handle


async def waiting_for_children(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.block(handle.execution_id)
    assert (await engine.backend.executions.wait_children(handle)).kind == "moved"
    return handle


async def capped(engine: Engine) -> Handle:
    handle = await running(engine, policy={"max_reclaim_count": 0})
    await engine.backend.leases.revoke_lease(handle.execution_id)
    assert await engine.claim_all() == []
    return handle


async def replayed(engine: Engine) -> Handle:
    handle = await completed(engine)
    await engine.backend.executions.replay_execution(handle.execution_id)
    return handle


async def replayed_and_claimed(engine: Engine) -> Handle:
    handle = await replayed(engine)
    await engine.claim()
    return handle


async def trimmed(engine: Engine) -> Handle:
    handle = await completed(engine)
    await engine.advance(86_400_001)
    verdicts = await engine.backend.upkeep.trim_retention(
        handle.execution_id.tag, "default", [handle.execution_id]
    )
    assert verdicts == ["purged"]
    return handle


Situation = Callable[[Engine], Awaitable[Handle]]
COMPLETES = {"complete", "complete_many", "complete_and_claim"}
FAILS = {"fail", "fail_and_claim"}

# Situation, the code every verb is refused with, and the verbs that get their first answer again
# because the situation is what they themselves brought about (02 §15).
MATRIX: list[tuple[Situation, str, set[str]]] = [
    (lapsed_unmarked, "lease_expired", set()),
    (lapsed_and_marked, "lease_expired", set()),
    (reclaimed_by_another, "stale_lease", set()),
    (reclaimed_by_the_same_worker, "stale_lease", set()),
    (reclaimed_and_lapsed_again, "lease_expired", set()),
    (resumed_by_the_same_worker, "stale_lease", set()),
    (resumed_and_completed, "execution_not_active", set()),
    (revoked, "lease_revoked", set()),
    (revoked_and_reclaimed, "stale_lease", set()),
    (cancelled_by_operator, "execution_not_active", {"cancel"}),
    (completed, "execution_not_active", COMPLETES),
    (failed_with_retry, "execution_not_active", FAILS),
    (failed_and_reclaimed, "stale_lease", FAILS),
    (failed_for_good, "execution_not_active", FAILS),
    (given_back, "execution_not_active", {"delay"}),
    (given_back_and_cancelled, "execution_not_active", {"delay", "cancel"}),
    (given_back_cancelled_and_replayed, "execution_not_active", {"delay", "cancel"}),
    (waiting_for_children, "execution_not_active", {"wait_children"}),
    (capped, "execution_not_active", set()),
    (replayed, "execution_not_active", COMPLETES),
    (replayed_and_claimed, "stale_lease", COMPLETES),
    (trimmed, "execution_not_found", set()),
]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("situation", "code", "repeats"), MATRIX, ids=[row[0].__name__ for row in MATRIX]
)
async def test_matrix(
    engine: Engine, situation: Situation, code: str, repeats: set[str], verb: str
) -> None:
    handle = await situation(engine)
    call, code = VERBS[verb], refusal_of(verb, code)
    unmarked = situation in (lapsed_unmarked, reclaimed_and_lapsed_again)
    if unmarked and verb in MARKS_EXPIRY:
        await refused(call(engine.backend, handle), code)
        assert (await engine.vector(handle.execution_id)).code == "axnwni"
        assert (await event_types(engine, handle.execution_id))[-1] == "expired"
        # Marked once; from now on nothing changes.
        async with untouched(engine):
            await refused(call(engine.backend, handle), code)
        return
    async with untouched(engine):
        if verb in repeats:
            await call(engine.backend, handle)
        else:
            await refused(call(engine.backend, handle), code)


async def test_marking_by_a_refused_call_is_the_scanners_marking(engine: Engine) -> None:
    """Same record, same indexes, same event as the scanner's."""
    by_call, by_scanner = await running(engine), await running(engine)
    await engine.advance(TTL + 1)
    await refused(engine.backend.executions.complete(by_call), "lease_expired")
    await mark(engine, [by_scanner.execution_id])
    assert set(await indexes(engine, by_call.execution_id)) == set(
        await indexes(engine, by_scanner.execution_id)
    )
    assert await event_types(engine, by_call.execution_id) == ["acquired", "expired"]
