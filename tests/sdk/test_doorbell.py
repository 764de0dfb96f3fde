"""Idle workers sleep, wake at once, and do not wake each other for nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from flowfabric.core.capabilities import Offer
from flowfabric.engine.valkey.keys import bell, wake
from flowfabric.sdk.runtime import WorkerRuntime
from flowfabric.sdk.task import ClaimedTask
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.leases import grant
from tests.support.lua_keys import BELLS
from tests.support.sdk import claims_of, serving, submit, until
from tests.support.storage import blocked_clients, commands


def sleeping(engine: Engine, count: int) -> Any:
    async def asleep() -> bool:
        return await blocked_clients(engine.backend) == count

    return asleep


async def nothing(task: ClaimedTask) -> None:
    pass


async def test_idle_worker_costs_at_most_five_commands_a_second(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Doorbell, sweep, heartbeat and scanners together, while the bell stays silent twice."""
    worker = await make_worker(scanners=True)
    lane = claims_of(worker).lanes["default"]
    async with serving(worker, {"job": nothing}) as runtime:
        await until(sleeping(engine, 1), "an idle worker")
        # The first looks find out what there is to scan.
        await until(lambda: all_scanned(runtime), "a look by every scanner")
        before, started = await commands(engine.backend), time.monotonic()
        for _ in range(2):
            seen = lane.swept_at
            await until(lambda seen=seen: lane.swept_at != seen, "a sweep")  # type: ignore[misc]
        used, seconds = await commands(engine.backend) - before - 1, time.monotonic() - started
    assert used / seconds <= 5.0, f"{used} commands in {seconds:.1f} s"


def all_scanned(runtime: WorkerRuntime) -> bool:
    scanners: Any = runtime._scanners
    supervisor = scanners.supervisor
    return supervisor is not None and all(s.cycles for s in supervisor.status().values())


async def test_wakes_at_once(engine: Engine, make_worker: MakeWorker) -> None:
    """By the ring: without one, it would look again in an hour."""
    worker = await make_worker(claim_poll_interval_ms=3_600_000)
    started = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        started.set()

    async with serving(worker, {"job": handler}):
        for partition in (None, 3, 200) * 5:
            await until(sleeping(engine, 1), "an idle worker")
            started.clear()
            await submit(engine.backend, partition=partition)
            async with asyncio.timeout(30):
                await started.wait()


async def test_one_ring_wakes_one_worker(engine: Engine, make_worker: MakeWorker) -> None:
    workers = [await make_worker() for _ in range(5)]
    bells = [worker.backend.wakeups.listen(["default"]) for worker in workers]
    waits = [asyncio.create_task(bell.wait(30.0)) for bell in bells]
    await until(sleeping(engine, 5), "five idle workers")
    (execution_id,) = await submit(engine.backend)
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await until(sleeping(engine, 4), "four still asleep")
    assert [one.result() for one in done] == [[("default", execution_id.tag)]]
    assert len(pending) == 4
    for wait in pending:
        wait.cancel()
    await asyncio.wait(pending)
    for listener in bells:
        await listener.aclose()


OFFERS = {
    "plain": Offer("", ["default"]),
    "gpu": Offer("gpu", ["default"]),
    "both": Offer("cuda,gpu", ["default"]),
    "acme": Offer("gpu", ["acme"]),
    "all": Offer("", None),
}
GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


@pytest.mark.parametrize("known", [True, False], ids=["known bell", "new bell"])
@pytest.mark.parametrize(
    ("fields", "heard_by"),
    [
        ({"policy": GPU}, {"gpu", "both"}),
        ({"policy": GPU, "namespace": "acme"}, {"acme"}),
        ({"namespace": "acme"}, {"acme", "all"}),
        ({"namespace": "other"}, {"all"}),
        ({}, {"plain", "gpu", "both", "all"}),
    ],
    ids=["gpu", "gpu in acme", "acme", "other", "plain"],
)
async def test_a_ring_wakes_a_worker_that_can_take_the_work(
    engine: Engine,
    make_worker: MakeWorker,
    fields: dict[str, Any],
    heard_by: set[str],
    *,
    known: bool,
) -> None:
    """One that may, and nobody else. Those who listen already learn of a new bell."""
    worker = await make_worker()
    if known:
        await submit(engine.backend, **fields)
        await engine.claim_all(capabilities=["gpu"])
        await engine.backend.transport.call("DEL", *await wakes(engine))
    bells = {name: worker.backend.wakeups.listen(["default"]) for name in OFFERS}
    waits: dict[asyncio.Task[Any], str] = {}
    for number, (name, listener) in enumerate(bells.items()):
        listener.hear(OFFERS[name])
        waits[asyncio.create_task(listener.wait(30.0))] = name
        await until(sleeping(engine, number + 1), "one more idle worker")
    (execution_id,) = await submit(engine.backend, **fields)
    (woken,), _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    assert waits[woken] in heard_by
    assert woken.result() == [("default", execution_id.tag)]
    await until(sleeping(engine, len(bells) - 1), "the others asleep")
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    for listener in bells.values():
        await listener.aclose()


async def wakes(engine: Engine) -> list[Any]:
    found: Any = await engine.backend.transport.call("KEYS", wake("*"))
    return found


async def test_a_bell_that_did_not_ring_for_an_hour_is_forgotten(engine: Engine) -> None:
    """With its rings: its next one is news again."""
    call = engine.backend.transport.call
    await submit(engine.backend, policy=GPU)
    await engine.advance(3_600_001)
    await submit(engine.backend, namespace="acme")
    assert await call("ZRANGE", BELLS, 0, -1) == [b"default\x1facme "]
    assert await wakes(engine) == [wake(bell("default", "acme ")).encode()]


