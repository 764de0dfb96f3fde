"""Work that no live worker can take: how it is shown, and how it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.state import EligibilityState, PublicState
from flowfabric.scheduler.routes import release_routes
from tests.support.claims import BOTH, GPU, claim_many
from tests.support.engine import LANE, Engine, untouched

NOBODY = "no connected worker satisfies required_capabilities"


async def register(engine: Engine, instance: str, *capabilities: str, **options: Any) -> None:
    await engine.backend.workers.register_worker(
        worker_id="w",
        worker_instance_id=instance,
        lanes=options.pop("lanes", [LANE]),
        capabilities=capabilities,
        **options,
    )


async def shown(engine: Engine, execution_id: Any) -> tuple[str | None, str | None]:
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.public_state is PublicState.WAITING
    return snapshot.blocking_reason, snapshot.blocking_detail


BLOCKED = ("waiting_for_capable_worker", NOBODY)
WAITING = ("waiting_for_worker", None)


async def test_it_is_blocked_until_one_worker_covers_it(engine: Engine) -> None:
    """Two halves do not add up; another lane or namespace does not count. Nothing is written."""
    execution_id = await engine.create(policy=BOTH)
    async with untouched(engine):
        assert await shown(engine, execution_id) == BLOCKED
    await register(engine, "half", "gpu")
    await register(engine, "other-half", "cuda")
    await register(engine, "elsewhere", "cuda", "gpu", lanes=["else"])
    await register(engine, "foreign", "cuda", "gpu", namespace="acme")
    assert await shown(engine, execution_id) == BLOCKED
    await register(engine, "whole", "cuda", "gpu")
    assert await shown(engine, execution_id) == WAITING
    await engine.backend.workers.mark_worker_dead("whole")
    assert await shown(engine, execution_id) == BLOCKED


async def test_a_worker_that_is_not_registered_still_gets_it(engine: Engine) -> None:
    execution_id = await engine.create(policy=GPU)
    assert await shown(engine, execution_id) == BLOCKED
    assert (await engine.claim(capabilities=["gpu"])).execution_id == execution_id


async def test_without_requirements_it_just_waits(engine: Engine) -> None:
    assert await shown(engine, await engine.create()) == WAITING
    assert await shown(engine, await engine.create(namespace="acme")) == WAITING


async def test_a_task_that_nobody_knows(engine: Engine) -> None:
    execution_id = await engine.create(execution_kind="resize")
    assert (await claim_many(engine, tasks=["mail"])).unknown_tasks == ("resize",)
    unknown = "no live worker knows task resize"
    assert await shown(engine, execution_id) == (BLOCKED[0], unknown)
    await register(engine, "w-2", tasks=["resize"])
    assert await shown(engine, execution_id) == WAITING


async def test_an_explanation_says_the_same(engine: Engine) -> None:
    execution_id = await engine.create(policy=BOTH)
    await register(engine, "half", "gpu")
    await register(engine, "none")
    why = await engine.backend.reads.explain_execution(execution_id)
    assert (why.blocking_reason, why.blocking_detail) == BLOCKED
    assert (why.missing_capabilities, why.closest_workers) == (("cuda",), ("half",))
    assert (why.live_workers, why.in_lane) == (2, 2)
    await register(engine, "whole", "cuda", "gpu")
    why = await engine.backend.reads.explain_execution(execution_id)
    assert (why.blocking_reason, why.blocking_detail) == ("waiting_for_worker", "")


# --- executions that a caller blocked -------------------------------------------------------


@pytest.mark.parametrize("count", [1, 250])
async def test_those_are_let_go_that_a_worker_covers(engine: Engine, count: int) -> None:
    """Also behind many that stay."""
    block = engine.backend.claims.block_route
    stay = [await engine.create(policy=BOTH) for _ in range(120)]
    stay.append(await engine.create(policy=GPU, namespace="acme"))
    go = [await engine.create(policy=GPU) for _ in range(count)]
    for execution_id in (*stay, *go):
        await block(execution_id, reason_detail=NOBODY)
    places = {go[0].tag: [LANE]}
    assert await release_routes(engine.backend, places) == 0
    await register(engine, "w-2", "gpu")
    assert await release_routes(engine.backend, places) == count
    assert {(await engine.vector(each)).eligibility_state for each in go} == {
        EligibilityState.ELIGIBLE_NOW
    }
    assert {(await engine.vector(each)).eligibility_state for each in stay} == {
        EligibilityState.BLOCKED_BY_ROUTE
    }
    assert await release_routes(engine.backend, places) == 0


async def test_a_block_for_another_reason_stays(engine: Engine) -> None:
    execution_id = await engine.create()
    block = engine.backend.claims.block_execution_for_admission
    await block(execution_id, "paused_by_operator")
    await register(engine, "w-2")
    assert await release_routes(engine.backend, {execution_id.tag: [LANE]}) == 0
