"""Reads of one execution, strict about what is stored."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine, refused
from tests.support.executions import Case


async def damage(engine: Engine, execution_id: ExecutionId, **fields: Any) -> None:
    key = keys.core(execution_id.tag, execution_id)
    for name, value in fields.items():
        if value is None:
            await engine.backend.transport.call("HDEL", key, name)
        else:
            await engine.backend.transport.call("HSET", key, name, value)


# --- corruption ---------------------------------------------------------------------------------

STRICT = [
    ("state", "qqqqqq"),
    ("state", "ruewn"),
    ("state", ""),
    ("state", None),
    ("state", b"\xff\xff\xff\xff\xff\xff"),
    ("created_at", "yesterday"),
    ("created_at", None),
    ("last_mutation_at", "x"),
    ("lane_id", "tab\t"),
    ("lane_id", "x" * 65),
    ("attempt", "11111111-2222-4333-8444-555555555555"),
    ("attempt", "not a uuid/0"),
    ("attempt", "11111111-2222-4333-8444-555555555555/x"),
    ("attempt", None),
    ("lease", "11111111-2222-4333-8444-555555555555/-1"),
    ("lease", "11111111222243338444555555555555/1"),
    ("lease", None),
    ("lease_expires_at", "soon"),
    ("lease_expires_at", None),
    ("lease_last_renewed_at", "x"),
]


@pytest.mark.corrupts
@pytest.mark.parametrize(("field", "value"), STRICT)
async def test_describe_is_strict(engine: Engine, field: str, value: Any) -> None:
    handle = await engine.running()
    await damage(engine, handle.execution_id, **{field: value})
    error = await refused(
        engine.backend.reads.describe_execution(handle.execution_id), "corruption"
    )
    assert error.detail.startswith(str(handle.execution_id))
    assert len(error.detail.split(": ")) >= 3


@pytest.mark.corrupts
async def test_corrupt_fields_in_other_reads(engine: Engine) -> None:
    handle = await engine.running()
    await damage(engine, handle.execution_id, state="zzzzzz")
    backend = engine.backend
    for call in (
        backend.reads.read_execution_info(handle.execution_id),
        backend.reads.read_execution_state(handle.execution_id),
        backend.reads.explain_execution(handle.execution_id),
        backend.reads.read_attempts(handle.execution_id),
    ):
        await refused(call, "corruption")
    page = await backend.listings.list_executions()
    assert page.executions == ()
    assert [problem.split(": ")[1] for problem in page.damaged] == ["state"]
    await damage(engine, handle.execution_id, state="alnnnr", priority="high")
    await refused(backend.reads.read_execution_info(handle.execution_id), "corruption")


@pytest.mark.corrupts
async def test_a_corrupt_attempt(engine: Engine) -> None:
    case = await Case.make(engine, "retry_delayed")
    key = keys.attempt(case.execution_id.tag, case.execution_id, 0)
    await engine.backend.transport.call("HDEL", key, "lease")
    await refused(engine.backend.reads.read_attempts(case.execution_id), "corruption")


@pytest.mark.corrupts
async def test_corrupt_tags(engine: Engine) -> None:
    execution_id = await engine.create(tags={"a.b": "c"})
    key = keys.tags(execution_id.tag, execution_id)
    await engine.backend.transport.call("HSET", key, "a.b", b"\xff")
    await refused(engine.backend.reads.get_execution_tags(execution_id), "corruption")
    await refused(engine.backend.reads.describe_execution(execution_id), "corruption")
    await refused(engine.backend.reads.get_execution_tag(execution_id, "a.b"), "corruption")


@pytest.mark.corrupts
async def test_an_empty_field_reads_as_unset(engine: Engine) -> None:
    execution_id = await engine.create()
    empty = ("priority", "retry_count", "started_at", "lease", "attempt", "flow_id", "lane_id")
    await damage(engine, execution_id, **dict.fromkeys(empty, ""))
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.priority, info.retry_count, info.started_at) == (0, 0, None)
    assert (info.total_attempt_count, info.flow_id, info.lane_id) == (0, None, "default")
    snapshot = await engine.backend.reads.describe_execution(execution_id)
    assert snapshot is not None
    assert (snapshot.current_attempt, snapshot.flow_id) == (None, None)
    known = await engine.backend.reads.read_exec_core_fields(
        execution_id, ["started_at", "priority"]
    )
    assert known == {"started_at": None, "priority": "0"}
    await damage(engine, execution_id, created_at="")
    error = await refused(engine.backend.reads.describe_execution(execution_id), "corruption")
    assert error.detail == f"{execution_id}: created_at: is missing"
