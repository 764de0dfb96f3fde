"""Tasks that a worker does not know wait for one that does (04 S6b)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Claim, ClaimedMany, Handle, NotReclaimable
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policy import parse_policy
from flowfabric.scheduler.grants import NoWork, WorkerGrants
from tests.support.claims import GPU, claim_many, create_many, ids
from tests.support.engine import TTL, Engine, refused, unchanged, untouched
from tests.support.executions import mark
from tests.support.leases import WORKER

RETRY = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 1000}}}


async def left_to_others(engine: Engine, **fields: Any) -> ExecutionId:
    """An execution of the task `new` that only met a worker with another task."""
    execution_id = await engine.create(execution_kind="new", **fields)
    found = await claim_many(engine, capabilities=["gpu"], instance="old-1", tasks=["old"])
    assert found == ClaimedMany([], 0, ("new",))
    return execution_id


async def only_known_workers_get(engine: Engine, execution_id: ExecutionId) -> Claim:
    """Claim it with a worker that knows the task; no other gets it."""
    async with untouched(engine):
        assert await claim_many(engine) == ClaimedMany([], 0)
        assert await claim_many(engine, tasks=["old"]) == ClaimedMany([], 0)
    claim = await engine.claim(instance="new-1", tasks=["new"], capabilities=["gpu"])
    assert claim.execution_id == execution_id
    return claim


# --- claims -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, GPU], ids=["plain", "with_capabilities"])
async def test_an_unknown_task_waits_for_a_worker_that_knows_it(
    engine: Engine, policy: dict[str, Any] | None
) -> None:
    execution_id = await left_to_others(engine, policy=policy)
    claim = await only_known_workers_get(engine, execution_id)
    # Nothing was spent on the worker that did not know it.
    assert (claim.handle.kind, claim.attempt_index, claim.handle.lease_epoch) == ("fresh", 0, 1)
    assert [event.type for event in await engine.events(execution_id)] == ["acquired"]
    await engine.backend.executions.complete(claim.handle)


async def test_it_takes_its_own_work_out_of_a_backlog_of_others(engine: Engine) -> None:
    names = [f"other {n}, %" for n in range(3)]
    others = [await engine.create(execution_kind=names[n % 3], priority=9) for n in range(60)]
    mine = await engine.create(execution_kind="mine")
    found = await claim_many(engine, 1, tasks=["mine"])
    assert ids(found.claims) == [mine]
    assert sorted(found.unknown_tasks) == names
    assert set(ids((await claim_many(engine, 100, tasks=names)).claims)) == set(others)


async def test_a_long_backlog_of_others_is_passed_in_steps(engine: Engine) -> None:
    await create_many(engine, 1000, priority=1)
    mine = await engine.create(execution_kind="mine")
    steps = 1
    while not (found := await claim_many(engine, 5, tasks=["mine"])).claims:
        assert found.unknown_tasks == ("job",)
        assert found.worth_repeating
        steps += 1
    assert ids(found.claims) == [mine]
    assert 1 < steps < 10
    assert len((await claim_many(engine, 10, tasks=["job"])).claims) == 10


@pytest.mark.parametrize(
    "kind", ["a,b", "100%", "%2C", "task:x", "ünïcode", "\x00\x1f {fp:1}", "-", "x" * 1024]
)
async def test_a_task_of_any_name_is_found_again(engine: Engine, kind: str) -> None:
    execution_id = await engine.create(execution_kind=kind)
    assert (await claim_many(engine, tasks=["a", "b", "x"])).unknown_tasks == (kind,)
    assert ids((await claim_many(engine, tasks=["a", kind])).claims) == [execution_id]


async def test_a_worker_without_the_mark_takes_every_task(engine: Engine) -> None:
    execution_id = await engine.create(execution_kind="anything")
    assert ids((await claim_many(engine)).claims) == [execution_id]


async def test_requirements_come_before_the_task(engine: Engine) -> None:
    """An execution that the worker may not take at all is not its business."""
    execution_id = await engine.create(execution_kind="new", policy=GPU)
    async with untouched(engine):
        assert await claim_many(engine, tasks=["old"]) == ClaimedMany([], 0)
    assert ids((await claim_many(engine, capabilities=["gpu"])).claims) == [execution_id]


async def test_a_completing_call_leaves_them_to_others_too(engine: Engine) -> None:
    await engine.create(execution_kind="old", priority=1)
    held = await engine.claim(tasks=["old"])
    unknown = await engine.create(execution_kind="new")
    claims = engine.backend.claims
    tag, want = held.execution_id.tag, engine.want(tasks=["old"])
    outcomes, claimed = await claims.complete_and_claim(tag, [], want, 5)
    assert (outcomes, claimed) == ([], ClaimedMany([], 0, ("new",)))
    assert ids((await claim_many(engine, tasks=["new"])).claims) == [unknown]
    await engine.backend.executions.complete(held.handle)


@pytest.mark.parametrize("namespace", ["default", "acme"])
async def test_the_most_signatures_of_a_lane_are_those_that_people_chose(
    engine: Engine, namespace: str
) -> None:
    """Unknown tasks neither use up the limit nor hide a worker's own."""
    for n in range(400):
        await engine.create(execution_kind=f"t{n}", namespace=namespace)
    while (await claim_many(engine, 100, tasks=["none"])).unknown_tasks:
        pass
    gpu = await engine.create(policy=GPU, execution_kind="t7")
    own = [f"t{n}" for n in range(350, 400)]
    assert len((await claim_many(engine, tasks=own, namespaces=[namespace])).claims) == 50
    assert ids((await claim_many(engine, capabilities=["gpu"])).claims) == [gpu]


