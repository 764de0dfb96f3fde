"""The engine on a cluster: every call stays inside one slot."""

from __future__ import annotations

import asyncio

import flowfabric as ff
from flowfabric.core.conditions import Single
from flowfabric.core.contracts.executions import Created, NewExecution, RetryScheduled
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.contracts.suspension import Suspended
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import parse_policy
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.supervisor import ScannerSupervisor
from tests.support.cluster import TestCluster
from tests.support.sdk import until

LANES = [f"lane-{number}" for number in range(12)]


async def create(backend: ValkeyBackend, lane: str) -> ExecutionId:
    retry = {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}
    outcome = await backend.executions.create_execution(
        NewExecution(
            execution_id=ExecutionId.solo(lane, backend.counts),
            execution_kind="job",
            lane_id=lane,
            idempotency_key=lane,
            tags={"app.lane": lane},
            policy=parse_policy({"retry_policy": retry}),
        )
    )
    assert isinstance(outcome, Created)
    return outcome.execution_id


async def test_a_whole_life_on_every_node(backend: ValkeyBackend) -> None:
    for lane in LANES:
        execution_id = await create(backend, lane)
        want = ClaimRequest(lane, "w", "w-1")
        (claim,) = (await backend.claims.claim_many(want, execution_id.tag, 5)).claims
        await backend.leases.renew(claim.handle)
        await backend.executions.progress(claim.handle, 10, "on")
        await backend.streams.append_frame(claim.handle, Frame(payload=b"out"))
        failed = await backend.executions.fail(claim.handle, "x", "transient")
        assert isinstance(failed, RetryScheduled)
        supervisor = ScannerSupervisor(backend)
        while (await backend.reads.read_execution_state(execution_id)).value != "waiting":
            await supervisor.scan_once("delayed_promoter")
        (claim,) = (await backend.claims.claim_many(want, execution_id.tag, 5)).claims
        parked = await backend.suspensions.suspend(claim.handle, condition=Single("go"))
        assert isinstance(parked, Suspended)
        details = parked.details
        await backend.signals.deliver_signal(
            execution_id, details.waitpoint_id, details.waitpoint_token, "go", payload=b"1"
        )
        (claim,) = (await backend.claims.claim_many(want, execution_id.tag, 5)).claims
        assert [
            signal.payload for signal in await backend.waitpoints.observe_signals(claim.handle)
        ] == [b"1"]
        await backend.executions.complete(claim.handle, b"done")
        assert await backend.reads.get_execution_result(execution_id) == b"done"
        page = await backend.streams.read_stream(execution_id, 0)
        assert [frame.payload for frame in page.frames] == [b"out"]
    listed = await backend.listings.list_executions(limit=100)
    assert len(listed.executions) == len(LANES)
    await ScannerSupervisor(backend).scan_once("index_reconciler")


async def test_an_unknown_task_finds_its_worker_on_a_cluster(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    old, new = ff.Fabric(cluster.url), ff.Fabric(cluster.url)

    @old.task(name="old")
    async def known() -> None: ...

    @new.task(name="new, later")
    async def unknown() -> str:
        return "found"

    async with old, new, old.worker(), asyncio.timeout(50):
        run = await new.submit(unknown)

        async def offered() -> bool:
            return (await backend.reads.explain_execution(run.id)).offered_to is not None

        await until(offered, "the offer")
        async with new.worker():
            assert await run.result() == "found"
            # Both idle: a ring for the task wakes the one that knows it.
            assert await (await new.submit(unknown)).result() == "found"


async def test_an_application_runs_on_a_cluster(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    app = ff.Fabric(cluster.url)

    @app.task(lane=LANES[0])
    async def double(number: int) -> int:
        return 2 * number

    @app.task(lane=LANES[1])
    def shout(text: str) -> str:
        return text.upper()

    async with app, app.worker(), asyncio.timeout(50):
        runs = await app.submit_many(double, [[number] for number in range(50)])
        loud = await app.submit(shout, "hello")
        assert [await run.result() for run in runs] == [2 * number for number in range(50)]
        assert await loud.result() == "HELLO"
