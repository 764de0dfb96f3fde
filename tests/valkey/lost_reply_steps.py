"""Recording a step, to be done with and without the reply."""

from __future__ import annotations

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.steps import Recorded, StepOutcome
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import Engine
from tests.valkey.lost_reply_case import Case


async def running(engine: Engine) -> Handle:
    fixed = ExecutionId.parse("{fp:86}:00000000-0000-4000-8000-000000000001")
    return await engine.running(execution_id=fixed)


async def with_pending_step(engine: Engine) -> Handle:
    handle = await running(engine)
    await engine.backend.steps.record_step(handle.execution_id, handle, "s", status="pending")
    return handle


async def record(backend: ValkeyBackend, handle: Handle) -> StepOutcome:
    return await backend.steps.record_step(handle.execution_id, handle, "s", result=b"r")


def recorded(outcome: StepOutcome) -> int:
    """A repeat finds what the first call recorded, which counts as success (11 §17.1)."""
    if isinstance(outcome, Recorded):
        return outcome.seq
    assert outcome.record.belongs_to(lease_epoch=1, attempt_index=0)
    assert (outcome.record.status, outcome.record.result) == ("done", b"r")
    return outcome.record.seq


STEP_CASES = {
    "record_step": Case("ff_record_step", running, record, recorded),
    "record_step_end": Case("ff_record_step", with_pending_step, record, recorded),
}
