"""Completing a member and claiming what it released, in one call (08 B1)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import AnyOf, FlowGraph, Submitted
from flowfabric.core.contracts.leases import ClaimedMany
from flowfabric.engine.api.executions import Completion
from tests.support.engine import Engine
from tests.support.flows import TestFlow, graph, submitted


async def complete(flow: TestFlow, keys: str, room: int = 1, **want: Any) -> ClaimedMany:
    """Complete these members in one call that claims up to `room`."""
    items = [Completion(flow.claims[key].handle, key.encode()) for key in keys]
    outcomes, claimed = await flow.backend.claims.complete_and_claim(
        flow.tag, items, flow.engine.want(**want), room
    )
    assert outcomes == [None] * len(items)
    known = {execution_id: key for key, execution_id in flow.nodes.items()}
    flow.claims |= {known[c.execution_id]: c for c in claimed.claims if c.execution_id in known}
    return claimed


def keys_of(flow: TestFlow, claimed: ClaimedMany) -> list[str]:
    known = {execution_id: key for key, execution_id in flow.nodes.items()}
    return [known.get(claim.execution_id, "other") for claim in claimed.claims]


async def test_each_end_of_a_chain_brings_the_next_member(engine: Engine) -> None:
    flow = await submitted(engine, "a>b>c", input_name="previous")
    assert await flow.claim() == ["a"]
    for key, following in (("a", ["b"]), ("b", ["c"]), ("c", [])):
        claimed = await complete(flow, key)
        assert keys_of(flow, claimed) == following
        assert claimed.remaining == 0
        for claim in claimed.claims:
            assert claim.inputs.inputs["previous"].result == key.encode()
            assert await flow.state(following[0]) == "active"
    assert (await flow.snapshot()).members == {"completed": 3}
    assert await flow.recount() == {"completed": 3}


async def test_what_there_is_no_room_for_waits_for_others(engine: Engine) -> None:
    flow = await submitted(engine, "a>b a>c a>d")
    await flow.claim()
    claimed = await complete(flow, "a", room=2)
    assert len(claimed.claims) == 2
    assert claimed.remaining == 1
    assert (await flow.snapshot()).members == await flow.recount()
    assert len(await flow.claim()) == 1


async def test_lost_work_may_be_better_than_what_was_released(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    lost = NewExecution(execution_id=flow.new_member_id(), execution_kind="job", priority=5)
    await engine.backend.executions.create_execution(lost)
    other = engine.want(instance="w-2")
    assert len((await engine.backend.claims.claim_many(other, flow.tag, 1)).claims) == 1
    await engine.backend.leases.revoke_lease(lost.execution_id)
    claimed = await complete(flow, "a")
    assert [claim.handle.kind for claim in claimed.claims] == ["reclaimed"]
    assert claimed.remaining == 1


@pytest.mark.parametrize("first", [True, False])
async def test_the_best_execution_comes_first(engine: Engine, *, first: bool) -> None:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    other = NewExecution(
        execution_id=flow.new_member_id(), execution_kind="job", priority=5 if first else 0
    )
    await engine.advance(10)
    await engine.backend.executions.create_execution(other)
    claimed = await complete(flow, "a")
    assert keys_of(flow, claimed) == (["other"] if first else ["b"])
    assert claimed.remaining == 1
    assert (await flow.snapshot()).members == await flow.recount()


async def test_members_that_end_in_the_same_call_are_not_claimed(engine: Engine) -> None:
    # `y` is released by `a`, and no longer needed when `b` decides `z`.
    flow = await submitted(engine, "a>y y>z b>z", {"z": AnyOf("cancel_remaining")})
    await flow.claim()
    claimed = await complete(flow, "ab", room=2)
    assert keys_of(flow, claimed) == ["z"]
    assert await flow.states() == {
        "a": "completed",
        "b": "completed",
        "y": "cancelled",
        "z": "active",
    }
    assert (await flow.snapshot()).members == await flow.recount()


async def test_a_join_that_two_completions_meet_fires_once(engine: Engine) -> None:
    flow = await submitted(engine, "a>z b>z", {"z": AnyOf("let_run")})
    await flow.claim()
    claimed = await complete(flow, "ab", room=2)
    assert keys_of(flow, claimed) == ["z"]
    (group,) = (await flow.snapshot()).edge_groups
    assert (group.satisfied_count, group.group_state) == (2, "satisfied")


@pytest.mark.parametrize("configured", [False, True])
async def test_a_join_that_cancels_its_siblings_keeps_how_it_was_decided(
    engine: Engine, *, configured: bool
) -> None:
    # Of a lane with settings, the claim reads the index: what was kept is stored there first.
    if configured:
        await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=5)
    joins = {"z": AnyOf("cancel_remaining")}
    flow = await submitted(engine, "a>z b>z", joins)
    await flow.claim()
    claimed = await complete(flow, "a")
    assert keys_of(flow, claimed) == ["z"]
    inputs = await engine.backend.flows.get_inputs(flow.nodes["z"])
    assert inputs.fired_by == flow.nodes["a"]
    assert await flow.states() == {"a": "completed", "b": "cancelled", "z": "active"}
    (group,) = (await flow.snapshot()).edge_groups
    assert (group.satisfied_count, group.group_state) == (1, "satisfied")


async def test_members_of_other_lanes_and_tasks_wait_for_their_workers(engine: Engine) -> None:
    plan = graph("a>b a>c a>d")
    kinds = {"b": {"lane_id": "slow"}, "c": {"execution_kind": "unknown"}}
    nodes = tuple(msgspec.structs.replace(n, **kinds.get(n.key, {})) for n in plan.nodes)
    flow = await _submitted(engine, msgspec.structs.replace(plan, nodes=nodes))
    await flow.claim()
    claimed = await complete(flow, "a", room=3, tasks=("job",))
    assert keys_of(flow, claimed) == ["d"]
    assert await flow.states() == {"a": "completed", "b": "waiting", "c": "waiting", "d": "active"}


async def test_a_paused_lane_keeps_what_was_released(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert keys_of(flow, await complete(flow, "a")) == []
    assert await flow.state("b") == "waiting"
    await engine.backend.lanes.set_lane_state("default", "active")
    assert await flow.claim() == ["b"]


async def test_a_draining_worker_does_not_get_what_it_released(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    await flow.claim()
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"], namespaces=["*"]
    )
    await engine.backend.workers.drain_worker("w-1")
    claimed = await complete(flow, "a")
    assert (keys_of(flow, claimed), claimed.draining) == ([], True)
    assert await flow.state("b") == "waiting"
    other = engine.want(instance="w-2")
    assert len((await engine.backend.claims.claim_many(other, flow.tag, 1)).claims) == 1


async def _submitted(engine: Engine, plan: FlowGraph) -> TestFlow:
    outcome = await engine.backend.flows.submit_flow(plan)
    assert isinstance(outcome, Submitted)
    return TestFlow(engine, outcome)
