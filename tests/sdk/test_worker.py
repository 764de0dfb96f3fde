"""A worker process: connecting, registering, claiming within its permits, closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Granted
from flowfabric.core.errors import (
    ConfigError,
    EngineError,
    TransportError,
    WorkerAtCapacity,
)
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey.keys import wake
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.flows import submitted
from tests.support.proxy import FaultProxy
from tests.support.sdk import (
    claims_of,
    config,
    opener,
    seeded,
    serving,
    state,
    submit,
    until,
    valkey_of,
)
from tests.support.server import TestServer

# --- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"lanes": []}, None),
        ({"lanes": [""]}, "lanes"),
        ({"lease_ttl_ms": 999}, "lease_ttl_ms"),
        ({"lease_ttl_ms": True}, "lease_ttl_ms"),
        ({"claim_poll_interval_ms": 0}, "claim_poll_interval_ms"),
        ({"capabilities": ["a,b"]}, "capabilities"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_instance_id": "has space"}, "worker_instance_id"),
        ({"namespace": "{x}"}, "namespace"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_dialled(
    settings: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**settings)
    assert caught.value.field == field


def test_derived_settings() -> None:
    made = WorkerConfig(lease_ttl_ms=1000, max_concurrent_tasks=-3)
    assert (made.permits, made.renewal_interval_ms, made.liveness_ttl_ms) == (1, 333, 2000)
    assert WorkerConfig().worker_instance_id != WorkerConfig().worker_instance_id


# --- connecting -----------------------------------------------------------------------------


async def test_registered_while_connected(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(
        worker_id="pool", worker_instance_id="pool-1", lanes=["a", "b"], capabilities=["gpu"]
    )
    (entry,) = await engine.backend.workers.list_workers()
    assert (entry.worker_id, entry.worker_instance_id) == ("pool", "pool-1")
    assert (entry.lanes, entry.capabilities) == (("a", "b"), ("gpu",))
    await worker.aclose()
    assert await engine.backend.workers.list_workers() == []


async def test_connects_by_url(engine: Engine, valkey: TestServer) -> None:
    async with await Worker.connect(config(), valkey.url) as worker:
        assert worker.backend.counts == engine.backend.counts
        assert await worker.claim() is None


async def test_instance_id_in_use_until_closed(engine: Engine, make_worker: MakeWorker) -> None:
    first = await make_worker(worker_instance_id="one")
    with pytest.raises(ConfigError, match="in use") as caught:
        await make_worker(worker_instance_id="one")
    assert caught.value.field == "worker_instance_id"
    await first.aclose()
    await make_worker(worker_instance_id="one")


async def test_failed_connect_leaves_the_id_free(engine: Engine, valkey: TestServer) -> None:
    """The worker's own connection works, that of its lease keeper does not."""
    good = opener(valkey.url)
    calls = 0

    async def connect() -> Backend:
        nonlocal calls
        calls += 1
        if calls == 1:
            return await good()
        raise TransportError("auth", "WRONGPASS")

    with pytest.raises(TransportError, match="WRONGPASS"):
        await Worker.connect(config(worker_instance_id="one"), connect)
    assert await engine.backend.workers.list_workers() == []


async def test_connection_lost_while_connecting(
    engine: Engine, make_worker: MakeWorker, proxy: FaultProxy
) -> None:
    """A restart of the server under a starting worker is no reason to give up."""
    proxy.drop_next_reply(b"ff:config:partitions")
    worker = await make_worker(proxy.url)
    assert proxy.dropped == 1
    assert await worker.claim() is None


