"""The transition table: every listed row, and every pair that is not listed changes nothing."""

from __future__ import annotations

import pytest

from flowfabric.core.state import AttemptState, LifecyclePhase, StateVector
from tests.conformance.test_exec_transitions import (
    OPERATIONS,
    TABLE,
    start,
)
from tests.support.engine import LANE, Engine
from tests.support.state_rules import index_suffix, violations
from tests.support.storage import indexes, record

KEEPS_STATE = {"progress", "change_priority"}


def _expected_indexes(vector: StateVector, operation: str) -> set[str]:
    lane = f"lane:{LANE}"
    expected = {f"{lane}:{index_suffix(vector)}"}
    if vector.lifecycle_phase is LifecyclePhase.ACTIVE:
        expected |= {"attempt_timeout"}
        if vector.attempt_state is AttemptState.RUNNING_ATTEMPT:
            expected |= {"lease_expiry", "worker:w-1:leases"}
        else:
            expected |= {f"{lane}:reclaimable"}
            # Marking keeps the worker's entry: it says who lost the lease.
            if operation == "mark_expired":
                expected |= {"worker:w-1:leases"}
    if vector.lifecycle_phase is not LifecyclePhase.TERMINAL:
        expected |= {"execution_deadline"}
    return expected


@pytest.mark.parametrize(("state", "operation"), sorted(TABLE))
async def test_listed_transition(engine: Engine, state: str, operation: str) -> None:
    case = await start(engine, state, operation)
    before = await record(engine, case.execution_id)
    earliest = await engine.now()
    await OPERATIONS[operation](case)

    info = await engine.backend.reads.read_execution_info(case.execution_id)
    expected = StateVector.from_code(TABLE[state, operation])
    assert info.state_vector == expected
    assert info.public_state is expected.public_state
    assert violations(info.state_vector) == []

    held = await indexes(engine, case.execution_id)
    assert set(held) == _expected_indexes(expected, operation)
    _check_scores(held, info.created_at, await record(engine, case.execution_id))

    fields = await engine.backend.reads.read_exec_core_fields(
        case.execution_id, ["last_transition_at", "last_mutation_at", "completed_at", "delay_until"]
    )
    assert int(fields["last_mutation_at"] or 0) >= earliest
    if operation in KEEPS_STATE:
        assert int(fields["last_transition_at"] or 0) < earliest
    else:
        assert int(fields["last_transition_at"] or 0) >= earliest
    terminal = expected.lifecycle_phase is LifecyclePhase.TERMINAL
    assert (fields["completed_at"] is not None) == terminal
    assert (fields["delay_until"] is not None) == (expected.public_state.value == "delayed")
    assert info.created_at == before["created_at"]
    if "started_at" in before:
        assert info.started_at == before["started_at"]


def _check_scores(held: dict[str, float | None], created_at: str, fields: dict[str, str]) -> None:
    priority = int(fields.get("priority", "0"))
    scores = {
        f"lane:{LANE}:eligible": int(created_at) - priority * 10**12,
        f"lane:{LANE}:reclaimable": int(created_at) - priority * 10**12,
        f"lane:{LANE}:delayed": int(fields.get("delay_until", "0")),
        f"lane:{LANE}:active": int(fields.get("lease_expires_at", "0")),
        "lease_expiry": int(fields.get("lease_expires_at", "0")),
        f"lane:{LANE}:blocked:dependencies": int(created_at),
        f"lane:{LANE}:terminal": int(fields.get("completed_at", "0")) + 86_400_000,
        "execution_deadline": int(fields.get("execution_deadline_at", "0")),
    }
    for name, score in held.items():
        if name in scores:
            assert score == scores[name], name
