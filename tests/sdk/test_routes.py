"""A worker that registers lets go what was blocked until one like it comes."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.state import EligibilityState
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.base import ScanResult
from flowfabric.sdk.client import Client
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.scanning import idle
from tests.support.sdk import submit, until

GPU: dict[str, Any] = {"routing_requirements": {"required_capabilities": ["gpu"]}}


@pytest.mark.parametrize("by", ["registration", "scanner"])
async def test_it_is_let_go_at_once(engine: Engine, make_worker: MakeWorker, by: str) -> None:
    if by == "scanner":
        await make_worker(capabilities=["gpu"])
    (execution_id,) = await submit(engine.backend, policy=GPU)
    await engine.backend.claims.block_route(execution_id)
    if by == "registration":
        await make_worker(capabilities=["gpu"])
    else:
        await idle(engine).scan_once("unblock")

    async def waits() -> bool:
        state = (await engine.vector(execution_id)).eligibility_state
        return state is EligibilityState.ELIGIBLE_NOW

    await until(waits, "the release")


async def test_a_filtered_scanner_lets_its_own_go(engine: Engine) -> None:
    made: dict[str, Any] = {}
    for namespace in ("acme", "other"):
        await engine.backend.workers.register_worker(
            worker_id="w",
            worker_instance_id=namespace,
            lanes=["default"],
            capabilities=["gpu"],
            namespace=namespace,
        )
        (made[namespace],) = await submit(engine.backend, policy=GPU, namespace=namespace)
        await engine.backend.claims.block_route(made[namespace])
    scanners = idle(engine, accept=ScannerFilter(namespace="acme"))
    assert await scanners.scan_once("unblock") == ScanResult(processed=1)
    states = [(await engine.vector(each)).eligibility_state for each in made.values()]
    assert states == [EligibilityState.ELIGIBLE_NOW, EligibilityState.BLOCKED_BY_ROUTE]


async def test_a_draining_worker_is_none_that_could_start_it(
    engine: Engine, make_worker: MakeWorker
) -> None:
    client = Client(engine.backend)
    await make_worker(worker_instance_id="one", capabilities=["gpu"])
    (plain,) = await submit(engine.backend)
    (gpu,) = await submit(engine.backend, policy=GPU)
    await engine.backend.claims.block_route(gpu)
    await engine.backend.workers.drain_worker("one")
    await idle(engine).scan_once("unblock")
    assert (await engine.vector(gpu)).eligibility_state is EligibilityState.BLOCKED_BY_ROUTE
    for execution_id, offers in ((plain, ""), (gpu, " and offers gpu")):
        text = str(await client.explain(execution_id))
        assert f'one is draining, and no live worker serves lane "default"{offers}' in text
    why = await engine.backend.reads.explain_execution(gpu)
    assert why.blocking_reason == "waiting_for_capable_worker"
    assert (why.able_workers, why.in_lane, why.live_workers) == ((), 0, 0)
    # Its signature waits for a capable worker, whatever the record says.
    (other,) = await submit(engine.backend, policy=GPU)
    why = await engine.backend.reads.explain_execution(other)
    assert why.blocking_reason == "waiting_for_capable_worker"


async def test_explanations_name_the_way_out(engine: Engine, make_worker: MakeWorker) -> None:
    client = Client(engine.backend)
    (gpu,) = await submit(engine.backend, policy=GPU)
    (acme,) = await submit(engine.backend, namespace="acme")
    (plain,) = await submit(engine.backend)

    async def text(execution_id: Any) -> str:
        return str(await client.explain(execution_id))

    assert 'no live worker serves lane "default" and offers gpu' in await text(gpu)
    worker = await make_worker(capabilities=["ssd"])
    assert '1 live worker serves lane "default", but the closest match lacks gpu' in await text(gpu)
    assert 'but none serves namespace "acme"' in await text(acme)
    assert "--namespace acme" in (await client.explain(acme)).next_steps[0]
    assert "it starts as soon as this worker is free" in await text(plain)
    task = await worker.claim()
    assert task is not None
    assert "It has been running for" in await text(plain)
    await task.complete()
    done = await client.explain(plain)
    assert done.text == "It completed after 1 attempt. It runs again only if you replay it."
    assert done.next_steps == ()
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert 'lane "default" is paused' in await text(gpu)
    await engine.backend.lanes.set_lane_state("default", "active")
    await engine.backend.claims.block_execution_for_admission(
        acme, "waiting_for_quota", "quota p: rate 5 per 60 s"
    )
    assert "waiting for quota: quota p: rate 5 per 60 s" in await text(acme)
    await engine.backend.executions.cancel_execution(acme, "no budget.")
    ended = "It was cancelled: no budget. It runs again only if you replay it."
    assert await text(acme) == ended
