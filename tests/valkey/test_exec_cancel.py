"""cancel_execution: sources, check order, and what it ends."""

from __future__ import annotations

import pytest

from flowfabric.core.contracts.executions import Cancelled
from tests.support.engine import LANE, Engine
from tests.support.executions import ACTIVE, RUNNABLE, Case
from tests.support.storage import indexes


@pytest.mark.parametrize("state", [*RUNNABLE, *ACTIVE])
async def test_an_operator_cancels_from_anywhere(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    outcome = await case.backend.executions.cancel_execution(case.execution_id, "enough")
    assert outcome == Cancelled(case.execution_id)
    assert outcome.public_state.value == "cancelled"
    info = await case.backend.reads.read_execution_info(case.execution_id)
    assert (info.cancellation_reason, info.cancelled_by) == ("enough", "operator_override")
    assert list(await indexes(engine, case.execution_id)) == [f"lane:{LANE}:terminal"]
    assert info.delay_until is None
    assert info.blocking_detail == ""
    for attempt in await case.backend.reads.read_attempts(case.execution_id):
        assert attempt.ended_at is not None
    event = (await engine.events(case.execution_id))[-1]
    assert (event.type, event.get("outcome")) == ("completion", "cancelled")
    assert (event.get("reason"), event.get("source")) == ("cancelled", "operator_override")


async def test_signature_index_is_left(engine: Engine) -> None:
    execution_id = await engine.create(
        policy={"routing_requirements": {"required_capabilities": ["gpu"]}}
    )
    await engine.backend.executions.cancel_execution(execution_id)
    assert list(await indexes(engine, execution_id)) == [f"lane:{LANE}:terminal"]