async def test_ring_is_passed_on_to_the_worker_that_can_answer_it(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Four workers without the capability sleep in front of the one that has it."""
    poor = [await make_worker(claim_poll_interval_ms=30_000) for _ in range(4)]
    able = await make_worker(claim_poll_interval_ms=30_000, capabilities=["gpu"])
    done = asyncio.Event()

    async def handler(task: ClaimedTask) -> None:
        done.set()

    runtimes = [serving(worker, {"job": handler}) for worker in poor]
    for number, runtime in enumerate(runtimes):
        await runtime.__aenter__()
        await until(sleeping(engine, number + 1), "an idle worker")
    async with serving(able, {"job": handler}) as runtime:
        await until(sleeping(engine, 5), "five idle workers")
        needs = {"routing_requirements": {"required_capabilities": ["gpu"]}}
        await submit(engine.backend, policy=needs)
        async with asyncio.timeout(5):
            await done.wait()
        await until(lambda: runtime.summary.completed == 1, "the completion")
    for stopped in runtimes:
        await stopped.__aexit__(None, None, None)


async def test_ring_nobody_can_answer_ends(engine: Engine, make_worker: MakeWorker) -> None:
    """The only work is reserved: each worker hears the ring once."""
    reserved = await engine.create()
    await grant(engine, reserved, grant_ttl_ms=60_000)
    workers = [await make_worker(claim_poll_interval_ms=30_000) for _ in range(3)]
    runtimes = [serving(worker, {"job": nothing}) for worker in workers]
    for runtime in runtimes:
        await runtime.__aenter__()
    await until(sleeping(engine, 3), "idle workers")
    before = await commands(engine.backend)
    assert await engine.backend.wakeups.ring_waiting({reserved.tag: ["default"]}) == 1
    quiet = await settled(engine)
    assert quiet - before < 150
    for runtime in runtimes:
        await runtime.__aexit__(None, None, None)


async def settled(engine: Engine) -> int:
    """The command count once it stands still."""
    last = -1
    while (now := await commands(engine.backend)) != last + 1:
        last = now
        await asyncio.sleep(0.1)
    return now


async def test_full_worker_leaves_rings_to_others(engine: Engine, make_worker: MakeWorker) -> None:
    """It hears the bell with a permit free, and has none when the ring arrives."""
    busy = await make_worker(claim_poll_interval_ms=30_000)
    release = asyncio.Event()
    started: list[str] = []

    async def handler(task: ClaimedTask) -> None:
        started.append(task._owner.config.worker_instance_id)  # type: ignore[attr-defined]
        await release.wait()

    async with serving(busy, {"job": handler}):
        await until(sleeping(engine, 1), "an idle worker")
        # Its only permit goes, but its wait for a ring goes on.
        taken = busy.claims.reserve(1)
        await submit(engine.backend)
        await until(lambda: rung(engine), "the ring passed back")
        free = await make_worker(claim_poll_interval_ms=30_000)
        async with serving(free, {"job": handler}):
            await until(lambda: len(started) == 1, "the other worker")
            release.set()
        assert started == [free.config.worker_instance_id]
        busy.claims.free += taken


async def test_rings_are_in_the_order_of_the_servers_clock(engine: Engine) -> None:
    """The clocks differ by an hour: a ring that is passed back still comes after the others."""
    bell = engine.backend.wakeups.listen(["default"])
    for partition in (3, 4):
        await engine.advance(3_600_000)
        await submit(engine.backend, partition=partition)
    ((_, heard),) = await bell.wait(30.0)
    assert heard == "{fp:3}"
    await engine.advance(1000)
    before = await engine.now()
    assert await bell.peek() == [("default", "{fp:4}")]
    assert await engine.backend.wakeups.ring_waiting({heard: ["default"]}) == 1
    scored: Any = await engine.backend.transport.call(
        "ZRANGE", wake("default"), 0, -1, "WITHSCORES"
    )
    assert [ring for ring, _ in scored] == [b"4", b"3"]
    assert before <= scored[-1][1] <= await engine.now()
    await bell.aclose()


async def test_nothing_rings_where_no_work_is_left(engine: Engine) -> None:
    bell = engine.backend.wakeups.listen(["default"])
    (execution_id,) = await submit(engine.backend)
    ((lane_id, tag),) = await bell.wait(30.0)
    await engine.backend.executions.cancel_execution(execution_id)
    assert await engine.backend.wakeups.ring_waiting({tag: [lane_id]}) == 0
    assert not await rung(engine)
    await bell.aclose()


async def rung(engine: Engine) -> bool:
    return await engine.backend.transport.call("EXISTS", wake("default")) == 1


async def test_busy_worker_does_not_overlook_other_partitions(
    engine: Engine, make_worker: MakeWorker
) -> None:
    """Home never runs dry, so it never listens; a ring and a lost ring both come through."""
    worker = await make_worker(max_concurrent_tasks=4, claim_poll_interval_ms=50)
    seen: set[str] = set()
    stop = False

    async def handler(task: ClaimedTask) -> None:
        seen.add(task.execution_id)
        if not stop and task.execution_id.tag == claims_of(worker).lanes["default"].home:
            await submit(engine.backend, 2)

    await submit(engine.backend, 20)
    async with serving(worker, {"job": handler}) as runtime:
        await until(lambda: runtime.summary.completed > 50, "a busy worker")
        (rings,) = await submit(engine.backend, partition=11)
        await until(lambda: rings in seen, "the other partition")
        (silent,) = await submit(engine.backend, partition=211)
        await engine.backend.transport.call("DEL", wake("default"))
        await until(lambda: silent in seen, "the silent partition")
        stop = True
