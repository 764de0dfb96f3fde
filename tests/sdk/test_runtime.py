"""The claim loop: the outcome of every handler, and how a run ends."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from flowfabric.core.errors import PermanentError, RetryableError, TransportError
from flowfabric.sdk.runtime import RunSummary, WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import info, serving, state, submit, until, valkey_of
from tests.support.server import TestServer

RETRY_SOON = {"retry_policy": {"max_retries": 2, "backoff": {"type": "fixed", "delay_ms": 50}}}


async def nothing(task: ClaimedTask) -> None:
    pass


def finished(runtime: WorkerRuntime, count: int) -> Any:
    def ended() -> bool:
        done = runtime.summary
        return done.completed + done.failed + done.retried + done.abandoned >= count

    return ended


# --- outcomes -------------------------------------------------------------------------------


async def test_results(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(max_concurrent_tasks=3)
    results: dict[str, Any] = {"none": None, "bytes": b"\x00", "both": (b"[1]", "json")}
    ids = {kind: (await submit(engine.backend, kind=kind))[0] for kind in results}

    def returning(value: Any) -> Any:
        async def handler(task: ClaimedTask) -> Any:
            return value

        return handler

    handlers = {kind: returning(value) for kind, value in results.items()}
    async with serving(worker, handlers) as runtime:
        await until(finished(runtime, 3), "three results")
    assert runtime.summary == RunSummary(completed=3)
    stored = {k: await engine.backend.reads.get_execution_result(i) for k, i in ids.items()}
    assert stored == {"none": None, "bytes": b"\x00", "both": b"[1]"}
    assert (await info(engine.backend, ids["both"])).result_encoding == "json"


class Custom(BaseException):
    pass


def raises(error: BaseException) -> Any:
    async def handler(task: ClaimedTask) -> None:
        raise error

    return handler


RETURNS = "a handler returns bytes, None, or (bytes, encoding label), not"


def returns(result: Any) -> Any:
    async def handler(task: ClaimedTask) -> Any:
        return result

    return handler


async def awaits_something_cancelled(task: ClaimedTask) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


def chained() -> Exception:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    return error


@pytest.mark.parametrize(
    ("handler", "category", "reason"),
    [
        (raises(ValueError("bad")), "handler_error", "ValueError: bad"),
        (raises(chained()), "handler_error", "ValueError: outer: KeyError: 'inner'"),
        (raises(RetryableError("again")), "transient", "RetryableError: again"),
        (raises(PermanentError("never")), "permanent", "PermanentError: never"),
        (raises(TimeoutError("slow")), "timeout", "TimeoutError: slow"),
        (raises(Custom("x")), "handler_panic", "handler crashed: Custom: x"),
        (raises(SystemExit(3)), "handler_panic", "handler crashed: SystemExit: 3"),
        (raises(KeyboardInterrupt()), "handler_panic", "handler crashed: KeyboardInterrupt"),
        (awaits_something_cancelled, "handler_panic", "handler crashed: CancelledError"),
        (returns("text"), "permanent", f"{RETURNS} a str"),
        (returns((b"x",)), "permanent", f"{RETURNS} (bytes)"),
        (returns((5, "json")), "permanent", f"{RETURNS} (int, str)"),
        (returns((b"x", None)), "permanent", f"{RETURNS} (bytes, NoneType)"),
        (returns((b"x", "\ud800")), "permanent", f"{RETURNS} a label that is not valid Unicode"),
        (None, "runtime_no_handler", "no handler is registered for kind 'job'"),
    ],
)
async def test_failures(
    engine: Engine, make_worker: MakeWorker, handler: Any, category: str, reason: str
) -> None:
    (execution_id,) = await submit(engine.backend)
    worker = await make_worker()
    async with serving(worker, {} if handler is None else {"job": handler}) as runtime:
        await until(finished(runtime, 1), "the failure")
    seen = await info(engine.backend, execution_id)
    assert (seen.public_state.value, seen.failure_category) == ("failed", category)
    assert (seen.failure_reason or "").splitlines()[0] == reason
    assert runtime.summary == RunSummary(failed=1)


async def test_reason_names_the_place(engine: Engine, make_worker: MakeWorker) -> None:
    def deep_inside() -> None:
        raise ValueError("bad")

    async def handler(task: ClaimedTask) -> None:
        deep_inside()

    (execution_id,) = await submit(engine.backend)
    async with serving(await make_worker(), {"job": handler}) as runtime:
        await until(finished(runtime, 1), "the failure")
    reason = (await info(engine.backend, execution_id)).failure_reason or ""
    assert "in deep_inside" in reason
    assert "_handle" not in reason


async def test_oversized_result_fails_with_a_clear_reason(
    engine: Engine, make_worker: MakeWorker
) -> None:
    async def handler(task: ClaimedTask) -> bytes:
        return b"x" * (101 if task.execution_kind == "big" else 100)

    ids = [(await submit(engine.backend, kind=k, policy=RETRY_SOON))[0] for k in ("big", "fits")]
    worker = await make_worker(max_concurrent_tasks=2)
    valkey_of(worker).calls.max_payload_bytes = 100
    async with serving(worker, {"big": handler, "fits": handler}) as runtime:
        await until(finished(runtime, 2), "both ends")
    big, fits = [await info(engine.backend, i) for i in ids]
    assert (fits.public_state.value, big.public_state.value) == ("completed", "failed")
    assert big.failure_category == "permanent"
    assert "payload_too_large" in (big.failure_reason or "")
    assert "101 bytes" in (big.failure_reason or "")


async def test_handler_may_end_its_task_itself(engine: Engine, make_worker: MakeWorker) -> None:
    async def handler(task: ClaimedTask) -> None:
        if task.attempt_index == 0 and task.lease_epoch == 1:
            await task.delay_execution(1)
            return
        await task.complete(b"mine")
        raise ValueError("too late to matter")

    (execution_id,) = await submit(engine.backend)
    async with serving(await make_worker(), {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed == 1, "the end")
    assert runtime.summary == RunSummary(completed=1, released=1)
    assert await engine.backend.reads.get_execution_result(execution_id) == b"mine"


# --- time -----------------------------------------------------------------------------------


async def test_retry_runs_when_it_is_due(engine: Engine, make_worker: MakeWorker) -> None:
    times: list[float] = []

    async def handler(task: ClaimedTask) -> None:
        times.append(time.monotonic())
        if task.attempt_index < 2:
            raise RetryableError("again")

    (execution_id,) = await submit(engine.backend, policy=RETRY_SOON)
    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed == 1, "the third attempt")
    assert runtime.summary == RunSummary(completed=1, retried=2)
    gaps = [b - a for a, b in pairwise(times)]
    assert all(0.045 < gap < 0.6 for gap in gaps), gaps
    assert (await info(engine.backend, execution_id)).total_attempt_count == 3


@pytest.mark.parametrize(
    ("retry", "ends_as", "attempts"), [(False, "expired", 1), (True, "completed", 2)]
)
async def test_attempt_timeout_stops_the_handler(
    engine: Engine, make_worker: MakeWorker, retry: bool, ends_as: str, attempts: int
) -> None:
    stopped = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        if task.attempt_index > 0:
            return
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    policy: dict[str, Any] = {"timeout_policy": {"attempt_timeout_ms": 100}}
    if retry:
        policy["retry_policy"] = {
            "max_retries": 1, "retry_on_timeout": True,
            "backoff": {"type": "fixed", "delay_ms": 10},
        }  # fmt: skip
    (execution_id,) = await submit(engine.backend, policy=policy)
    worker = await make_worker(scanners=True)
    async with serving(worker, {"job": handler}) as runtime:
        await asyncio.wait_for(stopped.wait(), 5)
        await until(lambda: ended_as(engine, execution_id, ends_as), ends_as)
        await until(lambda: worker.free == 1, "the permit")
    seen = await info(engine.backend, execution_id)
    assert seen.total_attempt_count == attempts
    expected = RunSummary(completed=1, retried=1) if retry else RunSummary(failed=1)
    assert runtime.summary == expected


async def ended_as(engine: Engine, execution_id: Any, expected: str) -> bool:
    return await state(engine.backend, execution_id) == expected


# --- concurrency ----------------------------------------------------------------------------


async def test_bounded_and_batched(engine: Engine, make_worker: MakeWorker) -> None:
    """Never more handlers than permits, and far fewer calls than tasks."""
    running = most = 0

    async def handler(task: ClaimedTask) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert worker.free >= 0
        await asyncio.sleep(0)
        running -= 1

    count, permits = 2000, 50
    await submit(engine.backend, count)
    worker = await make_worker(max_concurrent_tasks=permits)
    calls = 0
    transport = valkey_of(worker).transport
    original = transport.fcall

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    transport.fcall = counted
    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed == count, "all of them", 30)
    assert most <= permits
    assert calls < count / 5


async def test_a_worker_fails_a_task_and_takes_the_next_in_one_call(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Failures and results of one tick go in the same call."""

    async def handler(task: ClaimedTask) -> None:
        if task.attempt_index == 0 and int(task.input_payload) % 2:
            raise ValueError(task.input_payload)

    for n in range(40):
        await submit(engine.backend, input_payload=str(n).encode())
    worker = await make_worker(max_concurrent_tasks=4)
    sent: Counter[str] = Counter()
    transport = valkey_of(worker).transport
    original = transport.fcall

    def counted(function: str, *args: Any, **kwargs: Any) -> Any:
        sent[function] += 1
        return original(function, *args, **kwargs)

    transport.fcall = counted
    async with serving(worker, {"job": handler}) as runtime:
        done = RunSummary(completed=20, failed=20)
        await until(lambda: runtime.summary == done, "all of them", 30)
    # Each call ends the four that run. Besides the claims that found them first, only a claim or
    # two that find nothing follow.
    assert sent["ff_fail"] == 0
    assert sent["ff_complete"] <= 13
    assert sent["ff_claim_many"] <= 4


