"""One claimed attempt: every way to end it, and what a lost reply leaves to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from flowfabric.core.contracts.executions import (
    Ready,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.core.errors import (
    EngineError,
    LeaseLost,
    PossiblySucceeded,
    TaskFinishedError,
    TransportError,
    ValidationError,
)
from flowfabric.core.state import ExpireReason
from flowfabric.sdk.attempt import verify
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import RETRY, claimed, info, state, until, valkey_of
from tests.support.server import TestServer

# --- operations ---------------------------------------------------------------------------


async def test_accessors(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    task = await claimed(
        worker, engine, kind="resize", input_payload=b"\xff\x00", payload_encoding="raw",
        tags={"a": "b"},
    )  # fmt: skip
    assert (task.execution_kind, task.lane_id) == ("resize", "default")
    assert (task.input_payload, task.payload_encoding) == (b"\xff\x00", "raw")
    assert (dict(task.tags), task.attempt_index, task.lease_epoch) == ({"a": "b"}, 0, 1)
    assert len(task.lease_id) == len(task.attempt_id) == 36
    assert (task.consecutive_renewal_failures, task.is_lease_healthy()) == (0, True)
    await task.complete()
    assert not task.is_lease_healthy()


async def test_complete_keeps_none_and_empty_apart(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    for result in (None, b"", b"\x00\xff"):
        task = await claimed(worker, engine)
        await task.complete(result)
        assert await state(engine.backend, task.execution_id) == "completed"
        assert await engine.backend.reads.get_execution_result(task.execution_id) == result
        assert worker.free == 1


async def test_fail_tells_whether_it_is_retried(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    assert isinstance(await task.fail("broken"), TerminalFailed)
    assert await state(engine.backend, task.execution_id) == "failed"
    task = await claimed(worker, engine, policy=RETRY)
    outcome = await task.fail("broken", "transient")
    assert isinstance(outcome, RetryScheduled)
    assert outcome.next_attempt_index == 1
    assert worker.free == 1


async def test_cancel_delay_and_give_back(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    await task.cancel("not needed")
    assert await state(engine.backend, task.execution_id) == "cancelled"
    task = await claimed(worker, engine)
    await task.delay_execution(await engine.now() + 60_000)
    assert await state(engine.backend, task.execution_id) == "delayed"
    task = await claimed(worker, engine)
    await task.delay_execution(1)
    again = await worker.claim()
    assert again is not None
    assert (again.execution_id, again.attempt_id) == (task.execution_id, task.attempt_id)
    assert (again.attempt_index, again.lease_epoch) == (0, 2)
    await again.complete()
    assert worker.free == 1


async def test_waiting_for_no_children_keeps_the_lease(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    assert isinstance(await task.move_to_waiting_children(), Ready)
    assert worker.free == 0
    await task.complete()


async def test_progress_and_renewal_on_demand(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    before = task.claim.lease_expires_at
    await engine.advance(1000)
    renewed = await task.renew_lease()
    assert renewed.expires_at >= before + 1000
    await task.update_progress(40, "on it")
    seen = await info(engine.backend, task.execution_id)
    assert (seen.progress_pct, seen.progress_message) == (40, "on it")
    await task.complete()


OPERATIONS: dict[str, Callable[[ClaimedTask], Coroutine[Any, Any, Any]]] = {
    "complete": lambda task: task.complete(),
    "fail": lambda task: task.fail("x"),
    "cancel": lambda task: task.cancel("x"),
    "delay": lambda task: task.delay_execution(1),
}


@pytest.mark.parametrize("first", OPERATIONS)
async def test_second_lease_releasing_call_is_refused_locally(
    engine: Engine, make_worker: MakeWorker, first: str
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    await OPERATIONS[first](task)
    for operation in OPERATIONS.values():
        with pytest.raises(TaskFinishedError, match=first):
            await operation(task)
    with pytest.raises(TaskFinishedError):
        await task.update_progress(1)
    assert worker.free == 1


async def test_two_calls_at_once_are_one(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    outcomes = await asyncio.gather(task.complete(), task.fail("x"), return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], TaskFinishedError)
    assert await state(engine.backend, task.execution_id) == "completed"


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_typed_refusal_is_final(
    engine: Engine, make_worker: MakeWorker, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await make_worker()
    task = await claimed(worker, engine)
    await engine.backend.executions.cancel_execution(task.execution_id, "by an operator")
    if operation == "cancel":
        # The engine cannot tell the two cancels apart: it is cancelled, as asked.
        await task.cancel()
    else:
        with pytest.raises(EngineError, match="execution_not_active"):
            await OPERATIONS[operation](task)
    assert (task.finished_by, worker.free) == (operation, 1)
    await task.discard()
    assert "dropped" not in caplog.text


async def test_refused_argument_leaves_the_task_usable(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    valkey_of(worker).calls.max_payload_bytes = 10
    task = await claimed(worker, engine)
    with pytest.raises(ValidationError, match="payload_too_large"):
        await task.complete(b"x" * 11)
    assert (task.finished_by, worker.free) == (None, 0)
    await task.fail("result too large", "permanent")
    assert await state(engine.backend, task.execution_id) == "failed"


# --- lost replies -----------------------------------------------------------------------


async def test_lost_reply_is_repeated_and_answered_once(
    engine: Engine, make_worker: MakeWorker, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url)
    for op, expected in (("complete", "completed"), ("fail", "failed"), ("cancel", "cancelled")):
        task = await claimed(worker, engine)
        proxy.drop_next_reply(f"ff_{op}".encode())
        await OPERATIONS[op](task)
        assert await state(engine.backend, task.execution_id) == expected
        ends = [e for e in await engine.events(task.execution_id) if e.type == "completion"]
        assert len(ends) == 1
    assert proxy.dropped == 3


async def test_transport_error_keeps_task_and_renewal(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """Not landed: the task stays usable, its permit taken, its lease renewed."""
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.2, lease_ttl_ms=1500)
    task = await claimed(worker, engine)
    await cut_off(proxy, worker)
    with pytest.raises(TransportError) as caught:
        await task.complete()
    assert not caught.value.ambiguous
    assert (task.finished_by, worker.free) == (None, 0)
    before = task.held.deadline
    await until(lambda: task.held.deadline > before, "a renewal")
    proxy.up()
    await until(lambda: connected(worker), "a new connection")
    await task.complete()
    assert await state(engine.backend, task.execution_id) == "completed"


async def cut_off(proxy: FaultProxy, worker: Worker) -> None:
    """Until the worker knows, it would send into a socket that is already dead."""
    proxy.down()
    await until(lambda: not connected(worker), "the loss of the connection")


def connected(worker: Worker) -> bool:
    return worker.backend.transport._link.conn is not None  # type: ignore[attr-defined]


async def test_possibly_succeeded_and_it_did(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.1)
    task = await claimed(worker, engine)
    proxy.pause()
    with pytest.raises(PossiblySucceeded) as caught:
        await task.complete(b"done")
    assert (task.finished_by, caught.value.op) == (None, "complete")
    assert await caught.value.verify() == "unknown"
    proxy.resume()
    await until(lambda: ended(engine, task), "the late effect")
    worker.backend.transport._request_timeout = 5.0  # type: ignore[attr-defined]
    assert await caught.value.verify() == "succeeded"
    await task.complete(b"done")


async def ended(engine: Engine, task: ClaimedTask) -> bool:
    return await state(engine.backend, task.execution_id) == "completed"


async def test_possibly_succeeded_but_it_did_not(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.5)
    task = await claimed(worker, engine)
    error = await lost_call(proxy, task, "complete")
    assert await error.verify() == "failed"
    await engine.backend.leases.revoke_lease(task.execution_id)
    assert await error.verify() == "failed"
    other = await engine.claim(instance="other")
    assert await error.verify() == "superseded"
    await engine.backend.executions.complete(other.handle)
    assert await error.verify() == "superseded"
    task.finish("test")


async def test_another_end_is_not_taken_for_ours(engine: Engine) -> None:
    """The attempt ended as the call wanted, but by another lease, or by a scanner."""
    backend = engine.backend
    first = await engine.running()
    await backend.executions.delay(first, 1)
    second = (await engine.claim(instance="w-2")).handle
    await backend.executions.complete(second)
    assert await verify(backend, first, "complete") == "superseded"
    assert await verify(backend, second, "complete") == "succeeded"
    timeout = {"timeout_policy": {"attempt_timeout_ms": 10}}
    retry = {"retry_policy": {"max_retries": 1, "retry_on_timeout": True}}
    late = await engine.running(policy=timeout | retry)
    await engine.advance(10)
    tag, ids = late.execution_id.tag, [late.execution_id]
    await backend.upkeep.expire_execution(tag, ExpireReason.ATTEMPT_TIMEOUT, ids)
    assert await verify(backend, late, "fail") == "superseded"


async def lost_call(proxy: FaultProxy, task: ClaimedTask, op: str) -> PossiblySucceeded:
    """A call that was sent and never arrived."""
    proxy.drop_next_request(f"ff_{op}".encode())
    call = asyncio.create_task(OPERATIONS[op](task))
    await until(lambda: proxy.dropped == 1, "the loss")
    proxy.down()
    with pytest.raises(PossiblySucceeded) as caught:
        await call
    proxy.up()
    return caught.value


@pytest.mark.parametrize(
    ("op", "verdict"), [("fail", "succeeded"), ("delay", "succeeded"), ("cancel", "succeeded")]
)
async def test_verify_recognises_each_operation(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy, op: str,
    verdict: str,
) -> None:  # fmt: skip
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.5)
    task = await claimed(worker, engine, policy=RETRY)
    error = await lost_call(proxy, task, op)
    assert await error.verify() == "failed"
    await OPERATIONS[op](task)
    assert await error.verify() == verdict
    if op == "delay":
        # The same attempt goes on elsewhere: that is what the delay was for.
        resumed = await engine.claim(instance="other")
        assert await error.verify() == verdict
        await engine.backend.executions.complete(resumed.handle)


async def test_own_end_is_not_mistaken_for_a_loss(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """A renewal that follows our complete is told `execution_not_active`."""
    worker = await make_worker(proxy.url, valkey.url)
    task = await claimed(worker, engine)
    told: list[LeaseLost] = []
    task.on_lease_lost = told.append
    proxy.pause()
    completing = asyncio.create_task(task.complete())
    await until(lambda: task._releasing_by is not None, "the call")
    task.lease_is_lost("execution_not_active", "renewed too late")
    proxy.resume()
    await completing
    assert (told, task.lease_lost) == ([], None)


async def test_real_loss_during_a_call_is_reported_after_it(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    worker = await make_worker(proxy.url, valkey.url, request_timeout=0.1)
    task = await claimed(worker, engine)
    told: list[LeaseLost] = []
    task.on_lease_lost = told.append
    await cut_off(proxy, worker)
    completing = asyncio.create_task(task.complete())
    await until(lambda: task._releasing_by is not None, "the call")
    task.lease_is_lost("lease_revoked", "by an operator")
    assert told == []
    with pytest.raises(TransportError):
        await completing
    assert [lost.code for lost in told] == ["lease_revoked"]
    with pytest.raises(LeaseLost):
        await task.complete()
    task.finish("test")
    proxy.up()
