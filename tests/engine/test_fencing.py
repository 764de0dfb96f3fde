"""The fencing matrix: every worker verb in every situation that ends a lease (02 §2, 03 §9).

A call by somebody whose lease is not current is refused with the right code and changes no byte of
the keyspace. The one side effect allowed is that verbs which mark expiry mark it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion, Holder
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.engine.probes import event_types, mark, placed, reclaim, refused, running, untouched
from tests.support.engine import TTL, Engine

POLICY = {
    "retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 5}},
    "timeout_policy": {"attempt_timeout_ms": 10_000_000},
}


async def _only(outcomes: Awaitable[Sequence[object]]) -> object:
    """The one answer of a batch call, raised when it is a refusal."""
    (outcome,) = await outcomes
    if isinstance(outcome, EngineError):
        raise outcome
    return outcome


async def _completed_and_claimed(backend: ValkeyBackend, handle: Handle) -> Sequence[object]:
    elsewhere = ClaimRequest.of("elsewhere", "w", "w-1")
    items = [Completion(handle, b"zombie")]
    outcomes, claimed = await backend.claims.complete_and_claim(
        handle.execution_id.tag, items, elsewhere, 1
    )
    assert not claimed.claims
    return outcomes


Verb = Callable[[ValkeyBackend, Handle], Awaitable[object]]

VERBS: dict[str, Verb] = {
    "complete": lambda b, h: b.executions.complete(h, b"zombie"),
    "complete_many": lambda b, h: _only(b.executions.complete_many([Completion(h, b"zombie")])),
    "fail": lambda b, h: b.executions.fail(h, "zombie", "transient"),
    "cancel": lambda b, h: b.executions.cancel(h, "zombie"),
    "delay": lambda b, h: b.executions.delay(h, 2**50),
    "wait_children": lambda b, h: b.executions.wait_children(h),
    "progress": lambda b, h: b.executions.progress(h, 99, "zombie"),
    "renew": lambda b, h: b.leases.renew(h),
    "renew_many": lambda b, h: _only(b.leases.renew_many([h])),
    "complete_and_claim": lambda b, h: _only(_completed_and_claimed(b, h)),
    "suspend": lambda b, h: b.suspensions.suspend(h, condition=Single("go")),
    "create_waitpoint": lambda b, h: b.waitpoints.create_waitpoint(h, "go", 1000),
    "append_frame": lambda b, h: b.streams.append_frame(h, Frame(payload=b"zombie")),
}
MARKS_EXPIRY = set(VERBS) - {"cancel", "progress", "create_waitpoint", "append_frame"}
# An append has words of its own for a lost lease, and for an attempt that ended (06).
APPEND_CODES = {
    "stale_lease": "stale_owner_cannot_append",
    "lease_expired": "stale_owner_cannot_append",
    "lease_revoked": "stale_owner_cannot_append",
    "execution_not_active": "stream_closed",
    "execution_not_found": "stream_closed",
}


def refusal_of(verb: str, code: str) -> str:
    return APPEND_CODES[code] if verb == "append_frame" else code


# --- situations ---------------------------------------------------------------------------


async def lapsed_unmarked(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.advance(TTL + 1)
    return handle


async def lapsed_and_marked(engine: Engine) -> Handle:
    handle = await lapsed_unmarked(engine)
    await mark(engine, [handle.execution_id])
    return handle


async def reclaimed_by_another(engine: Engine) -> Handle:
    handle = await lapsed_and_marked(engine)
    await reclaim(engine, handle.execution_id)
    return handle


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


async def revoked(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    return handle


async def revoked_and_reclaimed(engine: Engine) -> Handle:
    handle = await revoked(engine)
    await reclaim(engine, handle.execution_id)
    return handle


async def cancelled_by_operator(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.cancel_execution(handle.execution_id, "stop")
    return handle


async def completed(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.complete(handle, b"done")
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
    execution_id = handle.execution_id
    edges = keys.unresolved(execution_id.tag, execution_id)
    await engine.backend.transport.call("SADD", edges, "an-edge")
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
    (failed_with_retry, "execution_not_active", {"fail"}),
    (failed_and_reclaimed, "stale_lease", {"fail"}),
    (failed_for_good, "execution_not_active", {"fail"}),
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
        await refused(code, call(engine.backend, handle))
        assert (await engine.vector(handle.execution_id)).code == "axnwni"
        assert (await event_types(engine, handle.execution_id))[-1] == "expired"
        # Marked once; from now on nothing changes.
        async with untouched(engine):
            await refused(code, call(engine.backend, handle))
        return
    async with untouched(engine):
        if verb in repeats:
            await call(engine.backend, handle)
        else:
            await refused(code, call(engine.backend, handle))


async def test_marking_by_a_refused_call_is_the_scanners_marking(engine: Engine) -> None:
    """Same record, same indexes, same event as the scanner's."""
    by_call, by_scanner = await running(engine), await running(engine)
    await engine.advance(TTL + 1)
    await refused("lease_expired", engine.backend.executions.complete(by_call))
    await mark(engine, [by_scanner.execution_id])
    assert set(await placed(engine, by_call.execution_id)) == set(
        await placed(engine, by_scanner.execution_id)
    )
    assert await event_types(engine, by_call.execution_id) == ["acquired", "expired"]


