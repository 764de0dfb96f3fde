"""A worker that registers lets go what was blocked until one like it comes."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.state import EligibilityState
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
        await idle(engine).scan_once("route_unblocker")

    async def waits() -> bool:
        state = (await engine.vector(execution_id)).eligibility_state
        return state is EligibilityState.ELIGIBLE_NOW

    await until(waits, "the release")


async def test_explanations_name_the_way_out(engine: Engine, make_worker: MakeWorker) -> None:
    client = Client(engine.backend)
    (gpu,) = await submit(engine.backend, policy=GPU)
    (acme,) = await submit(engine.backend, namespace="acme")
    (plain,) = await submit(engine.backend)

    async def text(execution_id: Any) -> str:
        return str(await client.explain(execution_id))

    assert "no live worker serves lane default and offers gpu" in await text(gpu)
    worker = await make_worker(capabilities=["ssd"])
    assert "1 live worker serves lane default, but the best match lacks gpu" in await text(gpu)
    assert "but none serves namespace acme" in await text(acme)
    assert "--namespace acme" in (await client.explain(acme)).next_steps[0]
    assert "it starts as soon as one is free" in await text(plain)
    task = await worker.claim()
    assert task is not None
    assert "It has been running for" in await text(plain)
    await task.complete()
    done = await client.explain(plain)
    assert done.text.startswith("It is completed")
    assert done.next_steps == (f"flowfabric replay {plain.compact}",)
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert "lane default is paused" in await text(gpu)
    await engine.backend.lanes.set_lane_state("default", "active")
    await engine.backend.claims.block_execution_for_admission(
        acme, "waiting_for_quota", "quota p: rate 5 per 60 s"
    )
    assert "waiting for quota: quota p: rate 5 per 60 s" in await text(acme)
