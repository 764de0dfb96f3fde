"""Retention: what a purge deletes, when, and how a long one is finished."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.conformance.test_exec_retention import DAY, _with_attempts
from tests.support import lua_keys
from tests.support.engine import LANE, Engine, refused, unchanged
from tests.support.executions import TERMINAL, Case, promote, trim
from tests.support.storage import indexes


async def owned(engine: Engine, execution_id: ExecutionId) -> list[bytes]:
    """Keys of the execution, and indexes that name it; not what expires by itself."""
    member = execution_id.encode()
    found: list[bytes] = []
    for name, content in (await engine.dump()).items():
        if name.endswith(b":events") or name.startswith(b"ff:idem:") or b":claimed:" in name:
            continue
        if member in name or member in repr(content).encode():
            found.append(name)
    return found


@pytest.mark.parametrize("state", TERMINAL)
async def test_everything_goes(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await engine.backend.executions.set_execution_tag(case.execution_id, "a.b", "c")
    await engine.advance(DAY)
    assert await trim(engine, case.execution_id) == "purged"
    assert await owned(engine, case.execution_id) == []
    await refused(
        engine.backend.reads.read_execution_info(case.execution_id), "execution_not_found"
    )
    assert await engine.backend.reads.get_execution_result(case.execution_id) is None


async def test_every_key_of_a_rich_execution(engine: Engine) -> None:
    execution_id = await engine.create(
        input_payload=b"in" * 50,
        idempotency_key="k",
        tags={"a.b": "c"},
        policy={"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}},
    )
    handle = (await engine.claim()).handle
    await engine.backend.executions.fail(handle, "x", "transient")
    await promote(engine, execution_id)
    handle = (await engine.claim()).handle
    await engine.block(execution_id)
    call = engine.backend.transport.call
    await call("HSET", lua_keys.steps(execution_id.tag, execution_id), "s", "1")
    await engine.backend.executions.complete(handle, b"out" * 50)
    kinds = {name.rsplit(b":", 1)[-1] for name in await owned(engine, execution_id)}
    assert kinds == {
        *(b"core", b"payload", b"result", b"policy", b"tags", b"history", b"steps"),
        *(b"0", b"terminal", b"all_executions"),
    }
    await engine.advance(DAY)
    assert await trim(engine, execution_id) == "purged"
    assert await owned(engine, execution_id) == []
    # The idempotency entry keeps its own expiry.
    assert await call("EXISTS", lua_keys.idem(execution_id.tag, "default", "k")) == 1


@pytest.mark.parametrize("ttl", [None, 0, 5000, 30 * DAY])
async def test_due_time(engine: Engine, ttl: int | None) -> None:
    policy = None if ttl is None else {"stream_policy": {"retention_ttl_ms": ttl}}
    execution_id = await engine.create(policy=policy)
    now = await engine.now() + 1000
    await engine.freeze(now)
    await engine.backend.executions.cancel_execution(execution_id)
    due = now + (DAY if ttl is None else ttl)
    assert await indexes(engine, execution_id) == {f"lane:{LANE}:terminal": due}
    if ttl != 0:
        await engine.freeze(due - 1)
        assert await unchanged(engine, lambda: trim(engine, execution_id)) == "not_due"
    await engine.freeze(due)
    assert await trim(engine, execution_id) == "purged"


@pytest.mark.corrupts
async def test_entries_that_do_not_belong_are_removed(engine: Engine) -> None:
    ghost, waiting = engine.new_id(), await engine.create()
    index = keys.lane(ghost.tag, LANE, "terminal")
    await engine.backend.transport.call("ZADD", index, 1, ghost, 1, waiting)
    verdicts = await engine.backend.upkeep.trim_retention(ghost.tag, LANE, [ghost, waiting])
    assert verdicts == ["orphan_removed", "not_terminal"]
    assert await engine.backend.transport.call("EXISTS", index) == 0
    assert (await engine.backend.reads.read_execution_state(waiting)).value == "waiting"


async def test_a_long_purge_continues_in_steps(engine: Engine) -> None:
    execution_id = await _with_attempts(engine, 505)
    await engine.advance(DAY)
    assert await trim(engine, execution_id) == "purging"
    await refused(engine.backend.reads.read_execution_info(execution_id), "execution_not_found")
    assert (
        await engine.backend.listings.list_executions()
        == await engine.backend.listings.list_executions(limit=0)
    )
    backlog = keys.index(execution_id.tag, "purge_backlog")
    assert await engine.backend.transport.call("EXISTS", backlog) == 1
    left = 1
    rounds = 0
    while left:
        left = await engine.backend.upkeep.purge(execution_id.tag)
        rounds += 1
    assert rounds == 1
    assert await owned(engine, execution_id) == []
    assert await engine.backend.upkeep.purge(execution_id.tag) == 0


async def test_a_long_backlog_is_worked_off(engine: Engine) -> None:
    """A hash of many fields is scanned by buckets, and the first ones are empty after a while."""
    tag = engine.new_id().tag
    backlog = keys.index(tag, "purge_backlog")
    entries = [part for n in range(2000) for part in (f"{engine.new_id()}-{n}", "0")]
    await engine.backend.transport.call("HSET", backlog, *entries)
    for left in range(1999, -1, -1):
        assert await engine.backend.upkeep.purge(tag) == left
    assert await engine.backend.transport.call("EXISTS", backlog) == 0


@pytest.mark.parametrize("retention", [2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1])
async def test_for_ever_is_never(engine: Engine, retention: int) -> None:
    execution_id = await engine.create(policy={"stream_policy": {"retention_ttl_ms": retention}})
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.advance(100 * 365 * DAY)
    assert await trim(engine, execution_id) == "not_due"
    (due,) = (await indexes(engine, execution_id)).values()
    assert due == 2**53 - 1
    await engine.backend.transport.call(
        "ZREM", keys.index(execution_id.tag, f"lane:{LANE}:terminal"), execution_id
    )
    await engine.backend.upkeep.reconcile_execution_index(execution_id.tag, [execution_id])
    assert list((await indexes(engine, execution_id)).values()) == [due]


async def test_events_outlive_the_execution(engine: Engine) -> None:
    case = await Case.make(engine, "completed")
    before = await engine.events(case.execution_id)
    await engine.advance(DAY)
    await trim(engine, case.execution_id)
    assert await engine.events(case.execution_id) == before
    trimmed = await engine.backend.upkeep.trim_events(case.execution_id.tag, 2**45)
    assert trimmed == len(before)
