"""Leases are kept whatever user code does, and their loss reaches the handler."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle, Renewed
from flowfabric.core.errors import EngineError, LeaseLost, TransportError
from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.sdk.endings import RunSummary
from flowfabric.sdk.lease_keeper import HeldLease, LeaseKeeper
from flowfabric.sdk.task import ClaimedTask
from tests.sdk.conftest import MakeWorker
from tests.support.admission import limited, quota, slot_taken
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import info, opener, serving, state, submit, until
from tests.support.server import TestServer


class Watcher:
    def __init__(self) -> None:
        self.lost: list[str] = []

    def lease_is_lost(self, code: str, reason: str) -> None:
        self.lost.append(code)


async def one_task(
    make_worker: MakeWorker, engine: Engine, *urls: str, **config: Any
) -> ClaimedTask:
    await submit(engine.backend)
    worker = await make_worker(*urls, **config)
    task = await worker.claim()
    assert task is not None
    return task


async def test_blocked_loop_and_spinning_thread_keep_their_leases(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Three lease periods of time.sleep in a coroutine, while a thread computes in pure Python."""
    blocked, waiting = await submit(engine.backend), await submit(engine.backend, kind="wait")
    worker = await make_worker(lease_ttl_ms=1000, block_limit_ms=60_000, max_concurrent_tasks=2)
    started, release = asyncio.Event(), asyncio.Event()
    spinning = True

    def spin() -> None:
        while spinning:
            pass

    async def wait(task: ClaimedTask) -> None:
        started.set()
        await release.wait()

    async def block(task: ClaimedTask) -> None:
        await started.wait()
        time.sleep(3.2)  # noqa: ASYNC251 - the point of the test
        assert task.is_lease_healthy()
        release.set()

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        async with serving(worker, {"job": block, "wait": wait}) as runtime:
            await until(lambda: runtime.summary.completed == 2, "both completions")
    finally:
        spinning = False
        thread.join()
    for execution_id in (*blocked, *waiting):
        assert (await info(engine.backend, execution_id)).total_attempt_count == 1
    assert worker.keeper.renewed >= 12


@pytest.mark.parametrize(
    ("end", "code"), [("revoke", "lease_revoked"), ("cancel", "execution_not_active")]
)
async def test_lost_lease_cancels_the_handler_and_says_why(
    engine: Engine,
    make_worker: MakeWorker,
    caplog: pytest.LogCaptureFixture,
    end: str,
    code: str,
) -> None:
    caplog.set_level(logging.INFO)
    (execution_id,) = await submit(engine.backend)
    worker = await make_worker(lease_ttl_ms=1000)
    seen: list[Any] = []
    started = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            seen.extend((task.lease_lost, task.is_lease_healthy(), str(error)))
            raise

    async with serving(worker, {"job": handler}) as runtime:
        await started.wait()
        if end == "revoke":
            # Paused, so that this worker does not take it again.
            await engine.backend.lanes.set_lane_state("default", "paused")
            await engine.backend.leases.revoke_lease(execution_id)
        else:
            await engine.backend.executions.cancel_execution(execution_id, "no longer needed")
        counted = RunSummary(abandoned=1) if end == "revoke" else RunSummary(cancelled=1)
        await until(lambda: runtime.summary == counted, "the loss")
        lost, healthy, told = seen
        assert isinstance(lost, LeaseLost)
        assert (lost.code, healthy) == (code, False)
        assert code in told
        logged = "its lease was lost: lease_revoked" if end == "revoke" else "was cancelled"
        assert "(attempt 1" in caplog.text.partition(logged)[2]
        # Not at once: a look for more work holds the permit while it is under way.
        await until(lambda: worker.free == 1, "the permit")
    await engine.backend.lanes.set_lane_state("default", "active")


@pytest.mark.parametrize(
    ("stays", "logged"),
    [
        (True, "stopped: the execution expired (attempt 1"),
        (False, "ended, but nothing was stored: the execution expired (attempt 1"),
    ],
)
async def test_the_log_says_that_the_execution_expired(
    engine: Engine,
    make_worker: MakeWorker,
    caplog: pytest.LogCaptureFixture,
    stays: bool,
    logged: str,
) -> None:
    policy = {"timeout_policy": {"execution_deadline_ms": 60_000}}
    (execution_id,) = await submit(engine.backend, policy=policy)
    worker = await make_worker(lease_ttl_ms=1000 if stays else 60_000)

    async def handler(task: ClaimedTask) -> None:
        await engine.advance(61_000)
        deadline = ExpireReason.EXECUTION_DEADLINE
        await engine.backend.upkeep.expire_execution(execution_id.tag, deadline, [execution_id])
        if stays:
            await asyncio.Event().wait()

    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary == RunSummary(abandoned=1), "the loss")
    assert logged in caplog.text


