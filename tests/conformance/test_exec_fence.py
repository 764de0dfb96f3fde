"""The lease fence: which errors, in which order, and what a refusal leaves unchanged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from tests.support.engine import TTL, Engine, refused, unchanged
from tests.support.executions import foreign_fence, mark

Call = Callable[[Engine, ExecutionId, Fence | Handle, str], Awaitable[Any]]

FENCED: dict[str, Call] = {
    "complete": lambda engine, eid, fence, source: engine.backend.executions.complete_execution(
        eid, fence, result_payload=b"r", source=source
    ),
    "fail": lambda engine, eid, fence, source: engine.backend.executions.fail_execution(
        eid, fence, failure_reason="r", failure_category="transient", source=source
    ),
    "delay": lambda engine, eid, fence, source: engine.backend.executions.delay_execution(
        eid, fence, delay_until=2**50, source=source
    ),
    "wait_children": lambda engine, eid, fence, source: (
        engine.backend.executions.move_to_waiting_children(eid, fence, source=source)
    ),
}
CANCEL: Call = lambda engine, eid, fence, source: engine.backend.executions.cancel_execution(  # noqa: E731
    eid, "r", source=source, fence=fence
)
ALL = {**FENCED, "cancel": CANCEL}
PARTIAL = [
    Fence(lease_id=new_uuid()),
    Fence(lease_epoch=1),
    Fence(attempt_id=new_uuid()),
    Fence(new_uuid(), 1),
    Fence(new_uuid(), None, new_uuid()),
    Fence("", 1, new_uuid(), 0),
]


def altered(handle: Handle, part: str) -> Fence:
    fence = handle.fence
    return Fence(
        new_uuid() if part == "lease_id" else fence.lease_id,
        2 if part == "lease_epoch" else fence.lease_epoch,
        new_uuid() if part == "attempt_id" else fence.attempt_id,
        1 if part == "attempt_index" else fence.attempt_index,
    )


def code_of(answer: Any) -> str:
    assert isinstance(answer, EngineError), answer
    return answer.code


@pytest.mark.parametrize("operation", ALL)
async def test_unknown_execution_comes_first(engine: Engine, operation: str) -> None:
    missing = engine.new_id()
    for fence in (Fence(), PARTIAL[0], foreign_fence()):
        answer = await unchanged(
            engine, lambda fence=fence: ALL[operation](engine, missing, fence, "lease_holder")
        )
        assert code_of(answer) == "execution_not_found"


@pytest.mark.parametrize("operation", FENCED)
@pytest.mark.parametrize("state", ["active", "waiting", "completed", "revoked", "expired"])
async def test_the_triple_comes_before_the_state(
    engine: Engine, operation: str, state: str
) -> None:
    execution_id = await _in_state(engine, state)
    call = FENCED[operation]
    answer = await unchanged(engine, lambda: call(engine, execution_id, Fence(), "lease_holder"))
    assert code_of(answer) == "fence_required"
    only_index = Fence(attempt_index=0)
    answer = await unchanged(engine, lambda: call(engine, execution_id, only_index, "worker"))
    assert code_of(answer) == "fence_required"
    for fence in PARTIAL:
        for source in ("lease_holder", "operator_override"):
            answer = await unchanged(
                engine, lambda fence=fence, source=source: call(engine, execution_id, fence, source)
            )
            assert code_of(answer) == "partial_fence_triple"


async def test_a_partial_triple_is_no_repeat(engine: Engine) -> None:
    """Even the former holder must name its whole triple to be told what it was told before."""
    handle = await engine.running()
    own = handle.fence
    await engine.backend.executions.complete(handle)
    without_lease = Fence("", own.lease_epoch, own.attempt_id, own.attempt_index)
    answer = await unchanged(
        engine,
        lambda: engine.backend.executions.complete_execution(handle.execution_id, without_lease),
    )
    assert code_of(answer) == "partial_fence_triple"


async def _in_state(engine: Engine, state: str) -> ExecutionId:
    if state == "waiting":
        return await engine.create()
    handle = await engine.running()
    if state == "completed":
        await engine.backend.executions.complete(handle)
    elif state == "revoked":
        await engine.backend.leases.revoke_lease(handle.execution_id)
    elif state == "expired":
        await engine.advance(TTL)
    return handle.execution_id


@pytest.mark.parametrize("state", ["waiting", "completed", "active"])
async def test_cancel_by_a_worker_looks_at_the_end_first(engine: Engine, state: str) -> None:
    execution_id = await _in_state(engine, state)
    for fence, code in ((Fence(), "fence_required"), (PARTIAL[0], "partial_fence_triple")):
        answer = await unchanged(
            engine, lambda fence=fence: CANCEL(engine, execution_id, fence, "worker")
        )
        assert code_of(answer) == ("execution_not_active" if state == "completed" else code)


@pytest.mark.parametrize("operation", ALL)
@pytest.mark.parametrize("part", ["lease_id", "lease_epoch", "attempt_id", "attempt_index"])
async def test_stale_lease(engine: Engine, operation: str, part: str) -> None:
    handle = await engine.running()
    fence = altered(handle, part)
    answer = await unchanged(
        engine, lambda: ALL[operation](engine, handle.execution_id, fence, "lease_holder")
    )
    assert code_of(answer) == "stale_lease"


@pytest.mark.parametrize("operation", ALL)
async def test_the_attempt_index_may_be_left_out(engine: Engine, operation: str) -> None:
    handle = await engine.running()
    fence = handle.fence
    whole = Fence(fence.lease_id, fence.lease_epoch, fence.attempt_id)
    await ALL[operation](engine, handle.execution_id, whole, "lease_holder")


@pytest.mark.parametrize("operation", ALL)
async def test_revocation_comes_before_expiry_and_identity(engine: Engine, operation: str) -> None:
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    for _ in range(2):
        for fence in (handle, foreign_fence()):
            answer = await unchanged(
                engine,
                lambda fence=fence: ALL[operation](engine, handle.execution_id, fence, "worker"),
            )
            assert code_of(answer) == "lease_revoked"
        await engine.advance(TTL)


@pytest.mark.parametrize("operation", FENCED)
@pytest.mark.parametrize("fence", ["own", "foreign", "override"])
async def test_an_expired_lease_is_marked(engine: Engine, operation: str, fence: str) -> None:
    handle = await engine.running()
    await engine.advance(TTL)
    given = {"own": handle, "foreign": foreign_fence(), "override": Fence()}[fence]
    source = "operator_override" if fence == "override" else "lease_holder"
    call = FENCED[operation]
    await refused(call(engine, handle.execution_id, given, source), "lease_expired")
    assert (await engine.vector(handle.execution_id)).code == "axnwni"
    assert [event.type for event in await engine.events(handle.execution_id)] == [
        "acquired",
        "expired",
    ]
    answer = await unchanged(engine, lambda: call(engine, handle.execution_id, given, source))
    assert code_of(answer) == "lease_expired"
    assert await mark(engine, handle.execution_id) == "already_expired"


async def test_cancel_and_progress_do_not_mark(engine: Engine) -> None:
    handle = await engine.running()
    await engine.advance(TTL)
    for call in (
        lambda: engine.backend.executions.cancel(handle),
        lambda: engine.backend.executions.progress(handle, 1),
    ):
        assert code_of(await unchanged(engine, call)) == "lease_expired"


async def test_the_last_millisecond(engine: Engine) -> None:
    await engine.create()
    await engine.create()
    early, late = await engine.claim_all(2)
    await engine.freeze(early.lease_expires_at - 1)
    await engine.backend.executions.complete(early.handle)
    await engine.freeze(late.lease_expires_at)
    await refused(engine.backend.executions.complete(late.handle), "lease_expired")


@pytest.mark.parametrize("operation", FENCED)
async def test_an_operator_needs_no_fence(engine: Engine, operation: str) -> None:
    handle = await engine.running()
    await FENCED[operation](engine, handle.execution_id, Fence(), "operator_override")
    state = await engine.backend.reads.read_execution_state(handle.execution_id)
    assert state.value != "active" or operation == "wait_children"


@pytest.mark.parametrize("operation", FENCED)
async def test_an_operator_still_needs_a_live_lease(engine: Engine, operation: str) -> None:
    call = FENCED[operation]
    waiting = await engine.create()
    answer = await unchanged(engine, lambda: call(engine, waiting, Fence(), "operator_override"))
    assert code_of(answer) == "execution_not_active"
    handle = (await engine.claim()).handle
    await engine.backend.leases.revoke_lease(handle.execution_id)
    answer = await unchanged(
        engine, lambda: call(engine, handle.execution_id, Fence(), "operator_override")
    )
    assert code_of(answer) == "lease_revoked"


@pytest.mark.parametrize("operation", ALL)
async def test_a_superseded_worker(engine: Engine, operation: str) -> None:
    old = await engine.running()
    await engine.advance(TTL)
    await mark(engine, old.execution_id)
    new = (await engine.claim(instance="w-2")).handle
    call = ALL[operation]
    answer = await unchanged(engine, lambda: call(engine, old.execution_id, old, "worker"))
    assert code_of(answer) == "stale_lease"
    assert new.lease_epoch == 2
    assert new.attempt_index == 1


async def test_a_lease_that_expired_stays_expired_when_the_clock_steps_back(
    engine: Engine,
) -> None:
    handle = await engine.running()
    await engine.advance(TTL)
    assert await mark(engine, handle.execution_id) == "marked_expired"
    await engine.advance(-TTL)
    for call in (
        lambda: engine.backend.executions.complete(handle),
        lambda: engine.backend.executions.progress(handle, 1),
        lambda: engine.backend.executions.cancel(handle),
    ):
        assert code_of(await unchanged(engine, call)) == "lease_expired"


@pytest.mark.parametrize("bad", ["", "x", "{fp:1}", "{fp:01}:" + "0" * 8, "{fp:1}:ABC"])
async def test_malformed_ids(engine: Engine, bad: str) -> None:
    wrong = ExecutionId.trusted(bad)
    plain: Any = str.__str__(wrong)
    for call in (
        engine.backend.executions.complete_execution(plain),
        engine.backend.executions.cancel_execution(plain),
        engine.backend.reads.read_execution_info(plain),
        engine.backend.executions.replay_execution(plain),
        engine.backend.executions.change_priority(plain, 1),
    ):
        await refused(call, "invalid_input")


async def test_ids_outside_the_partitions(engine: Engine) -> None:
    beyond = ExecutionId.trusted(f"{{fp:{engine.backend.counts.flow}}}:{new_uuid()}")
    for call in (
        engine.backend.executions.complete_execution(beyond),
        engine.backend.executions.cancel_execution(beyond),
        engine.backend.reads.describe_execution(beyond),
        engine.backend.executions.set_execution_tag(beyond, "a.b", "c"),
    ):
        await refused(call, "invalid_input")