# --- what keeps the requirement -----------------------------------------------------------


async def test_retries_delays_and_replays_keep_it(engine: Engine) -> None:
    backend, execution_id = engine.backend, await left_to_others(engine, policy=RETRY)
    claim = await only_known_workers_get(engine, execution_id)
    await backend.executions.fail(claim.handle, "again", "transient")
    await engine.advance(1001)
    await backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    claim = await only_known_workers_get(engine, execution_id)
    await backend.executions.delay(claim.handle, 1)
    claim = await only_known_workers_get(engine, execution_id)
    assert (claim.handle.kind, claim.attempt_index) == ("resumed", 1)
    await backend.executions.complete(claim.handle)
    await backend.executions.replay_execution(execution_id)
    await backend.executions.change_priority(execution_id, 7)
    await only_known_workers_get(engine, execution_id)


@pytest.mark.parametrize("loss", ["expired", "revoked"])
async def test_a_lost_lease_waits_for_a_worker_that_knows_the_task(
    engine: Engine, loss: str
) -> None:
    execution_id = await engine.create(execution_kind="new")
    await engine.claim(tasks=["new"])
    if loss == "expired":
        await engine.advance(TTL + 1)
        await mark(engine, execution_id)
    else:
        await engine.backend.leases.revoke_lease(execution_id)
    assert (await claim_many(engine, tasks=["old"])).unknown_tasks == ("new",)
    claim = await only_known_workers_get(engine, execution_id)
    assert (claim.handle.kind, claim.attempt_index) == ("reclaimed", 1)


# --- a task that is already held ------------------------------------------------------------


async def held(engine: Engine, **fields: Any) -> Handle:
    await engine.create(execution_kind="new", **fields)
    return (await engine.claim(instance="old-1")).handle


async def test_a_held_task_is_released_without_spending_its_attempt(engine: Engine) -> None:
    handle = await held(engine)
    released = await engine.backend.executions.release_unknown(handle, "new")
    assert (released.execution_id, released.public_state.value) == (handle.execution_id, "waiting")
    acquired, event = await engine.events(handle.execution_id)
    assert (event.type, event.get("reason")) == ("released", "unknown_task")
    claim = await only_known_workers_get(engine, handle.execution_id)
    assert (claim.handle.kind, claim.attempt_index, claim.handle.lease_epoch) == ("resumed", 0, 2)
    assert claim.handle.attempt_id == acquired.get("attempt_id") == handle.attempt_id


async def test_only_its_own_task_can_be_released(engine: Engine) -> None:
    handle = await held(engine)
    release = engine.backend.executions.release_unknown
    problem = await unchanged(engine, lambda: release(handle, "other"))
    assert problem.code == "invalid_input"
    assert problem.detail == "kind: the task of the execution is new"