# --- the triple ---------------------------------------------------------------------------

FencedVerb = Callable[[ValkeyBackend, ExecutionId, Holder], Awaitable[object]]

FENCED: dict[str, FencedVerb] = {
    "complete": lambda b, e, f: b.executions.complete_execution(e, f),
    "fail": lambda b, e, f: b.executions.fail_execution(
        e, f, failure_reason="r", failure_category="c"
    ),
    "delay": lambda b, e, f: b.executions.delay_execution(e, f, delay_until=1),
    "wait_children": lambda b, e, f: b.executions.move_to_waiting_children(e, f),
    "renew": lambda b, e, f: b.leases.renew_lease(e, f, TTL),
    "cancel": lambda b, e, f: b.executions.cancel_execution(e, "r", source="lease_holder", fence=f),
    "cancel_custom": lambda b, e, f: b.executions.cancel_execution(
        e, "r", source="my-tool", fence=f
    ),
}


def partial_fences(handle: Handle) -> list[Fence]:
    lease, epoch, attempt = handle.lease_id, handle.lease_epoch, handle.attempt_id
    return [
        Fence(lease),
        Fence("", epoch),
        Fence("", None, attempt),
        Fence(lease, epoch),
        Fence(lease, None, attempt),
        Fence("", epoch, attempt),
    ]


@pytest.mark.parametrize("verb", FENCED)
async def test_a_missing_or_partial_triple(engine: Engine, verb: str) -> None:
    handle = await running(engine)
    call = FENCED[verb]
    async with untouched(engine):
        await refused("execution_not_found", call(engine.backend, engine.new_id(), Fence()))
        await refused("fence_required", call(engine.backend, handle.execution_id, Fence()))
        for fence in partial_fences(handle):
            await refused("partial_fence_triple", call(engine.backend, handle.execution_id, fence))


@pytest.mark.parametrize("verb", sorted(set(FENCED) - {"cancel", "cancel_custom"}))
async def test_the_triple_is_looked_at_before_the_state(engine: Engine, verb: str) -> None:
    handle = await completed(engine)
    call = FENCED[verb]
    async with untouched(engine):
        await refused("fence_required", call(engine.backend, handle.execution_id, Fence()))
        for fence in partial_fences(handle):
            await refused("partial_fence_triple", call(engine.backend, handle.execution_id, fence))


@pytest.mark.parametrize("verb", ["cancel", "cancel_custom"])
async def test_a_worker_cancel_looks_at_the_end_before_the_triple(
    engine: Engine, verb: str
) -> None:
    handle = await completed(engine)
    async with untouched(engine):
        for fence in (Fence(), *partial_fences(handle), handle):
            error = await refused(
                "execution_not_active", FENCED[verb](engine.backend, handle.execution_id, fence)
            )
            assert error.details[0] == "success"


@pytest.mark.parametrize("verb", FENCED)
async def test_each_part_of_the_triple_must_match(engine: Engine, verb: str) -> None:
    handle = await running(engine)
    lease, attempt = handle.lease_id, handle.attempt_id
    async with untouched(engine):
        for fence in (
            Fence(new_uuid(), 1, attempt, 0),
            Fence(lease, 2, attempt, 0),
            Fence(lease, 0, attempt, 0),
            Fence(lease, 1, new_uuid(), 0),
            Fence(lease, 1, attempt, 1),
            Fence(new_uuid(), 1, attempt),
        ):
            await refused("stale_lease", FENCED[verb](engine.backend, handle.execution_id, fence))


async def test_a_triple_without_the_index_is_enough(engine: Engine) -> None:
    for verb in ("renew", "wait_children", "delay"):
        handle = await running(engine)
        fence = Fence(handle.lease_id, handle.lease_epoch, handle.attempt_id)
        await FENCED[verb](engine.backend, handle.execution_id, fence)


