"""Suspending a claimed task, and what is left of it when a reply is lost."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.core.conditions import AllOf, OperatorOnly, Single
from flowfabric.core.contracts.leases import ResumeCause
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import (
    Accepted,
    AlreadySatisfiedSuspension,
    DuplicateSignal,
    Suspended,
    TriggeredResume,
)
from flowfabric.core.errors import (
    LeaseLost,
    PossiblySucceeded,
    StateError,
    TaskFinishedError,
    ValidationError,
)
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import claimed, until
from tests.support.server import TestServer
from tests.support.suspension import SECRET

GO = Single("k", "go")


@pytest.fixture(autouse=True)
async def _secret(engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)


async def test_a_suspended_task_is_over_for_its_worker(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker(max_concurrent_tasks=1)
    task = await claimed(worker, engine)
    suspended = await task.suspend(AllOf((GO, Single("other"))))
    assert [one.waitpoint_key for one in suspended.details.waitpoints] == ["k", "other"]
    assert (task.finished_by, worker.free) == ("suspend", 1)
    with pytest.raises(TaskFinishedError):
        await task.complete()
    with pytest.raises(TaskFinishedError):
        await task.write_frame(Frame(payload=b"late"))
    half, outcome = [
        await worker.deliver_signal(
            task.execution_id, waitpoint.waitpoint_id, waitpoint.waitpoint_token, "go"
        )
        for waitpoint in suspended.details.waitpoints
    ]
    assert isinstance(half, Accepted)
    assert isinstance(outcome, TriggeredResume)
    again = await worker.claim()
    assert again is not None
    assert (again.attempt_index, again.lease_epoch) == (task.attempt_index, 2)
    assert again.resume_cause is not None
    assert again.resume_cause.closer_signal_id == outcome.signal_id
    assert [s.waitpoint_key for s in await again.resume_signals()] == ["k", "other"]
    await again.complete()


async def test_a_refused_suspension_leaves_the_task_as_it_was(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    with pytest.raises(ValidationError, match="allof_empty_members"):
        await task.suspend(AllOf(()))
    with pytest.raises(ValidationError, match="timeout_at_in_past"):
        await task.suspend(GO, timeout_at=1)
    assert task.is_lease_healthy()
    await task.complete()


async def test_strict_and_lenient_forms_of_already_satisfied(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    pending = await task.create_pending_waitpoint("k", 60_000)
    sent = await worker.deliver_signal(
        task.execution_id,
        pending.waitpoint_id,
        pending.waitpoint_token,
        "go",
        payload=b"\x00\xff",
        idempotency_key="once",
    )
    assert isinstance(sent, Accepted)
    repeat = await worker.deliver_signal(
        task.execution_id,
        pending.waitpoint_id,
        pending.waitpoint_token,
        "go",
        idempotency_key="once",
    )
    assert repeat == DuplicateSignal(sent.signal_id)
    outcome = await task.try_suspend_on_pending(pending, GO)
    assert isinstance(outcome, AlreadySatisfiedSuspension)
    assert task.is_lease_healthy()
    suspension_id = outcome.details.suspension_id
    cause = ResumeCause(suspension_id, "already_satisfied", "resumed", sent.signal_id)
    assert task.resume_cause == cause
    (signal,) = await task.resume_signals()
    assert (signal.signal_name, signal.payload) == ("go", b"\x00\xff")
    assert not await task.close_waitpoint(pending.waitpoint_id)
    second = await task.create_pending_waitpoint("k", 60_000)
    assert await task.close_waitpoint(second.waitpoint_id)
    with pytest.raises(StateError, match="waitpoint_not_pending"):
        await task.try_suspend_on_pending(second, GO)
    await task.complete()


async def test_a_suspension_whose_reply_was_lost_is_found_again(
    engine: Engine, make_worker: MakeWorker, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url)
    task = await claimed(worker, engine)
    proxy.drop_next_reply(b"ff_suspend")
    outcome = await task.try_suspend(GO)
    assert proxy.dropped == 1
    assert isinstance(outcome, Suspended)
    page = await engine.backend.waitpoints.list_pending_waitpoints(task.execution_id)
    assert [entry.waitpoint_id for entry in page.entries] == [outcome.details.waitpoint_id]


async def test_repeats_of_a_suspension_are_one_suspension(
    engine: Engine, make_worker: MakeWorker, proxy: FaultProxy, valkey: TestServer
) -> None:
    """The transport gives up and the task tries again: the engine must see the same request."""
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.2)
    task = await claimed(worker, engine)
    proxy.drop_next_reply(b"ff_suspend")
    suspending = asyncio.create_task(task.try_suspend(GO))
    await until(lambda: proxy.dropped == 1, "the loss")
    proxy.down()
    # The outage is longer than one call may take, and shorter than the task's patience.
    await asyncio.sleep(0.35)
    proxy.up()
    outcome = await suspending
    assert isinstance(outcome, Suspended)
    page = await engine.backend.waitpoints.list_pending_waitpoints(task.execution_id)
    assert [entry.waitpoint_id for entry in page.entries] == [outcome.details.waitpoint_id]


async def test_a_suspension_that_may_have_happened_can_be_verified(
    engine: Engine, make_worker: MakeWorker, proxy: FaultProxy, valkey: TestServer
) -> None:
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.2)
    task = await claimed(worker, engine)
    proxy.drop_next_reply(b"ff_suspend")
    suspending = asyncio.create_task(task.try_suspend(GO))
    await until(lambda: proxy.dropped == 1, "the loss")
    proxy.down()
    with pytest.raises(PossiblySucceeded) as caught:
        await suspending
    proxy.up()
    await worker.backend.meta.wait_ready(10)
    assert await caught.value.verify() == "succeeded"


async def test_nothing_can_be_asked_with_a_lost_lease(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker(lease_ttl_ms=1000)
    task = await claimed(worker, engine)
    await engine.backend.leases.revoke_lease(task.execution_id)
    await until(lambda: task.lease_lost is not None, "the loss")
    for call in (
        task.try_suspend(OperatorOnly()),
        task.create_pending_waitpoint("k", 1000),
        task.resume_signals(),
        task.past_waits(),
    ):
        with pytest.raises(LeaseLost):
            await call