async def test_lanes_and_partitions_share_a_busy_worker(
    engine: Engine, make_worker: MakeWorker
) -> None:
    order: list[tuple[str, str]] = []

    async def handler(task: ClaimedTask) -> None:
        order.append((task.lane_id, task.execution_id.tag))

    for lane in ("a", "b"):
        for partition in (1, 2, 3):
            await submit(engine.backend, 300, lane=lane, partition=partition)
    worker = await make_worker(lanes=["a", "b"], max_concurrent_tasks=8, claim_poll_interval_ms=10)
    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed == 1800, "all of them", 30)
    # Each place must have been served before any other was emptied.
    places = set(order)
    assert len(places) == 6
    firsts = {place: order.index(place) for place in places}
    assert max(firsts.values()) < 1500
    half = [lane for lane, _ in order[:900]]
    assert 200 < half.count("a") < 700


# --- ending ---------------------------------------------------------------------------------


async def test_drain_lets_handlers_finish(engine: Engine, make_worker: MakeWorker) -> None:
    started, release = asyncio.Event(), asyncio.Event()
    told: list[bool] = []

    async def handler(task: ClaimedTask) -> bytes:
        started.set()
        await release.wait()
        told.append(runtime.shutting_down)
        return b"done"

    first, second = await submit(engine.backend, 2)
    worker = await make_worker()
    runtime = WorkerRuntime(worker)
    runtime.on("job", handler)
    run = asyncio.create_task(runtime.run(grace_s=30))
    await started.wait()
    runtime.stop()
    await until(lambda: runtime.shutting_down, "the drain")
    release.set()
    assert await run == RunSummary(completed=1)
    assert told == [True]
    states = {await state(engine.backend, i) for i in (first, second)}
    assert states == {"completed", "waiting"}


