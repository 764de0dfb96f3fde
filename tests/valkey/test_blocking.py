"""Executions that are held back: what is stored, and members of cancelled flows."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.leases import Unblocked
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from tests.conformance.test_blocking import REASONS
from tests.support.engine import LANE, Engine
from tests.support.flows import set_units, submitted, without_followups


@pytest.mark.parametrize("reason", REASONS)
async def test_blocked_work_is_in_one_index_by_time(engine: Engine, reason: str) -> None:
    execution_id = await engine.create()
    call = engine.backend.transport.call
    await engine.freeze(await engine.now())
    await engine.backend.claims.block_execution_for_admission(execution_id, reason)
    index = keys.lane(execution_id.tag, LANE, REASONS[reason][2].replace("_", ":"))
    page = await call("ZRANGE", index, 0, -1, "WITHSCORES")
    assert page == [[execution_id.encode(), await engine.now()]]
    assert await call("EXISTS", keys.eligible(execution_id.tag, LANE)) == 0
    audit = engine.backend.upkeep.reconcile_execution_index
    assert await audit(execution_id.tag, [execution_id], "check") == ["consistent"]


async def test_the_reconciler_returns_blocked_work_to_its_index(engine: Engine) -> None:
    execution_id = await engine.create()
    await engine.backend.claims.block_execution_for_admission(execution_id, "waiting_for_quota")
    index = keys.lane(execution_id.tag, LANE, "blocked:quota")
    await engine.backend.transport.call("DEL", index)
    audit = engine.backend.upkeep.reconcile_execution_index
    assert await audit(execution_id.tag, [execution_id]) == ["repaired:none>blocked:quota"]
    assert await engine.backend.transport.call("ZCARD", index) == 1


async def test_a_blocked_member_ends_with_its_flow(engine: Engine) -> None:
    await set_units(engine, 1)
    await without_followups(engine)
    flow = await submitted(engine, "a b c d e")
    claims = engine.backend.claims
    for member in flow.nodes.values():
        await claims.block_execution_for_admission(member, "waiting_for_budget")
    await engine.backend.flows.cancel_flow_header(flow.flow_id, "stop")
    key, _ = next(each for each in (await flow.states()).items() if each[1] == "rate_limited")
    member = flow.nodes[key]
    assert await claims.unblock_execution(member) == Unblocked(member, PublicState.CANCELLED)
    assert await flow.state(key) is PublicState.CANCELLED
