from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.events import WorkerEvent
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from flowfabric.scanners import ScannerSettings
from flowfabric.scanners.base import ScanResult
from tests.support.engine import Engine
from tests.support.scanning import idle, members, plant

DAY = 86_400_000


async def _finished(engine: Engine, **create: Any) -> Handle:
    handle = await engine.running(**create)
    await engine.backend.executions.complete(handle, b"result")
    return handle


async def test_deleted_with_all_its_keys_when_retention_is_over(engine: Engine) -> None:
    ended = (await _finished(engine, tags={"a": "b"}, input_payload=b"in")).execution_id
    supervisor = idle(engine)
    assert await supervisor.scan_once("retention_trimmer") == ScanResult()
    await engine.advance(DAY + 1)
    assert await supervisor.scan_once("retention_trimmer") == ScanResult(processed=1)
    left: Any = await engine.backend.transport.call("KEYS", f"*{ended.uuid}*")
    assert left == []
    assert await members(engine, ended.tag, "all_executions") == []


async def test_ordered_by_the_end_of_retention(engine: Engine) -> None:
    long = (await _finished(engine, policy=_kept(10 * DAY))).execution_id
    short = (await _finished(engine, policy=_kept(1000))).execution_id
    await engine.advance(1001)
    assert await idle(engine).scan_once("retention_trimmer") == ScanResult(processed=1)
    assert await members(engine, short.tag, "all_executions") == [long]


def _kept(ms: int) -> dict[str, Any]:
    return {"stream_policy": {"retention_ttl_ms": ms}}


async def test_many_in_one_cycle(engine: Engine) -> None:
    new = [NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(90)]
    await engine.backend.executions.create_many(new)
    claims = await engine.claim_all(90)
    await engine.backend.executions.complete_many([Completion(claim.handle) for claim in claims])
    await engine.advance(DAY + 1)
    assert await idle(engine).scan_once("retention_trimmer") == ScanResult(processed=90)


async def test_a_large_execution_is_purged_to_its_last_key(engine: Engine) -> None:
    ended = (await _finished(engine)).execution_id
    core = keys.core(ended.tag, ended)
    attempt: Any = await engine.backend.transport.call("HGET", core, "attempt")
    await engine.backend.transport.call("HSET", core, "attempt", attempt[:37] + b"1200")
    for number in range(1201):
        await engine.backend.transport.call("HSET", keys.attempt(ended.tag, ended, number), "a", 1)
    await engine.advance(DAY + 1)
    assert (await idle(engine).scan_once("retention_trimmer")).processed == 1
    left: Any = await engine.backend.transport.call("KEYS", f"*{ended.uuid}*")
    assert left == []
    backlog = keys.index(ended.tag, "purge_backlog")
    assert await engine.backend.transport.call("EXISTS", backlog) == 0


async def test_a_purge_that_was_interrupted_is_finished(engine: Engine) -> None:
    await engine.create()
    gone = engine.new_id()
    for number in range(700):
        await engine.backend.transport.call("HSET", keys.attempt(gone.tag, gone, number), "a", 1)
    backlog = keys.index(gone.tag, "purge_backlog")
    await engine.backend.transport.call("HSET", backlog, gone, 700)
    await idle(engine).scan_once("retention_trimmer")
    left: Any = await engine.backend.transport.call("KEYS", f"*{gone.uuid}*")
    assert left == []


async def test_strays_are_removed_and_nothing_else(engine: Engine) -> None:
    waiting, ghost = await engine.create(), engine.new_id()
    for stray in (waiting, ghost):
        await plant(engine, ghost.tag, "lane:default:terminal", stray)
    assert await idle(engine).scan_once("retention_trimmer") == ScanResult(processed=2)
    assert await members(engine, ghost.tag, "lane:default:terminal") == []
    assert await members(engine, ghost.tag, "all_executions") == [waiting]


async def test_events_by_age(engine: Engine) -> None:
    ended = (await _finished(engine)).execution_id
    supervisor = idle(engine, ScannerSettings(events_retention_ms=60_000))
    await supervisor.scan_once("retention_trimmer")
    assert len(await engine.events(ended)) == 2
    await engine.advance(61_000)
    await supervisor.scan_once("retention_trimmer")
    assert await engine.events(ended) == []
    assert await members(engine, ended.tag, "all_executions") == [ended], "only the feed aged"


async def _worker_feed(engine: Engine, namespace: str) -> int:
    """How many entries the worker feed of a namespace holds, after one more registration."""
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id=new_uuid(), lanes=["default"], namespace=namespace
    )
    return await _length(engine, namespace)


async def _length(engine: Engine, namespace: str) -> int:
    key = keys.worker_events(f"{{{namespace}}}")
    found: Any = await engine.backend.transport.call("XLEN", key)
    return found


async def test_worker_feeds_by_age(engine: Engine) -> None:
    """Of every namespace, whether or not a worker is left there."""
    for namespace in ("default", "acme"):
        assert await _worker_feed(engine, namespace) == 1
    supervisor = idle(engine)
    await engine.advance(DAY - 1000)
    await supervisor.scan_once("retention_trimmer")
    assert [await _length(engine, name) for name in ("default", "acme")] == [1, 1]
    await engine.advance(61_000)
    await supervisor.scan_once("retention_trimmer")
    assert [await _length(engine, name) for name in ("default", "acme")] == [0, 0]


async def test_a_reader_of_a_trimmed_worker_feed_gets_an_error(engine: Engine) -> None:
    await _worker_feed(engine, "default")
    async with await engine.backend.events.subscribe_worker_events(cursor="start") as feed:
        first = await anext(feed)
        assert isinstance(first, WorkerEvent)
    await _worker_feed(engine, "default")
    await engine.advance(DAY + 1000)
    await idle(engine).scan_once("retention_trimmer")
    async with await engine.backend.events.subscribe_worker_events(cursor=first.cursor) as feed:
        with pytest.raises(EngineError, match="cursor_expired"):
            await anext(feed)


@pytest.mark.corrupts
async def test_a_damaged_feed_hides_no_other(engine: Engine) -> None:
    ended = (await _finished(engine)).execution_id
    other = (await engine.running(lane="other")).execution_id
    for namespace in ("broken", "healthy"):
        await _worker_feed(engine, namespace)
    call = engine.backend.transport.call
    for key in (keys.worker_events("{broken}"), keys.events(other.tag)):
        await call("DEL", key)
        await call("SET", key, "garbage")
    await engine.advance(DAY + 1)
    found = await idle(engine).scan_once("retention_trimmer")
    assert (found.processed, found.errors) == (1, 2)
    assert await engine.events(ended) == []
    assert await _length(engine, "healthy") == 0