async def test_operations_fail_fast_after_the_loss(engine: Engine, make_worker: MakeWorker) -> None:
    task = await one_task(make_worker, engine, lease_ttl_ms=1000)
    await engine.backend.leases.revoke_lease(task.execution_id)
    await until(lambda: task.lease_lost is not None, "the loss")
    for operation in (task.complete(), task.update_progress(50), task.renew_lease()):
        with pytest.raises(LeaseLost, match="lease_revoked"):
            await operation


async def test_unreachable_server_ends_the_lease_at_its_local_deadline(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """The keeper's connection is gone; nobody may believe in the lease when it has run out."""
    before = time.monotonic()
    task = await one_task(make_worker, engine, valkey.url, proxy.url, lease_ttl_ms=3000)
    assert task.is_lease_healthy()
    proxy.down()
    # Whatever was renewed until now: from here on it can only run out.
    down, deadline = time.monotonic(), task.held.deadline
    assert before + 3.0 <= deadline <= down + 3.0
    await until(lambda: task.lease_lost is not None, "the loss")
    assert time.monotonic() >= deadline == task.held.deadline
    assert task.lease_lost is not None
    assert task.lease_lost.code == "lease_expired"
    assert not task.is_lease_healthy()
    task.finish("test")


async def test_keeper_reconnects_and_the_lease_lasts(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    task = await one_task(make_worker, engine, valkey.url, proxy.url, lease_ttl_ms=1000)
    keeper = task.held
    for _ in range(3):
        before, accepted = keeper.deadline, proxy.accepted
        proxy.cut()
        await until(lambda seen=before: keeper.deadline > seen, "a renewal")  # type: ignore[misc]
        assert proxy.accepted > accepted
    assert task.is_lease_healthy()
    await task.complete()


async def test_slow_renewal_still_counts(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """An answer later than the interval, but before the lease ran out, keeps it."""
    task = await one_task(make_worker, engine, valkey.url, proxy.url, lease_ttl_ms=5000)
    held = task.held
    proxy.pause()
    await until(lambda: held.renewing, "a renewal under way")
    late = time.monotonic() + 5000 / 3000 * 1.1
    await until(lambda: time.monotonic() > late, "an interval")
    before = held.deadline
    proxy.resume()
    await until(lambda: held.deadline > before, "the renewal")
    assert task.is_lease_healthy()
    assert task.consecutive_renewal_failures == 0
    await task.complete()


async def test_renewals_go_in_batches_over_partitions(engine: Engine, valkey: TestServer) -> None:
    lanes = ("a", "b", "c")
    watcher = Watcher()
    handles: list[Handle] = []
    for lane in lanes:
        await submit(engine.backend, 100, lane=lane)
        handles += [c.handle for c in await engine.claim_all(100, lane=lane, ttl=4000)]
    keeper = LeaseKeeper(opener(valkey.url), 4000)
    await asyncio.to_thread(keeper.start)
    try:
        calls = await fcalls(engine)
        since = time.monotonic()
        held = [keeper.hold(handle, watcher, since) for handle in handles]
        await until(lambda: keeper.renewed >= 900, "three rounds")
        # 300 leases of three partitions, three times: a call each would make 900.
        assert await fcalls(engine) - calls <= 150
        assert all(one.healthy for one in held)
    finally:
        await asyncio.to_thread(keeper.stop)
    assert watcher.lost == []
    assert [await engine.backend.executions.complete(handle) for handle in handles]


async def fcalls(engine: Engine) -> int:
    raw: Any = await engine.backend.transport.call("INFO", "commandstats")
    text = raw if isinstance(raw, str) else raw.decode()
    for line in text.splitlines():
        if line.startswith("cmdstat_fcall:"):
            return int(line.partition("calls=")[2].partition(",")[0])
    return 0


async def test_stop_is_immediate_and_leaves_nothing(
    engine: Engine, make_worker: MakeWorker
) -> None:
    clients = await connections(engine)
    worker = await make_worker(lease_ttl_ms=36_000_000)
    keeper = worker.keeper
    # Held between two looks, the keeper sleeps for twenty minutes.
    keeper.check_every_s = 1200
    await submit(engine.backend)
    task = await worker.claim()
    assert task is not None
    async with asyncio.timeout(30):
        await asyncio.to_thread(keeper.stop)
    await task.complete()
    await worker.aclose()
    assert not keeper.is_alive()
    await until(lambda: same(engine, clients), "closed connections")


async def connections(engine: Engine) -> int:
    raw: Any = await engine.backend.transport.call("INFO", "clients")
    text = raw if isinstance(raw, str) else raw.decode()
    return int(text.partition("connected_clients:")[2].split()[0])


async def same(engine: Engine, clients: int) -> bool:
    return await connections(engine) == clients


async def test_keeper_that_cannot_connect_says_so() -> None:
    async def refused() -> ValkeyBackend:
        raise TransportError("auth", "WRONGPASS")

    keeper = LeaseKeeper(refused, 1000)
    with pytest.raises(TransportError, match="WRONGPASS"):
        await asyncio.to_thread(keeper.start)
    await asyncio.to_thread(keeper.stop)
    assert not keeper.is_alive()


async def test_stop_before_it_is_connected(engine: Engine, proxy: FaultProxy) -> None:
    proxy.pause()
    keeper = LeaseKeeper(opener(proxy.url), 1000)
    starting = asyncio.create_task(asyncio.to_thread(keeper.start))
    await until(lambda: proxy.accepted > 0, "the dial")
    await asyncio.to_thread(keeper.stop)
    await starting
    assert not keeper.is_alive()


# --- the rules, without a clock -------------------------------------------------------------


async def a_lease(engine: Engine) -> tuple[LeaseKeeper, HeldLease, Watcher]:
    handle = await engine.running()
    keeper, watcher = LeaseKeeper(opener("unix:///nowhere"), 30_000), Watcher()
    return keeper, keeper.hold(handle, watcher, time.monotonic()), watcher


async def test_first_renewal_after_one_interval_with_jitter(engine: Engine) -> None:
    handle = await engine.running()
    keeper, watcher = LeaseKeeper(opener("unix:///nowhere"), 30_000), Watcher()
    delays = {keeper.hold(handle, watcher, 1000.0).next_at - 1000.0 for _ in range(200)}
    assert 9.0 <= min(delays) < 9.3
    assert 10.7 < max(delays) <= 11.0


async def test_unhealthy_after_three_failures_and_well_again_after_a_success(
    engine: Engine,
) -> None:
    keeper, held, watcher = await a_lease(engine)
    problem = TransportError("out_of_memory", "no room")
    for failures in (1, 2):
        keeper._failed(held, problem)
        assert (held.failures, held.healthy) == (failures, True)
    keeper._failed(held, problem)
    assert (held.healthy, held.alive) == (False, True)

    class Answers:
        async def renew_many(self, handles: list[Any]) -> list[Renewed]:
            return [Renewed(0, 1) for _ in handles]

    backend: Any = SimpleNamespace(leases=Answers())
    await keeper._renew(backend, [held])
    assert (held.failures, held.healthy) == (0, True)
    assert watcher.lost == []


@pytest.mark.parametrize(
    "code",
    [
        "stale_lease",
        "lease_expired",
        "lease_revoked",
        "execution_not_active",
        "execution_not_found",
    ],
)
async def test_terminal_answers_end_renewal_at_once(engine: Engine, code: str) -> None:
    keeper, held, watcher = await a_lease(engine)
    keeper._failed(held, EngineError(code))
    assert (watcher.lost, len(keeper), held.healthy) == ([code], 0, False)


async def test_other_errors_keep_trying_until_the_deadline(engine: Engine) -> None:
    keeper, held, watcher = await a_lease(engine)
    for _ in range(20):
        keeper._failed(held, TransportError("auth", "WRONGPASS"))
    assert (watcher.lost, len(keeper)) == ([], 1)
    held.deadline = time.monotonic()
    keeper._failed(held, TransportError("auth", "WRONGPASS"))
    assert (watcher.lost, len(keeper)) == (["lease_expired"], 0)


async def test_late_success_does_not_revive_a_lost_lease(engine: Engine) -> None:
    keeper, held, watcher = await a_lease(engine)
    answered = asyncio.Event()

    class Slow:
        async def renew_many(self, handles: list[Any]) -> list[Renewed]:
            await answered.wait()
            return [Renewed(0, 1) for _ in handles]

    backend: Any = Slow()
    renewal = asyncio.create_task(keeper._renew(backend, [held]))
    await until(lambda: not answered.is_set(), "a start")
    keeper._lose(held, "lease_revoked", "by hand")
    answered.set()
    await renewal
    assert (held.healthy, watcher.lost) == (False, ["lease_revoked"])


async def test_state_after_a_loss_is_reclaimable(engine: Engine, make_worker: MakeWorker) -> None:
    """Nobody renews any more: another worker gets it as a new attempt."""
    task = await one_task(make_worker, engine, lease_ttl_ms=1000)
    worker = task._owner
    await asyncio.to_thread(worker.keeper.stop)
    await engine.advance(1500)
    tag, ids = task.execution_id.tag, [str(task.execution_id)]
    marked = await engine.backend.upkeep.mark_lease_expired_if_due(tag, ids)
    assert marked, marked
    claim = await engine.claim(instance="other")
    assert (claim.handle.kind, claim.handle.attempt_index) == ("reclaimed", 1)
    with pytest.raises(EngineError, match="stale_lease"):
        await task.complete(b"late")
    await engine.backend.executions.complete(claim.handle)
    assert await state(engine.backend, task.execution_id) == "completed"


async def test_renewals_confirm_the_slot_of_a_quota(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """As after a confirmation that failed: the execution runs, and nothing counts it."""
    policy = await quota(engine, cap=1)
    execution_id = await limited(engine, quota=policy)
    worker = await make_worker(lease_ttl_ms=30_000)
    task = await worker.claim()
    assert task is not None
    await engine.backend.quotas.release_admission(policy, execution_id)
    worker.keeper.renew_all()
    await slot_taken(engine, policy)
    await task.complete()
