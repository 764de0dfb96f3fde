from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core import keys
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.engine.backend import Backend
from flowfabric.scanners import index_reconciler
from flowfabric.scanners.base import ScanResult, Scope
from flowfabric.scanners.index_reconciler import IndexReconciler
from flowfabric.scanners.territory import read_territory
from tests.scanners.support import break_record, idle, members, plant, rings
from tests.support.engine import TTL, Engine


async def _cycle(reconciler: IndexReconciler, backend: Backend) -> ScanResult:
    return await reconciler.scan(backend, Scope(await read_territory(backend)))


async def _commands(backend: Backend) -> int:
    info: Any = await backend.transport.call("INFO", "stats")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return int(text.partition("total_commands_processed:")[2].split()[0])


async def test_drift_is_repaired_in_the_second_cycle(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    lost = await engine.create()
    await engine.backend.transport.call("DEL", keys.eligible(lost.tag, "default"))
    await engine.backend.transport.call("DEL", keys.wake("default"))
    supervisor = idle(engine)
    assert await supervisor.scan_once("index_reconciler") == ScanResult()
    assert await members(engine, lost.tag, "lane:default:eligible") == []
    with caplog.at_level(logging.WARNING):
        assert await supervisor.scan_once("index_reconciler") == ScanResult(processed=1)
    assert await members(engine, lost.tag, "lane:default:eligible") == [lost]
    assert await rings(engine) == [str(lost.partition).encode()]
    (record,) = caplog.records
    wanted = {
        "action": "index_repaired",
        "scanner": "index_reconciler",
        "execution_id": lost,
        "expected_index": "eligible",
        "lifecycle": "runnable",
        "eligibility": "eligible_now",
        "ownership": "unowned",
    }
    assert {name: record.__dict__[name] for name in wanted} == wanted
    assert await supervisor.scan_once("index_reconciler") == ScanResult()


async def test_drift_that_is_gone_is_not_touched(engine: Engine) -> None:
    one = await engine.create()
    key = keys.eligible(one.tag, "default")
    score = (await engine.backend.read_execution_info(one)).created_at
    reconciler = IndexReconciler()
    await engine.backend.transport.call("ZREM", key, one)
    assert await _cycle(reconciler, engine.backend) == ScanResult()
    await engine.backend.transport.call("ZADD", key, score, one)
    assert await _cycle(reconciler, engine.backend) == ScanResult()
    assert reconciler.repaired == 0


async def test_every_state_goes_back_to_its_own_index(engine: Engine) -> None:
    held = (await engine.running()).execution_id
    expired = (await engine.running()).execution_id
    await engine.advance(TTL)
    await engine.backend.mark_lease_expired_if_due(expired.tag, [expired])
    revoked = (await engine.running(lane="other")).execution_id
    await engine.backend.revoke_lease(revoked)
    ended = await engine.create()
    await engine.backend.cancel_execution(ended)
    await engine.create(delay_until=await engine.now() + 60_000)
    await engine.create(policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    before = await engine.dump()
    lane = keys.lane(held.tag, "default", "")
    other = keys.lane(revoked.tag, "other", "")
    for name in ("eligible", "delayed", "active", "reclaimable", "terminal", "eligible:gpu"):
        await engine.backend.transport.call("DEL", lane + name)
        await engine.backend.transport.call("DEL", other + name)
    await engine.backend.transport.call("DEL", keys.index(held.tag, "lease_expiry"))
    supervisor = idle(engine)
    await supervisor.scan_once("index_reconciler")
    assert await supervisor.scan_once("index_reconciler") == ScanResult(processed=6)
    after = await engine.dump()
    assert {k: v for k, v in after.items() if b":wake:" not in k} == {
        k: v for k, v in before.items() if b":wake:" not in k
    }


async def test_wrong_entries_are_removed(engine: Engine) -> None:
    waiting = await engine.create()
    await plant(engine, waiting.tag, "lane:default:terminal", waiting, 2**50)
    await plant(engine, waiting.tag, "lane:default:blocked:budget", waiting)
    supervisor = idle(engine)
    await supervisor.scan_once("index_reconciler")
    assert (await supervisor.scan_once("index_reconciler")).processed == 1
    assert await members(engine, waiting.tag, "lane:default:terminal") == []
    assert await members(engine, waiting.tag, "lane:default:blocked:budget") == []


async def test_an_entry_without_a_record_is_dropped(engine: Engine) -> None:
    await engine.create()
    ghost = engine.new_id()
    await plant(engine, ghost.tag, "all_executions", ghost, 0)
    supervisor = idle(engine)
    await supervisor.scan_once("index_reconciler")
    assert (await supervisor.scan_once("index_reconciler")).processed == 1
    assert ghost not in await members(engine, ghost.tag, "all_executions")


@pytest.mark.corrupts
async def test_a_broken_record_hides_nothing_and_is_not_deleted(engine: Engine) -> None:
    broken, drifted = await engine.create(), await engine.create()
    await break_record(engine, broken)
    await engine.backend.transport.call("DEL", keys.eligible(drifted.tag, "default"))
    supervisor = idle(engine)
    assert await supervisor.scan_once("index_reconciler") == ScanResult(errors=1)
    assert await supervisor.scan_once("index_reconciler") == ScanResult(processed=1, errors=1)
    assert await members(engine, drifted.tag, "lane:default:eligible") == [drifted]
    assert broken in await members(engine, broken.tag, "all_executions")


async def test_pages_and_budget_rotate_over_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reconciler, "_MAX_PER_CYCLE", 150)
    tag = engine.new_id().tag
    new = [NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(400)]
    await engine.backend.create_many(new)
    await engine.backend.transport.call("DEL", keys.eligible(tag, "default"))
    reconciler = IndexReconciler()
    repaired = [(await _cycle(reconciler, engine.backend)).processed for _ in range(4)]
    assert repaired == [0, 150, 150, 100]
    assert len(await members(engine, tag, "lane:default:eligible")) == 400


async def test_all_partitions_get_their_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reconciler, "_MAX_PER_CYCLE", 1)
    lanes = [f"lane-{number}" for number in range(5)]
    ids = [await engine.create(lane=lane) for lane in lanes]
    assert len({one.tag for one in ids}) == 5
    for one, lane in zip(ids, lanes, strict=True):
        await engine.backend.transport.call("DEL", keys.eligible(one.tag, lane))
    reconciler = IndexReconciler()
    for _ in range(12):
        await _cycle(reconciler, engine.backend)
    assert reconciler.repaired == 5


async def test_a_partition_at_rest_is_audited_slowly_but_still_audited(engine: Engine) -> None:
    new = [NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(200)]
    await engine.backend.create_many(new)
    reconciler = IndexReconciler()
    await _cycle(reconciler, engine.backend)
    before = await _commands(engine.backend)
    await _cycle(reconciler, engine.backend)
    assert await _commands(engine.backend) - before < 120, "50 of 200, not all of them"
    drifted = new[0].execution_id
    await engine.backend.transport.call("ZREM", keys.eligible(drifted.tag, "default"), drifted)
    for _ in range(6):
        await _cycle(reconciler, engine.backend)
    assert reconciler.repaired == 1


async def test_another_drift_than_before_is_seen_twice_too(engine: Engine) -> None:
    one = await engine.create()
    reconciler = IndexReconciler()
    await engine.backend.transport.call("DEL", keys.eligible(one.tag, "default"))
    await _cycle(reconciler, engine.backend)
    await engine.backend.cancel_execution(one)
    await engine.backend.transport.call("DEL", keys.lane(one.tag, "default", "terminal"))
    repaired = [(await _cycle(reconciler, engine.backend)).processed for _ in range(2)]
    assert repaired == [0, 1]
