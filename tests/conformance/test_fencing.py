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
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion, FailedAttempt, Holder
from tests.support.engine import TTL, Engine, refused, untouched
from tests.support.leases import mark, reclaim, running

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


async def _completed_and_claimed(backend: Backend, handle: Handle) -> Sequence[object]:
    elsewhere = ClaimRequest("elsewhere", "w", "w-1")
    items = [Completion(handle, b"zombie")]
    outcomes, claimed = await backend.claims.complete_and_claim(
        handle.execution_id.tag, items, elsewhere, 1
    )
    assert not claimed.claims
    return outcomes


async def _failed_and_claimed(backend: Backend, handle: Handle) -> Sequence[object]:
    elsewhere = ClaimRequest("elsewhere", "w", "w-1")
    items = [FailedAttempt(handle, "zombie")]
    outcomes, claimed = await backend.claims.complete_and_claim(
        handle.execution_id.tag, items, elsewhere, 1
    )
    assert not claimed.claims
    return outcomes


Verb = Callable[[Backend, Handle], Awaitable[object]]

VERBS: dict[str, Verb] = {
    "complete": lambda b, h: b.executions.complete(h, b"zombie"),
    "complete_many": lambda b, h: _only(b.executions.complete_many([Completion(h, b"zombie")])),
    "fail": lambda b, h: b.executions.fail(h, "zombie", "transient"),
    "cancel": lambda b, h: b.executions.cancel(h, "zombie"),
    "delay": lambda b, h: b.executions.delay(h, 2**50),
    "release_unknown": lambda b, h: b.executions.release_unknown(h, "job"),
    "wait_children": lambda b, h: b.executions.wait_children(h),
    "progress": lambda b, h: b.executions.progress(h, 99, "zombie"),
    "renew": lambda b, h: b.leases.renew(h),
    "renew_many": lambda b, h: _only(b.leases.renew_many([h])),
    "complete_and_claim": lambda b, h: _only(_completed_and_claimed(b, h)),
    "fail_and_claim": lambda b, h: _only(_failed_and_claimed(b, h)),
    "suspend": lambda b, h: b.suspensions.suspend(h, condition=Single("go")),
    "create_waitpoint": lambda b, h: b.waitpoints.create_waitpoint(h, "go", 1000),
    "record_step": lambda b, h: b.steps.record_step(h.execution_id, h, "zombie", result=b"z"),
    "append_frame": lambda b, h: b.streams.append_frame(h, Frame(payload=b"zombie")),
}
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


async def revoked(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    return handle


async def completed(engine: Engine) -> Handle:
    handle = await running(engine, policy=POLICY)
    await engine.backend.executions.complete(handle, b"done")
    return handle


# --- the triple ---------------------------------------------------------------------------

FencedVerb = Callable[[Backend, ExecutionId, Holder], Awaitable[object]]

FENCED: dict[str, FencedVerb] = {
    "complete": lambda b, e, f: b.executions.complete_execution(e, f),
    "fail": lambda b, e, f: b.executions.fail_execution(
        e, f, failure_reason="r", failure_category="c"
    ),
    "delay": lambda b, e, f: b.executions.delay_execution(e, f, delay_until=1),
    "wait_children": lambda b, e, f: b.executions.move_to_waiting_children(e, f),
    "renew": lambda b, e, f: b.leases.renew_lease(e, f, TTL),
    "record_step": lambda b, e, f: b.steps.record_step(e, f, "s"),
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
        await refused(call(engine.backend, engine.new_id(), Fence()), "execution_not_found")
        await refused(call(engine.backend, handle.execution_id, Fence()), "fence_required")
        for fence in partial_fences(handle):
            await refused(call(engine.backend, handle.execution_id, fence), "partial_fence_triple")


@pytest.mark.parametrize("verb", sorted(set(FENCED) - {"cancel", "cancel_custom"}))
async def test_the_triple_is_looked_at_before_the_state(engine: Engine, verb: str) -> None:
    handle = await completed(engine)
    call = FENCED[verb]
    async with untouched(engine):
        await refused(call(engine.backend, handle.execution_id, Fence()), "fence_required")
        for fence in partial_fences(handle):
            await refused(call(engine.backend, handle.execution_id, fence), "partial_fence_triple")


@pytest.mark.parametrize("verb", ["cancel", "cancel_custom"])
async def test_a_worker_cancel_looks_at_the_end_before_the_triple(
    engine: Engine, verb: str
) -> None:
    handle = await completed(engine)
    async with untouched(engine):
        for fence in (Fence(), *partial_fences(handle), handle):
            error = await refused(
                FENCED[verb](engine.backend, handle.execution_id, fence), "execution_not_active"
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
            await refused(FENCED[verb](engine.backend, handle.execution_id, fence), "stale_lease")


async def test_a_triple_without_the_index_is_enough(engine: Engine) -> None:
    for verb in ("renew", "record_step", "wait_children", "delay"):
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
                backend.executions.update_progress(execution_id, fence, progress_pct=1),
                "stale_lease",
            )
    await backend.executions.update_progress(
        execution_id, Fence(handle.lease_id, 1), progress_pct=50
    )
    info = await backend.reads.read_execution_info(execution_id)
    assert info.progress_pct == 50


# --- operator override ----------------------------------------------------------------------

OVERRIDE: dict[str, Callable[[Backend, ExecutionId], Awaitable[object]]] = {
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
        await refused(call(engine.backend, engine.new_id()), "execution_not_found")
        await refused(call(engine.backend, waiting), "execution_not_active")
        await refused(call(engine.backend, ended.execution_id), "execution_not_active")
        await refused(call(engine.backend, revoked_one.execution_id), "lease_revoked")
    lapsed_one = await lapsed_unmarked(engine)
    await refused(call(engine.backend, lapsed_one.execution_id), "lease_expired")
    assert (await engine.vector(lapsed_one.execution_id)).code == "axnwni"
    held = await running(engine)
    await call(engine.backend, held.execution_id)


@pytest.mark.parametrize("source", ["", "lease_holder", "operator", "OPERATOR_OVERRIDE"])
async def test_no_other_source_is_an_override(engine: Engine, source: str) -> None:
    handle = await running(engine)
    async with untouched(engine):
        await refused(
            engine.backend.executions.complete_execution(handle.execution_id, source=source),
            "fence_required",
        )


async def test_an_override_with_a_wrong_triple_is_still_checked(engine: Engine) -> None:
    handle = await running(engine)
    fence = Fence(new_uuid(), 1, handle.attempt_id)
    async with untouched(engine):
        await refused(
            engine.backend.executions.complete_execution(
                handle.execution_id, fence, source="operator_override"
            ),
            "stale_lease",
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
                await refused(verb(engine.backend, zombie), refusal_of(name, "stale_lease"))
    await engine.backend.executions.complete(owners[-1])
