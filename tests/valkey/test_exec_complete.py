"""complete_execution and complete_many."""

from __future__ import annotations

from typing import Any

from flowfabric.engine.valkey import keys
from tests.support.engine import LANE, Engine
from tests.support.executions import POLICY
from tests.support.storage import indexes, record


async def test_what_a_completion_leaves(engine: Engine) -> None:
    handle = await engine.running(policy=POLICY)
    await engine.advance(50)
    await engine.backend.executions.complete(handle, b"r")
    info = await engine.backend.reads.read_execution_info(handle.execution_id)
    assert info.completed_at is not None
    assert int(info.completed_at) - int(info.started_at or 0) >= 50
    assert await indexes(engine, handle.execution_id) == {
        f"lane:{LANE}:terminal": int(info.completed_at) + 86_400_000
    }
    (attempt,) = await engine.backend.reads.read_attempts(handle.execution_id)
    assert (attempt.attempt_state, attempt.ended_at) == ("ended_success", int(info.completed_at))
    assert attempt.failure_reason is None
    snapshot = await engine.backend.reads.describe_execution(handle.execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None
    assert snapshot.current_attempt is not None
    assert snapshot.current_attempt.attempt_id == handle.attempt_id
    fields = await engine.backend.reads.read_exec_core_fields(
        handle.execution_id,
        [
            *("current_lease_id", "current_worker_id", "current_worker_instance_id"),
            *("lease_expires_at", "lease_last_renewed_at", "current_lease_epoch"),
            *("current_attempt_id", "current_attempt_index", "total_attempt_count"),
        ],
    )
    assert fields == {
        "current_lease_id": None,
        "current_worker_id": None,
        "current_worker_instance_id": None,
        "lease_expires_at": None,
        "lease_last_renewed_at": None,
        "current_lease_epoch": "1",
        "current_attempt_id": handle.attempt_id,
        "current_attempt_index": "0",
        "total_attempt_count": "1",
    }


async def test_the_record_stays_small(engine: Engine) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle, b"r")
    fields = await record(engine, handle.execution_id)
    assert "" not in fields.values()
    assert set(fields) == {
        *("execution_kind", "created_at", "state", "lease", "attempt", "worker"),
        *("lease_expires_at", "started_at", "completed_at", "result"),
    }
    encoding: Any = await engine.backend.transport.call(
        "OBJECT", "ENCODING", keys.core(handle.execution_id.tag, handle.execution_id)
    )
    assert encoding == b"listpack"