async def test_progress_needs_lease_and_epoch_only(engine: Engine) -> None:
    handle = await running(engine)
    execution_id, backend = handle.execution_id, engine.backend
    async with untouched(engine):
        for fence in (
            Fence(),
            Fence(handle.lease_id),
            Fence("", 1),
            Fence(new_uuid(), 1),
            Fence(handle.lease_id, 2),
            Fence(handle.lease_id, 1, new_uuid()),
            Fence(handle.lease_id, 1, handle.attempt_id, 4),
        ):
            await refused(
                "stale_lease",
                backend.executions.update_progress(execution_id, fence, progress_pct=1),
            )
    await backend.executions.update_progress(
        execution_id, Fence(handle.lease_id, 1), progress_pct=50
    )
    info = await backend.reads.read_execution_info(execution_id)
    assert info.progress_pct == 50


# --- operator override ----------------------------------------------------------------------

OVERRIDE: dict[str, Callable[[ValkeyBackend, ExecutionId], Awaitable[object]]] = {
    "complete": lambda b, e: b.executions.complete_execution(e, source="operator_override"),
    "fail": lambda b, e: b.executions.fail_execution(
        e, failure_reason="r", failure_category="c", source="operator_override"
    ),
    "delay": lambda b, e: b.executions.delay_execution(
        e, delay_until=1, source="operator_override"
    ),
    "wait_children": lambda b, e: b.executions.move_to_waiting_children(
        e, source="operator_override"
    ),
}


@pytest.mark.parametrize("verb", OVERRIDE)
async def test_an_override_waives_only_the_identity(engine: Engine, verb: str) -> None:
    call = OVERRIDE[verb]
    waiting = await engine.create()
    revoked_one = await revoked(engine)
    ended = await completed(engine)
    async with untouched(engine):
        await refused("execution_not_found", call(engine.backend, engine.new_id()))
        await refused("execution_not_active", call(engine.backend, waiting))
        await refused("execution_not_active", call(engine.backend, ended.execution_id))
        await refused("lease_revoked", call(engine.backend, revoked_one.execution_id))
    lapsed_one = await lapsed_unmarked(engine)
    await refused("lease_expired", call(engine.backend, lapsed_one.execution_id))
    assert (await engine.vector(lapsed_one.execution_id)).code == "axnwni"
    held = await running(engine)
    await call(engine.backend, held.execution_id)


@pytest.mark.parametrize("source", ["", "lease_holder", "operator", "OPERATOR_OVERRIDE"])
async def test_no_other_source_is_an_override(engine: Engine, source: str) -> None:
    handle = await running(engine)
    async with untouched(engine):
        await refused(
            "fence_required",
            engine.backend.executions.complete_execution(handle.execution_id, source=source),
        )


async def test_an_override_with_a_wrong_triple_is_still_checked(engine: Engine) -> None:
    handle = await running(engine)
    fence = Fence(new_uuid(), 1, handle.attempt_id)
    async with untouched(engine):
        await refused(
            "stale_lease",
            engine.backend.executions.complete_execution(
                handle.execution_id, fence, source="operator_override"
            ),
        )


async def test_a_batch_refuses_the_zombie_and_serves_the_rest(engine: Engine) -> None:
    zombie = await reclaimed_by_another(engine)
    good = await running(engine)
    outcomes = await engine.backend.executions.complete_many(
        [Completion(zombie, b"z"), Completion(good, b"g"), Completion(zombie, b"z")]
    )
    assert [isinstance(outcome, EngineError) for outcome in outcomes] == [True, False, True]
    assert await engine.backend.reads.get_execution_result(zombie.execution_id) is None
    assert await engine.backend.reads.get_execution_result(good.execution_id) == b"g"


async def test_epochs_order_all_owners(engine: Engine) -> None:
    handle = await running(engine, policy=POLICY)
    owners = [handle]
    for step in range(6):
        if step % 3 == 0:
            await engine.backend.executions.delay(owners[-1], 1)
        elif step % 3 == 1:
            await engine.backend.leases.revoke_lease(handle.execution_id)
        else:
            await engine.advance(TTL + 1)
            await mark(engine, [handle.execution_id])
        owners.append((await engine.claim(worker=f"w{step}", instance=f"w{step}-1")).handle)
    assert [owner.lease_epoch for owner in owners] == list(range(1, 8))
    async with untouched(engine):
        for zombie in owners[:-1]:
            for name, verb in VERBS.items():
                await refused(refusal_of(name, "stale_lease"), verb(engine.backend, zombie))
    await engine.backend.executions.complete(owners[-1])
