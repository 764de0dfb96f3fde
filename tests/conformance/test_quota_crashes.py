"""A scheduler or worker that stops between admission, grant, claim and release (07 §13)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import quota_partition
from tests.support.engine import Engine
from tests.support.quotas import SLACK, WINDOW, admit, policy, used

GRANT_MS = 5000
WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
STEPS = ("admit", "grant", "claim", "confirm", "complete", "release")


class Life:
    """One execution from its admission to its release."""

    def __init__(self, engine: Engine, name: str, execution_id: ExecutionId) -> None:
        self._backend = engine.backend
        self._name = name
        self._id = execution_id
        self._grant: Any = None
        self._handle: Handle | None = None

    async def step(self, step: str) -> None:
        claims, quotas = self._backend.claims, self._backend.quotas
        match step:
            case "admit":
                await quotas.check_admission(self._name, self._id, slot_ttl_ms=GRANT_MS)
            case "grant":
                self._grant = await claims.issue_claim_grant(
                    self._id, **WORKER, grant_ttl_ms=GRANT_MS
                )
            case "claim":
                claim = await claims.claim_execution(self._grant, **WORKER, lease_ttl_ms=10**9)
                self._handle = claim.handle
            case "confirm":
                await quotas.confirm_admission(self._name, self._id)
            case "complete":
                assert self._handle is not None
                await self._backend.executions.complete(self._handle)
            case _:
                await quotas.release_admission(self._name, self._id)


async def reconcile(engine: Engine, name: str) -> None:
    number = quota_partition(name, engine.backend.counts)
    await engine.backend.quotas.reconcile_quota_counters(number)


@pytest.mark.parametrize("last", STEPS)
async def test_a_crash_leaves_no_slot_behind(engine: Engine, last: str) -> None:
    name = await policy(engine, max_concurrent=1)
    life = Life(engine, name, await engine.create())
    for step in STEPS[: STEPS.index(last) + 1]:
        await life.step(step)
    if last in ("admit", "grant"):
        # Nobody needs to do anything: the slot ends with the grant.
        await engine.advance(GRANT_MS + 2 * SLACK)
        assert (await used(engine, name))[1] == 0
    await reconcile(engine, name)
    held = 1 if last in ("claim", "confirm") else 0
    assert (await used(engine, name))[1] == held
    # However long it runs, running work keeps its slot.
    await engine.advance(WINDOW)
    await reconcile(engine, name)
    assert (await used(engine, name))[1] == held
    assert await admit(engine, name) == ("concurrency" if held else "admitted")


@pytest.mark.parametrize("crashed_after", ["admit", "grant"])
async def test_the_next_try_uses_the_admission_of_the_one_that_crashed(
    engine: Engine, crashed_after: str
) -> None:
    name = await policy(engine, max_requests_per_window=1, max_concurrent=1)
    execution_id = await engine.create()
    life = Life(engine, name, execution_id)
    for step in STEPS[: STEPS.index(crashed_after) + 1]:
        await life.step(step)
    await engine.advance(GRANT_MS + 2 * SLACK)
    again = Life(engine, name, execution_id)
    for step in STEPS:
        await again.step(step)
    assert await used(engine, name) == (1, 0)


async def test_a_cancelled_grantee_gives_its_slot_back(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=1)
    execution_id = await engine.create()
    life = Life(engine, name, execution_id)
    await life.step("admit")
    await life.step("grant")
    await engine.backend.executions.cancel_execution(execution_id, source="operator_override")
    await engine.advance(GRANT_MS + 2 * SLACK)
    assert await admit(engine, name) == "admitted"
