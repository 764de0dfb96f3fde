"""Members of flows that are held back."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import Blocked
from tests.conformance.test_flow_rules import with_nodes
from tests.support.engine import Engine, unchanged
from tests.support.flows import submitted


async def test_only_the_flow_lets_held_members_go(engine: Engine) -> None:
    flow = await with_nodes(engine, "a", flow={"hold": True})
    unblock = engine.backend.claims.unblock_execution
    answer = await unchanged(engine, lambda: unblock(flow.nodes["a"]))
    assert answer.code == "execution_not_eligible"
    await engine.backend.flows.release_flow(flow.flow_id)
    assert await flow.claim() == ["a"]


async def test_an_operator_holds_a_member_and_lets_it_go(engine: Engine) -> None:
    flow = await submitted(engine, "a>b")
    claims, member = engine.backend.claims, flow.nodes["a"]
    held = await claims.block_execution_for_admission(member, "paused_by_operator")
    assert held == Blocked(member, "paused_by_operator")
    assert await flow.claim() == []
    await claims.unblock_execution(member)
    await flow.end("a")
    assert await flow.claim() == ["b"]


@pytest.mark.parametrize("reason", ["waiting_for_budget", "waiting_for_quota"])
async def test_blocked_members_are_counted(engine: Engine, reason: str) -> None:
    flow = await submitted(engine, "a b")
    await engine.backend.claims.block_execution_for_admission(flow.nodes["a"], reason)
    assert (await flow.snapshot()).members == {"rate_limited": 1, "waiting": 1}
