"""`explain` names the budget, the quota or the lane state that keeps an execution from starting."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import ExecutionId, budget_id, quota_id
from flowfabric.sdk.client import Client
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine, refused
from tests.support.sdk import submit


async def limited(engine: Engine, **names: str) -> ExecutionId:
    """An execution that names a budget, a quota or both by their names."""
    policy: dict[str, object] = {}
    if "budget" in names:
        policy["budget_ids"] = [budget_id(names["budget"])]
    if "quota" in names:
        policy["quota_policy_id"] = quota_id(names["quota"])
    (execution_id,) = await submit(engine.backend, policy=policy)
    return execution_id


async def test_an_exhausted_budget_before_and_after_a_claim(
    engine: Engine, make_worker: MakeWorker
) -> None:
    client = Client(engine.backend)
    await client.create_budget("team", {"tokens": 10}, every="1h")
    await client.report_usage("team", {"tokens": 10})
    waiting = await limited(engine, budget="team")
    worker = await make_worker()
    for _ in range(2):
        found = await client.explain(waiting)
        assert "budget team: 10 of 10 tokens are used; usage is reset at " in found.text
        assert found.next_steps == ("flowfabric budget raise team tokens=LIMIT",)
        (spent,) = found.limits.budgets
        assert (spent.name, spent.used) == ("team", 10)
        assert spent.next_reset_at is not None
        # The first look was at an execution that no claim had seen yet.
        assert await worker.claim() is None
    info = await engine.backend.reads.read_execution_info(waiting)
    assert info.blocking_detail == "budget team: tokens 10/10"
    await refused(client.delete_budget("team"), "budget_attach_conflict")
    await client.update_budget("team", {"tokens": 20})
    assert "it starts as soon as one is free" in (await client.explain(waiting)).text


async def test_what_lacks_a_worker_says_so_first(engine: Engine) -> None:
    client = Client(engine.backend)
    await client.create_budget("team", {"tokens": 1})
    await client.report_usage("team", {"tokens": 1})
    waiting = await limited(engine, budget="team")
    assert "no live worker serves lane default" in (await client.explain(waiting)).text


@pytest.mark.parametrize(
    ("limits", "said", "detail"),
    [
        (
            {"max_requests": 1, "per": "10s"},
            "the rate limit is reached; the next check is at",
            "rate",
        ),
        ({"max_concurrent": 1}, "every slot is taken; it starts when a running", "concurrency"),
    ],
)
async def test_a_full_quota_before_and_after_a_claim(
    engine: Engine, make_worker: MakeWorker, limits: dict[str, object], said: str, detail: str
) -> None:
    client = Client(engine.backend)
    await client.create_quota("maps", **limits)  # type: ignore[arg-type]
    await limited(engine, quota="maps")
    worker = await make_worker(max_concurrent_tasks=3)
    assert await worker.claim() is not None
    waiting = await limited(engine, quota="maps")
    for _ in range(2):
        found = await client.explain(waiting)
        assert f"quota maps: {said}" in found.text
        assert found.next_steps == ("flowfabric quota show maps",)
        assert found.limits.quota is not None
        assert (found.limits.quota.name, found.limits.quota.reason) == ("maps", detail)
        assert await worker.claim() is None
    info = await engine.backend.reads.read_execution_info(waiting)
    assert (info.blocking_detail or "").startswith(f"quota maps: {detail} limit (")


async def test_a_paused_lane_and_its_reason(engine: Engine, make_worker: MakeWorker) -> None:
    client = Client(engine.backend)
    (waiting,) = await submit(engine.backend)
    await make_worker()
    await client.set_lane_state("default", "paused", "provider is down")
    found = await client.explain(waiting)
    assert "lane default is paused (provider is down)" in found.text
    assert found.next_steps == ("flowfabric lane resume default",)
    # A draining lane runs what waits.
    await client.set_lane_state("default", "draining")
    assert "it starts as soon as one is free" in (await client.explain(waiting)).text


async def test_a_dead_worker_and_no_other(engine: Engine, make_worker: MakeWorker) -> None:
    client = Client(engine.backend)
    (running,) = await submit(engine.backend)
    worker = await make_worker()
    assert await worker.claim() is not None
    instance = worker.config.worker_instance_id
    await client.mark_worker_dead(instance, reason="machine lost", revoke_leases=True)
    text = (await client.explain(running)).text
    assert f"the lease of {instance} was revoked, and no live worker serves lane default" in text
    await make_worker()
    assert "the next free worker takes it over" in (await client.explain(running)).text