async def test_heartbeat_registers_again(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(worker_instance_id="one", lease_ttl_ms=1000)
    await engine.backend.workers.mark_worker_dead("one")
    assert await engine.backend.workers.list_workers() == []

    async def back() -> bool:
        return [w.worker_instance_id for w in await engine.backend.workers.list_workers()] == [
            "one"
        ]

    await until(back, "the registration")
    await worker.aclose()
    assert not await back()


async def test_close_gives_leases_back_and_is_repeatable(
    engine: Engine, make_worker: MakeWorker
) -> None:
    ids = await submit(engine.backend, 3)
    worker = await make_worker(max_concurrent_tasks=3)
    tasks = await worker.claim_many()
    assert len(tasks) == 3
    await worker.aclose()
    await worker.aclose()
    for execution_id in ids:
        assert await state(engine.backend, execution_id) == "waiting"
    assert worker.free == 3


# --- claiming -------------------------------------------------------------------------------


async def test_never_more_than_the_permits(engine: Engine, make_worker: MakeWorker) -> None:
    await submit(engine.backend, 10)
    worker = await make_worker(max_concurrent_tasks=4)
    tasks = await worker.claim_many(100)
    assert (len(tasks), worker.free) == (4, 0)
    assert await worker.claim() is None
    assert await worker.claim_many() == []
    await tasks[0].complete()
    more = await worker.claim_many()
    assert len(more) == 1
    for task in (*tasks[1:], *more):
        await task.complete()


async def test_parallel_claims_share_the_permits(engine: Engine, make_worker: MakeWorker) -> None:
    await submit(engine.backend, 20)
    worker = await make_worker(max_concurrent_tasks=5)
    found = await asyncio.gather(*(worker.claim() for _ in range(20)))
    tasks = [task for task in found if task is not None]
    assert (len(tasks), worker.free) == (5, 0)
    assert len({task.execution_id for task in tasks}) == 5
    for task in tasks:
        await task.complete()


async def test_lanes_take_turns(engine: Engine, make_worker: MakeWorker) -> None:
    for lane in ("a", "b", "c"):
        await submit(engine.backend, 30, lane=lane)
    worker = await make_worker(lanes=["a", "b", "c"])
    served: list[str] = []
    for _ in range(30):
        task = await worker.claim_next()
        assert task is not None
        served.append(task.lane_id)
        await task.complete()
    assert {lane: served.count(lane) for lane in "abc"} == {"a": 10, "b": 10, "c": 10}


async def test_two_lanes_many_partitions_none_starves(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Both lanes have constant work at home; single executions elsewhere must come through."""
    spread = range(0, 256, 16)
    lonely: set[str] = set()
    for lane in ("a", "b"):
        await submit(engine.backend, 200, lane=lane)
        for partition in spread:
            lonely |= set(await submit(engine.backend, lane=lane, partition=partition))
        await engine.backend.transport.call("DEL", wake(lane))
    worker = await make_worker(lanes=["a", "b"], claim_poll_interval_ms=1)
    for _ in range(400):
        task = await worker.claim()
        if task is None:
            break
        lonely.discard(task.execution_id)
        await task.complete()
        if not lonely:
            break
    assert lonely == set()


async def test_sweep_finds_work_anywhere_without_a_ring(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker()
    for partition in (0, 37, 255):
        (execution_id,) = await submit(engine.backend, partition=partition)
        await engine.backend.transport.call("DEL", wake("default"))
        task = None
        for _ in range(256 // 32 + 1):
            task = await worker.claim()
            if task is not None:
                break
        assert task is not None
        assert task.execution_id == execution_id
        await task.complete()


@contextlib.contextmanager
def unanswered(worker: Worker, proxy: FaultProxy) -> Generator[None]:
    """A call inside is so slow that the worker gives up on it; the server runs it afterwards."""
    transport = valkey_of(worker).transport
    proxy.pause()
    transport._request_timeout = 0.2
    with pytest.raises(TransportError) as caught:
        yield
    transport._request_timeout = 5.0
    assert caught.value.ambiguous
    proxy.resume()


async def test_lost_claim_reply_gives_the_same_leases_again(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    await submit(engine.backend, 5)
    worker = await make_worker(proxy.url, valkey.url, max_concurrent_tasks=3)
    home = claims_of(worker).lanes["default"].home
    proxy.drop_next_reply(b"ff_claim_many")
    tasks, more = await claims_of(worker).claim_at("default", home, 2)
    assert (len(tasks), more, {t.lease_epoch for t in tasks}) == (2, True, {1})
    for task in tasks:
        await task.complete()
    # Now so slow that the call gives up: the next one repeats the same request.
    with unanswered(worker, proxy):
        await claims_of(worker).claim_at("default", home, 3)
    assert worker.free == 3
    taken = worker.claims.reserve(2)
    again, more = await claims_of(worker).claim_at("default", home, 3)
    worker.claims.free += taken
    # Only one permit was left, so the other two leases were given back.
    assert (len(again), more, {t.lease_epoch for t in again}) == (1, False, {1})
    await again[0].complete()
    rest = await worker.claim_many()
    assert [t.lease_epoch for t in rest] == [2, 2]
    for task in rest:
        await task.complete()


async def test_a_completing_call_without_an_answer_leaves_no_lease_idle(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    await submit(engine.backend, 2)
    worker = await make_worker(proxy.url, valkey.url, max_concurrent_tasks=1)
    (task,) = await worker.claim_many(1)
    lane, tag = task.handle.lane_id, task.execution_id.tag
    with unanswered(worker, proxy):
        await worker.claims.complete(lane, tag, [Completion(task.handle)], lambda: False)
    worker.claims.free = 1
    (following,) = await worker.claim_many(1)
    assert following.lease_epoch == 1
    assert await state(engine.backend, task.execution_id) == "completed"
    for each in (task, following):
        await each.complete()


async def test_no_lease_is_forgotten_with_a_connection(
    engine: Engine, make_worker: MakeWorker, valkey: TestServer, proxy: FaultProxy
) -> None:
    """Many claims were under way: each is repeated, and its leases are those that it took."""
    worker = await make_worker(proxy.url, valkey.url, max_concurrent_tasks=40, lease_ttl_ms=60_000)
    await submit(engine.backend, 400)
    runs: Counter[str] = Counter()
    rate = seeded("no_lease_is_forgotten")

    async def job(task: ClaimedTask) -> None:
        runs[task.execution_id] += 1
        # Ends one by one, so that each claims its own successor.
        await asyncio.sleep(rate.uniform(0.02, 0.07))

    async with serving(worker, {"job": job}) as runtime:
        await until(lambda: len(runs) > 100, "the middle")
        proxy.mute()
        await until(lambda: proxy.dropped > 2, "lost replies")
        proxy.cut()
        # Far sooner than a lease lapses.
        await until(lambda: runtime.summary.completed == 400, "the end", 30)
    assert set(runs.values()) == {1}


async def test_what_another_worker_must_take_is_not_asked_for_again_and_again(
    engine: Engine, make_worker: MakeWorker
) -> None:
    (execution_id,) = await submit(
        engine.backend,
        policy={"routing_requirements": {"required_capabilities": ["gpu"]}},
    )
    gone = await make_worker(capabilities=["gpu"])
    task = await gone.claim()
    assert task is not None
    await engine.backend.leases.revoke_lease(execution_id)
    worker = await make_worker()
    claims_of(worker).lanes["default"].add(execution_id.tag)
    assert await worker.claim() is None
    assert claims_of(worker).lanes.next() is None
    await task.discard()


# --- grants -------------------------------------------------------------------------------


async def test_claim_from_grant(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(worker_id="w", worker_instance_id="w-1")
    (execution_id,) = await submit(engine.backend)
    grant = await grant_for(engine, execution_id)
    task = await worker.claim_from_grant("default", grant)
    assert (task.execution_id, worker.free) == (execution_id, 0)
    await task.complete()
    with pytest.raises(EngineError):
        await worker.claim_from_grant("default", grant)
    assert worker.free == 1


async def grant_for(engine: Engine, execution_id: Any) -> Any:
    return await engine.backend.claims.issue_claim_grant(
        execution_id, worker_id="w", worker_instance_id="w-1", grant_ttl_ms=10_000
    )


async def test_paused_attempt_is_resumed_through_its_grant(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker(worker_id="w", worker_instance_id="w-1")
    (execution_id,) = await submit(engine.backend)
    first = await worker.claim()
    assert first is not None
    await first.delay_execution(1)
    task = await worker.claim_from_grant("default", await grant_for(engine, execution_id))
    assert (task.attempt_id, task.lease_epoch) == (first.attempt_id, 2)
    await task.complete()


async def test_full_worker_leaves_the_grant_untouched(
    engine: Engine, make_worker: MakeWorker
) -> None:
    worker = await make_worker(worker_id="w", worker_instance_id="w-1")
    await submit(engine.backend)
    busy = await worker.claim()
    assert busy is not None
    (execution_id,) = await submit(engine.backend)
    grant = await grant_for(engine, execution_id)
    before = await engine.dump()
    with pytest.raises(WorkerAtCapacity) as caught:
        await worker.claim_from_grant("default", grant)
    assert caught.value.retryable
    assert await engine.dump() == before
    await busy.complete()
    task = await worker.claim_from_grant("default", grant)
    await task.complete()


async def test_reclaim_grant(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(worker_id="w", worker_instance_id="w-1")
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    granted = await engine.backend.claims.issue_reclaim_grant(
        handle.execution_id, worker_id="w", worker_instance_id="w-1", grant_ttl_ms=10_000
    )
    assert isinstance(granted, Granted)
    task = await worker.claim_from_reclaim_grant(granted.grant)
    assert isinstance(task, ClaimedTask)
    assert (task.attempt_index, task.lease_epoch, worker.free) == (1, 2, 0)
    with pytest.raises(WorkerAtCapacity):
        await worker.claim_from_reclaim_grant(granted.grant)
    await task.complete()
    lost = await worker.claim_from_reclaim_grant(granted.grant)
    assert not isinstance(lost, ClaimedTask)
    assert worker.free == 1


# --- flows ----------------------------------------------------------------------------------


async def test_completing_a_member_claims_the_one_that_it_releases(
    engine: Engine, make_worker: MakeWorker
) -> None:
    flow = await submitted(engine, "a>b>c")
    worker = await make_worker(scanners=False, max_concurrent_tasks=1)
    claims_of(worker).lanes["default"].add(flow.tag)
    (task,) = await worker.claim_many(1)
    for key in "bc":
        item = Completion(task.handle)
        outcomes, claimed = await worker.claims.complete(
            "default", flow.tag, [item], lambda: False, of_flow=True
        )
        assert outcomes == [None]
        task.finish("complete")
        (task,) = claimed()
        assert task.execution_id == flow.nodes[key]
        # No ring and no sweep led there.
        assert not claims_of(worker).lanes["default"].hinted
    await task.complete()