@pytest.mark.parametrize("mode", ["release", "fail"])
async def test_after_the_grace_the_lease_is_given_back_or_the_attempt_fails(
    engine: Engine, make_worker: MakeWorker, mode: Any
) -> None:
    started = asyncio.Event()
    cleaned: list[str] = []

    async def handler(task: ClaimedTask) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            # The lease is ours until the handler is through.
            cleaned.append(await state(engine.backend, task.execution_id))

    (execution_id,) = await submit(engine.backend)
    worker = await make_worker()
    runtime = WorkerRuntime(worker)
    runtime.on("job", handler)
    run = asyncio.create_task(runtime.run(grace_s=0.05, on_shutdown=mode))
    await started.wait()
    runtime.stop()
    summary = await run
    assert cleaned == ["active"]
    seen = await info(engine.backend, execution_id)
    if mode == "fail":
        assert (summary, seen.failure_category) == (RunSummary(failed=1), "worker_shutdown")
        return
    assert summary == RunSummary(released=1)
    claim = await engine.claim(instance="other")
    assert (claim.handle.kind, claim.handle.attempt_index) == ("resumed", 0)
    await engine.backend.executions.complete(claim.handle)


async def test_handler_that_ignores_the_end_loses_its_lease_anyway(
    engine: Engine, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.sdk.runtime._CANCEL_WAIT_S", 0.1)
    started, release = asyncio.Event(), asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    (execution_id,) = await submit(engine.backend)
    worker = await make_worker()
    runtime = WorkerRuntime(worker)
    runtime.on("job", handler)
    run = asyncio.create_task(runtime.run(grace_s=0))
    await started.wait()
    runtime.stop()
    assert (await run).released == 1
    assert await state(engine.backend, execution_id) == "waiting"
    assert worker.free == 1
    release.set()


async def test_claims_that_arrive_while_stopping_are_given_back(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """A result was sent together with a claim for more; the run is stopped before the answer."""
    ids = await submit(engine.backend, 10)
    worker = await make_worker(proxy.url, valkey.url)
    runtime = WorkerRuntime(worker)
    release = asyncio.Event()
    started = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        started.set()
        await release.wait()

    runtime.on("job", handler)
    run = asyncio.create_task(runtime.run())
    await started.wait()
    proxy.pause()
    release.set()
    await until(lambda: bool(runtime._endings._calls), "the completing call")
    runtime.stop()
    proxy.resume()
    assert await run == RunSummary(completed=1)
    await until(lambda: not worker.claims.background, "the claim given back")
    states = [await state(engine.backend, i) for i in ids]
    assert sorted(states) == ["completed"] + ["waiting"] * 9
    assert worker.free == 1


async def test_cancelled_run_gives_leases_back(engine: Engine, make_worker: MakeWorker) -> None:
    started = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        started.set()
        await asyncio.Event().wait()

    (execution_id,) = await submit(engine.backend)
    worker = await make_worker()
    runtime = WorkerRuntime(worker)
    runtime.on("job", handler)
    run = asyncio.create_task(runtime.run())
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await state(engine.backend, execution_id), worker.free) == ("waiting", 1)


async def test_login_problem_ends_the_run(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(max_concurrent_tasks=2)
    started = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        started.set()
        await asyncio.Event().wait()

    await submit(engine.backend)
    runtime = WorkerRuntime(worker)
    runtime.on("job", handler)
    run = asyncio.create_task(runtime.run(grace_s=0))
    await started.wait()
    transport = valkey_of(worker).transport
    original = transport.fcall

    def refused(function: str, *args: Any, **kwargs: Any) -> Any:
        if function == "ff_claim_many":
            raise TransportError("auth", "NOPERM no more")
        return original(function, *args, **kwargs)

    transport.fcall = refused
    await submit(engine.backend)
    with pytest.raises(TransportError, match="NOPERM"):
        await run
    assert worker.free == 2