# --- grants -------------------------------------------------------------------------------


async def test_grants_cover_the_task_as_claims_do(engine: Engine) -> None:
    execution_id = await left_to_others(engine)
    claims = engine.backend.claims
    problem = await refused(
        claims.issue_claim_grant(execution_id, **WORKER, worker_tasks=["old"]),
        "capability_mismatch",
    )
    assert problem.detail == "task:new"
    grants = WorkerGrants(engine.backend)
    assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()
    grant = await grants.claim_for_worker("default", "w", "w-1", worker_tasks=["new", "old"])
    assert not isinstance(grant, NoWork)
    assert grant.execution_id == execution_id


async def test_reclaim_grants_too(engine: Engine) -> None:
    execution_id = await left_to_others(engine)
    await only_known_workers_get(engine, execution_id)
    await engine.backend.leases.revoke_lease(execution_id)
    claims = engine.backend.claims
    outcome = await claims.issue_reclaim_grant(execution_id, **WORKER)
    assert outcome == NotReclaimable(execution_id, "capability_mismatch: task:new")
    outcome = await claims.issue_reclaim_grant(execution_id, **WORKER, worker_tasks=["new"])
    assert outcome.kind == "granted"


# --- names and diagnosis --------------------------------------------------------------------


async def test_nobody_else_names_task_capabilities(engine: Engine) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["task:new"]}}
    problem = await refused(engine.create(policy=policy), "invalid_capabilities")
    assert problem.detail == "required:reserved prefix"
    register = engine.backend.workers.register_worker
    problem = await refused(
        register(worker_id="w", worker_instance_id="w", lanes=["a"], capabilities=["task:new"]),
        "invalid_capabilities",
    )
    assert problem.detail == "worker:reserved prefix"


async def register(engine: Engine, instance: str, *tasks: str, **options: Any) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id=instance, lanes=["default"], tasks=tasks, **options
    )


async def test_the_registry_lists_the_tasks_of_a_worker(engine: Engine) -> None:
    tasks = ("100% ünïcode", "a, b")
    await register(engine, "w-1", *tasks, capabilities=["gpu"], takes_other_tasks=False)
    await register(engine, "w-2")
    one, two = await engine.backend.workers.list_workers()
    assert (one.tasks, one.takes_other_tasks, one.capabilities) == (tasks, False, ("gpu",))
    assert (two.tasks, two.takes_other_tasks) == ((), True)


async def test_it_says_that_nobody_knows_the_task(engine: Engine) -> None:
    execution_id = await left_to_others(engine)
    explain = engine.backend.reads.explain_execution
    why = await explain(execution_id)
    assert why.blocking_reason == "waiting_for_capable_worker"
    assert why.blocking_detail == "no live worker knows task new"
    assert (why.unknown_task, why.offered_to, why.able_workers) == ("new", "old-1", ())
    # One that takes any task does not know this one.
    await register(engine, "any")
    await register(engine, "old-1", "old", takes_other_tasks=False)
    assert (await explain(execution_id)).unknown_task == "new"
    await register(engine, "new-1", "new", takes_other_tasks=False)
    why = await explain(execution_id)
    assert (why.blocking_reason, why.blocking_detail) == ("waiting_for_worker", "")
    assert (why.unknown_task, why.offered_to, why.able_workers) == (None, "old-1", ("new-1",))


async def test_it_says_so_before_anyone_was_offered_it(engine: Engine) -> None:
    execution_id = await engine.create(execution_kind="new")
    explain = engine.backend.reads.explain_execution
    assert (await explain(execution_id)).unknown_task is None
    await register(engine, "old-1", "old", takes_other_tasks=False)
    assert (await explain(execution_id)).blocking_detail == "no live worker knows task new"
    await register(engine, "any")
    why = await explain(execution_id)
    assert (why.blocking_reason, why.able_workers) == ("waiting_for_worker", ("any",))


async def test_the_policy_still_says_only_what_people_required(engine: Engine) -> None:
    execution_id = await left_to_others(engine, policy=GPU)
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert info.required_capabilities == ("gpu",)
    assert await engine.backend.reads.read_execution_policy(execution_id) == parse_policy(GPU)
