"""`explain` names the budget, the quota or the lane state that keeps an execution from starting."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import ExecutionId, budget_id, quota_id
from flowfabric.sdk.client import Client
from tests.sdk.conftest import MakeWorker
from tests.support.engine import TTL, Engine, refused
from tests.support.flows import ids, submitted
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
        assert '10 of 10 tokens of budget "team" are used; usage is reset at ' in found.text
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
    assert "it starts as soon as this worker is free" in (await client.explain(waiting)).text


@pytest.mark.parametrize("required", [[], ["gpu"]], ids=["any worker", "gpu"])
async def test_a_missing_worker_is_reported_first(engine: Engine, required: list[str]) -> None:
    client = Client(engine.backend)
    await client.create_budget("team", {"tokens": 1})
    await client.report_usage("team", {"tokens": 1})
    policy = {
        "budget_ids": [budget_id("team")],
        "routing_requirements": {"required_capabilities": required},
    }
    (waiting,) = await submit(engine.backend, policy=policy)
    found = await client.explain(waiting)
    assert found.text.startswith('It is waiting: no live worker serves lane "default"')
    assert '. Also, 1 of 1 tokens of budget "team" are used. ' in found.text
    start, change = found.next_steps
    assert start.startswith("flowfabric worker module:app --lanes default")
    assert change == "flowfabric budget raise team tokens=LIMIT"


async def test_every_limit_that_is_reached_is_named(
    engine: Engine, make_worker: MakeWorker
) -> None:
    client = Client(engine.backend)
    for name in ("team", "month"):
        await client.create_budget(name, {"tokens": 1})
        await client.report_usage(name, {"tokens": 1})
    await client.create_quota("maps", max_concurrent=1)
    await limited(engine, quota="maps")
    worker = await make_worker(max_concurrent_tasks=3)
    assert await worker.claim() is not None
    policy = {
        "budget_ids": [budget_id("team"), budget_id("month")],
        "quota_policy_id": quota_id("maps"),
    }
    (waiting,) = await submit(engine.backend, policy=policy)
    assert await worker.claim() is None
    found = await client.explain(waiting)
    assert found.text.startswith('It is rate_limited: 1 of 1 tokens of budget "team" are used')
    assert found.next_steps == (
        "flowfabric budget raise team tokens=LIMIT",
        "flowfabric budget raise month tokens=LIMIT",
        "flowfabric quota show maps",
    )
    # The worker that it would then need has gone meanwhile.
    await client.mark_worker_dead(worker.config.worker_instance_id)
    steps = (await client.explain(waiting)).next_steps
    assert steps == (*found.next_steps, "flowfabric worker module:app --lanes default")


@pytest.mark.parametrize(
    ("limits", "said", "detail"),
    [
        (
            {"max_requests": 1, "per": "10s"},
            'the rate limit of quota "maps" is reached; the next check is at',
            "rate",
        ),
        ({"max_concurrent": 1}, 'every slot of quota "maps" is taken; it starts', "concurrency"),
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
        assert f": {said}" in found.text
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
    assert 'lane "default" is paused (provider is down)' in found.text
    assert found.next_steps == ("flowfabric lane resume default",)
    # A draining lane runs what waits.
    await client.set_lane_state("default", "draining")
    assert "it starts as soon as this worker is free" in (await client.explain(waiting)).text


async def test_a_paused_lane_is_not_the_only_reason(
    engine: Engine, make_worker: MakeWorker
) -> None:
    client = Client(engine.backend)
    await client.create_budget("team", {"tokens": 1})
    await client.report_usage("team", {"tokens": 1})
    await make_worker()
    spent = await limited(engine, budget="team")
    (later,) = await submit(engine.backend, delay_until=await engine.now() + 3_600_000)
    (acme,) = await submit(engine.backend, namespace="acme")
    await client.set_lane_state("default", "paused")
    resume = 'lane "default" is paused. Resume it with `flowfabric lane resume default`. Also, '
    assert (
        f"{resume}it was submitted with a delay; it starts at "
        in (await client.explain(later)).text
    )
    found = await client.explain(spent)
    assert f'{resume}1 of 1 tokens of budget "team" are used' in found.text
    assert found.next_steps == (
        "flowfabric lane resume default",
        "flowfabric budget raise team tokens=LIMIT",
    )
    assert 'but none serves namespace "acme"' in (await client.explain(acme)).text


async def test_a_lost_execution_in_a_paused_lane(engine: Engine, make_worker: MakeWorker) -> None:
    client = Client(engine.backend)
    await make_worker()
    handle = await engine.running()
    await engine.backend.leases.revoke_lease(handle.execution_id)
    await client.set_lane_state("default", "paused")
    found = await client.explain(handle.execution_id)
    assert 'was revoked, and lane "default" is paused. ' in found.text
    assert found.next_steps == ("flowfabric lane resume default",)


async def test_the_suggested_worker_could_take_it(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    (waiting,) = await submit(engine.backend, lane="big jobs", namespace="acme", policy=policy)
    command = "flowfabric worker module:app --lanes 'big jobs' --capabilities gpu --namespace acme"
    assert (await Client(engine.backend).explain(waiting)).next_steps == (command,)


@pytest.mark.parametrize("reason", ["paused_by_operator", "paused_by_policy"])
async def test_who_holds_it_back_can_release_it(engine: Engine, reason: str) -> None:
    (held,) = await submit(engine.backend)
    block = engine.backend.claims.block_execution_for_admission
    await block(held, reason, "under review")
    text = (await Client(engine.backend).explain(held)).text
    assert f"{reason.replace('_', ' ')}: under review. Release it with POST" in text
    assert f"/v1/executions/{held.compact}/unblock" in text


async def test_who_is_held_back_and_lacks_a_worker(engine: Engine, make_worker: MakeWorker) -> None:
    await make_worker()
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    (held,) = await submit(engine.backend, policy=policy)
    block = engine.backend.claims.block_execution_for_admission
    await block(held, "paused_by_operator", "under review")
    found = await Client(engine.backend).explain(held)
    assert found.text.startswith("It is waiting: paused by operator: under review. Release it")
    assert (
        '. Also, 1 live worker serves lane "default", but the closest match lacks gpu' in found.text
    )
    assert found.next_steps == ("flowfabric worker module:app --lanes default --capabilities gpu",)


async def test_a_member_that_was_replayed_without_its_upstream(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.end("a", "cancelled")
    a, b = ids(flow, "a", "b")
    await engine.backend.executions.replay_execution(b)
    found = await Client(engine.backend).explain(b)
    assert "it waits for 1 upstream: a (cancelled)" in found.text
    assert found.next_steps == (f"flowfabric replay {a.compact}",)
    await engine.backend.executions.replay_execution(a)
    assert (await Client(engine.backend).explain(b)).next_steps == ()


async def test_a_dead_worker_and_no_other(engine: Engine, make_worker: MakeWorker) -> None:
    client = Client(engine.backend)
    (running,) = await submit(engine.backend)
    worker = await make_worker()
    assert await worker.claim() is not None
    instance = worker.config.worker_instance_id
    await client.mark_worker_dead(instance, reason="machine lost", revoke_leases=True)
    text = (await client.explain(running)).text
    assert f'the lease of {instance} was revoked, and no live worker serves lane "default"' in text
    await make_worker()
    assert "the next free worker takes it over" in (await client.explain(running)).text


async def test_a_lane_that_waits_after_a_lost_lease(
    engine: Engine, make_worker: MakeWorker
) -> None:
    client = Client(engine.backend)
    await client.set_lane_config("default", reclaim_grace_ms=3_600_000)
    lost = (await engine.running()).execution_id
    await engine.advance(TTL + 1)
    await engine.backend.upkeep.mark_lease_expired_if_due(lost.tag, [lost])
    worker = await make_worker()
    text = (await client.explain(lost)).text
    assert 'w-1 stopped renewing its lease; lane "default" gives it to another worker at ' in text
    await engine.advance(3_600_000)
    assert "; the next free worker takes it over" in (await client.explain(lost)).text
    assert await worker.claim() is not None
