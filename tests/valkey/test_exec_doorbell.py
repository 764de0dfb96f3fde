"""Every way into an eligible or reclaimable index rings the lane's doorbell, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import Submitted
from flowfabric.core.policy import parse_policy
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, TTL, Engine
from tests.support.executions import BACKOFF, Case, mark, promote
from tests.support.flows import TestFlow, graph
from tests.support.leases import grant


async def rung(engine: Engine, lane: str = LANE) -> list[int]:
    """Partitions that rang since the last look."""
    call = engine.backend.transport.call
    members: Any = await call("ZRANGE", keys.wake(lane), 0, -1)
    await call("DEL", keys.wake(lane))
    return [int(member) for member in members]


async def test_create(engine: Engine) -> None:
    execution_id = await engine.create()
    assert await rung(engine) == [execution_id.partition]
    await engine.create(delay_until=await engine.now() + 60_000)
    assert await rung(engine) == []
    other = await engine.create(lane="a:b")
    assert await rung(engine, "a:b") == [other.partition]
    assert await rung(engine) == []


@pytest.mark.parametrize("state", ["delayed", "retry_delayed", "paused_delayed"])
async def test_promotion(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await rung(engine)
    assert await promote(engine, case.execution_id) == "not_yet_due"
    assert await rung(engine) == []
    await engine.advance(5000)
    assert await promote(engine, case.execution_id) == "promoted"
    assert await rung(engine) == [case.execution_id.partition]


async def test_giving_back(engine: Engine) -> None:
    handle = await engine.running()
    await rung(engine)
    await engine.backend.executions.delay(handle, 1)
    assert await rung(engine) == [handle.execution_id.partition]
    handle = (await engine.claim()).handle
    await rung(engine)
    await engine.backend.executions.delay(handle, await engine.now() + BACKOFF)
    assert await rung(engine) == []


async def test_lost_leases(engine: Engine) -> None:
    handle = await engine.running()
    await rung(engine)
    await engine.advance(TTL)
    await mark(engine, handle.execution_id)
    assert await rung(engine) == [handle.execution_id.partition]
    await engine.claim()
    await rung(engine)
    await engine.backend.leases.revoke_lease(handle.execution_id)
    assert await rung(engine) == [handle.execution_id.partition]


async def test_a_returned_grant(engine: Engine) -> None:
    held = await grant(engine, await engine.create())
    await rung(engine)
    await engine.backend.claims.release_grant(held)
    assert await rung(engine) == [held.execution_id.partition]
    await engine.backend.claims.release_grant(held)
    assert await rung(engine) == []


async def test_a_lease_of_an_unknown_task(engine: Engine) -> None:
    handle = await engine.running(execution_kind="new")
    await rung(engine)
    await engine.backend.executions.release_unknown(handle, "new")
    assert await rung(engine, keys.bell(LANE, "task:new")) == [handle.execution_id.partition]
    assert await rung(engine) == []


async def test_replay(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    await rung(engine)
    await engine.backend.executions.replay_execution(case.execution_id)
    assert await rung(engine) == [case.execution_id.partition]


async def test_unblocking(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.claims.block_execution_for_admission(execution_id, "waiting_for_quota")
    await rung(engine)
    await engine.backend.claims.unblock_execution(execution_id)
    assert await rung(engine) == [execution_id.partition]


async def test_silence(engine: Engine) -> None:
    handle = await engine.running(policy={"retry_policy": {}})
    await rung(engine)
    await engine.backend.executions.progress(handle, 1)
    await engine.backend.executions.fail(handle, "x", "transient")
    await engine.backend.executions.change_priority(handle.execution_id, 5)
    await engine.backend.executions.cancel_execution(handle.execution_id)
    other = await engine.running()
    await rung(engine)
    await engine.block(other.execution_id)
    await engine.backend.executions.wait_children(other)
    assert await rung(engine) == []


@pytest.mark.parametrize("lacks", ["a capability", "the task"])
async def test_what_a_completing_worker_releases_for_others(engine: Engine, lacks: str) -> None:
    """Such a member wakes a worker at once, though the call that released it also claims."""
    plan = graph("a>b")
    policy = parse_policy({"routing_requirements": {"required_capabilities": ["gpu"]}})
    changed = {"policy": policy} if lacks == "a capability" else {"execution_kind": "resize"}
    nodes = (plan.nodes[0], msgspec.structs.replace(plan.nodes[1], **changed))
    outcome = await engine.backend.flows.submit_flow(msgspec.structs.replace(plan, nodes=nodes))
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    await flow.claim()
    bell = keys.bell(LANE, "gpu" if lacks == "a capability" else "task:resize")
    await rung(engine, LANE)
    _, claimed = await engine.backend.claims.complete_and_claim(
        flow.tag, [Completion(flow.claims["a"].handle)], engine.want(tasks=["job"]), 1
    )
    assert claimed.claims == []
    wakes: Any = await engine.backend.transport.call("KEYS", "ff:wake:*")
    assert [key.decode() for key in wakes] == [keys.wake(bell)]


async def test_work_that_a_claim_leaves_in_another_index(engine: Engine) -> None:
    """It wakes a worker that may take it, though the claim saw the whole index."""
    for token in "abc":
        await engine.create(policy={"routing_requirements": {"required_capabilities": [token]}})
        await engine.advance(1)
        await rung(engine, keys.bell(LANE, token))
    taken = await engine.claim_all(2, capabilities=["a", "b", "c"])
    assert len(taken) == 2
    assert [len(await rung(engine, keys.bell(LANE, token))) for token in "abc"] == [0, 0, 1]


async def test_a_released_member_that_the_claim_leaves(engine: Engine) -> None:
    """The call that released it took better work instead."""
    outcome = await engine.backend.flows.submit_flow(graph("a>b"))
    assert isinstance(outcome, Submitted)
    flow = TestFlow(engine, outcome)
    await flow.claim()
    other = NewExecution(execution_id=flow.new_member_id(), execution_kind="job", priority=5)
    await engine.backend.executions.create_execution(other)
    await rung(engine)
    _, claimed = await engine.backend.claims.complete_and_claim(
        flow.tag, [Completion(flow.claims["a"].handle)], engine.want(), 1
    )
    assert [claim.execution_id for claim in claimed.claims] == [other.execution_id]
    assert len(await rung(engine)) == 1
