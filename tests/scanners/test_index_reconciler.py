from __future__ import annotations

import asyncio
import logging
from typing import Literal

import pytest

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners import base, index_reconciler
from flowfabric.scanners.base import Cycle, ScanResult
from flowfabric.scanners.index_reconciler import IndexReconciler
from flowfabric.scanners.watch import TerritoryMap
from flowfabric.valkey.address import parse_url
from tests.support.engine import TTL, Engine
from tests.support.executions import CODES, Case
from tests.support.scanning import break_record, idle, members, plant, rings
from tests.support.server import TestServer
from tests.support.storage import commands

TIMED = {"timeout_policy": {"attempt_timeout_ms": 60_000}}


async def _cycle(reconciler: IndexReconciler, backend: ValkeyBackend) -> ScanResult:
    cycle = Cycle(backend, await TerritoryMap(backend, 0).current())
    await reconciler.scan(cycle)
    return cycle.result()


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


async def test_drift_that_has_resolved_itself_is_not_touched(engine: Engine) -> None:
    one = await engine.create()
    key = keys.eligible(one.tag, "default")
    score = (await engine.backend.reads.read_execution_info(one)).created_at
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
    await engine.backend.upkeep.mark_lease_expired_if_due(expired.tag, [expired])
    revoked = (await engine.running(lane="other")).execution_id
    await engine.backend.leases.revoke_lease(revoked)
    ended = await engine.create()
    await engine.backend.executions.cancel_execution(ended)
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
    await engine.backend.executions.create_many(new)
    await engine.backend.transport.call("DEL", keys.eligible(tag, "default"))
    reconciler = IndexReconciler()
    repaired = [(await _cycle(reconciler, engine.backend)).processed for _ in range(4)]
    assert repaired == [0, 150, 150, 100]
    assert len(await members(engine, tag, "lane:default:eligible")) == 400


@pytest.mark.parametrize("thorough", [False, True])
async def test_an_audit_leaves_the_server_to_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, thorough: bool
) -> None:
    class CountedStop(asyncio.Event):
        waits = 0

        async def wait(self) -> Literal[True]:
            self.waits += 1
            return True

    monkeypatch.setattr(base, "_WORK_AT_A_TIME_S", 0.0)
    monkeypatch.setattr(index_reconciler, "_PAGE", 2)
    for _ in range(5):
        await engine.create()
    stop, territory = CountedStop(), await TerritoryMap(engine.backend, 0).current()
    await IndexReconciler().scan(Cycle(engine.backend, territory, stop=stop, thorough=thorough))
    assert (stop.waits >= 3) is not thorough, "it rests after each page, unless asked to hurry"


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


async def _spread(backend: ValkeyBackend, partitions: int, each: int) -> list[ExecutionId]:
    """Executions in many partitions, in order."""
    ids: list[ExecutionId] = []
    for number in range(partitions):
        new = [
            NewExecution(
                execution_id=ExecutionId.parse(f"{{fp:{number}}}:{new_uuid()}"),
                execution_kind="job",
            )
            for _ in range(each)
        ]
        await backend.executions.create_many(new)
        ids += sorted(one.execution_id for one in new)
    return ids


async def _at_rest(backend: ValkeyBackend) -> IndexReconciler:
    """A reconciler that has found everything clean."""
    reconciler = IndexReconciler()
    for _ in range(2):
        assert await _cycle(reconciler, backend) == ScanResult()
    return reconciler


async def _repaired_after(reconciler: IndexReconciler, backend: ValkeyBackend) -> int:
    """How many cycles it takes until something is repaired."""
    for cycles in range(1, 50):
        if (await _cycle(reconciler, backend)).processed:
            return cycles
    raise AssertionError("never repaired")


async def test_a_quiet_deployment_costs_little_and_is_covered_in_every_cycle(
    engine: Engine,
) -> None:
    ids = await _spread(engine.backend, 20, 120)
    reconciler = await _at_rest(engine.backend)
    before = await commands(engine.backend)
    await _cycle(reconciler, engine.backend)
    # The registries are read by the test; at one cycle in 45 s this is two commands a second.
    assert await commands(engine.backend) - before < 120
    for victim in (ids[0], ids[1999], ids[-1]):
        await engine.backend.transport.call("ZREM", keys.eligible(victim.tag, "default"), victim)
        assert await _repaired_after(reconciler, engine.backend) == 2, "seen twice, then repaired"


@pytest.mark.parametrize(
    "damage",
    ["lost", "ghost", "score", "unlisted", "record", "signatures", "timer", "worker", "expiry"],
)
async def test_any_damage_of_a_quiet_partition_is_seen_at_once(engine: Engine, damage: str) -> None:
    held = (await engine.running(policy=TIMED)).execution_id
    delayed = await engine.create(delay_until=await engine.now() + 60_000)
    await engine.create(policy={"routing_requirements": {"required_capabilities": ["gpu"]}})
    await _spread(engine.backend, 3, 40)
    # More than the slow walk reads in the few cycles of this test.
    new = [NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(100)]
    await engine.backend.executions.create_many(new)
    victim = max(one.execution_id for one in new)
    reconciler = await _at_rest(engine.backend)
    call, tag = engine.backend.transport.call, victim.tag
    eligible, index = keys.eligible(tag, "default"), keys.index
    commands: dict[str, tuple[str | int, ...]] = {
        "lost": ("ZREM", eligible, victim),
        "ghost": ("ZADD", index(tag, "lane:default:blocked:route"), 1, victim),
        "score": ("ZINCRBY", eligible, 1, victim),
        "unlisted": ("ZREM", index(tag, "all_executions"), victim),
        "record": ("DEL", keys.core(tag, victim)),
        "signatures": ("DEL", keys.lane(tag, "default", "sigs")),
        "timer": ("ZREM", index(tag, "attempt_timeout"), held),
        "worker": ("SREM", keys.worker_leases(tag, "w-1"), held),
        "expiry": ("ZADD", index(tag, "lease_expiry"), 2**50, held),
    }
    await call(*commands[damage])
    assert await _repaired_after(reconciler, engine.backend) == 2
    assert reconciler.repaired == 1
    assert delayed in await members(engine, tag, "lane:default:delayed")


async def test_renewals_are_no_change(engine: Engine) -> None:
    """A long task must not have the whole partition read again and again."""
    new = [NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(200)]
    await engine.backend.executions.create_many(new)
    held = await engine.running()
    reconciler = await _at_rest(engine.backend)
    await engine.advance(1000)
    await engine.backend.leases.renew_lease(held.execution_id, held, TTL)
    before = await commands(engine.backend)
    await _cycle(reconciler, engine.backend)
    assert await commands(engine.backend) - before < 100


async def test_a_record_that_changed_and_no_index_did(engine: Engine) -> None:
    """No survey tells; the slow walk comes by."""
    ids = await _spread(engine.backend, 2, 50)
    reconciler = await _at_rest(engine.backend)
    victim = ids[-1]
    core = keys.core(victim.tag, victim)
    await engine.backend.transport.call("HSET", core, "priority", 7)
    assert 2 < await _repaired_after(reconciler, engine.backend) < 20


async def test_very_many_in_one_partition(engine: Engine) -> None:
    """Of such an index only the number of its entries is compared."""
    new = [NewExecution(execution_id=engine.new_id(), execution_kind="job") for _ in range(1200)]
    for start in range(0, 1200, 200):
        await engine.backend.executions.create_many(new[start : start + 200])
    victims = sorted(one.execution_id for one in new)
    reconciler = await _at_rest(engine.backend)
    tag = victims[0].tag
    await engine.backend.transport.call("ZREM", keys.eligible(tag, "default"), victims[-1])
    assert await _repaired_after(reconciler, engine.backend) == 2
    await engine.backend.transport.call("ZREM", keys.index(tag, "all_executions"), victims[700])
    assert await _repaired_after(reconciler, engine.backend) == 2
    assert victims[700] in await members(engine, tag, "all_executions")


async def test_only_so_many_at_rest_in_a_cycle_but_all_in_turn(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reconciler, "_AT_REST_PER_CYCLE", 2)
    monkeypatch.setattr(index_reconciler, "_READ_AT_REST_PER_CYCLE", 1)
    ids = await _spread(engine.backend, 9, 30)
    monkeypatch.setattr(index_reconciler, "_SURVEYED_AT_ONCE", 2)
    reconciler = await _at_rest(engine.backend)
    before = await commands(engine.backend)
    await _cycle(reconciler, engine.backend)
    assert await commands(engine.backend) - before < 45, "60 for all"
    for victim in (ids[-1], ids[0], ids[130]):
        await engine.backend.transport.call("ZREM", keys.eligible(victim.tag, "default"), victim)
        assert 2 <= await _repaired_after(reconciler, engine.backend) <= 6


async def test_a_large_partition_does_not_keep_the_others_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reconciler, "_MAX_PER_CYCLE", 40)
    ids = [await _spread(engine.backend, 1, 200), await _spread(engine.backend, 3, 5)]
    victim = ids[1][-1]
    await engine.backend.transport.call("ZREM", keys.eligible(victim.tag, "default"), victim)
    assert await _repaired_after(IndexReconciler(), engine.backend) <= 4


@pytest.mark.parametrize("state", CODES)
async def test_an_execution_that_is_not_listed_is_found_in_its_indexes(
    engine: Engine, state: str
) -> None:
    case = await Case.make(engine, state)
    await engine.create()
    listed = keys.index(case.execution_id.tag, "all_executions")
    await engine.backend.transport.call("ZREM", listed, case.execution_id)
    assert await _repaired_after(IndexReconciler(), engine.backend) == 2
    assert case.execution_id in await members(engine, case.execution_id.tag, "all_executions")


async def test_all_of_them_unlisted(engine: Engine) -> None:
    for _ in range(3):
        await engine.create()
    held = (await engine.running()).execution_id
    ids = await members(engine, held.tag, "all_executions")
    await engine.backend.transport.call("DEL", keys.index(held.tag, "all_executions"))
    reconciler = IndexReconciler()
    await _repaired_after(reconciler, engine.backend)
    assert reconciler.repaired == len(ids) == 4
    assert await members(engine, held.tag, "all_executions") == ids


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"", b"not-an-id", b"{fp:86}:\xff"])
async def test_a_malformed_member_is_removed_itself(
    engine: Engine, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    execution_id = await engine.create()
    key = keys.index(execution_id.tag, "all_executions")
    await engine.backend.transport.call("ZADD", key, 0, bad)
    assert await _repaired_after(IndexReconciler(), engine.backend) == 2
    assert await members(engine, execution_id.tag, "all_executions") == [execution_id]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.__dict__["execution_id"] == bad.decode(errors="backslashreplace")
    assert record.getMessage().isprintable()


@pytest.mark.corrupts
@pytest.mark.parametrize("name", ["all_executions", "lane:default:eligible", "lease_expiry"])
async def test_an_unreadable_index_hides_no_other_partition(engine: Engine, name: str) -> None:
    bad, good = await engine.create(), await engine.create(lane="other")
    key = keys.index(bad.tag, name)
    await engine.backend.transport.call("DEL", key)
    await engine.backend.transport.call("SET", key, "garbage")
    await engine.backend.transport.call("DEL", keys.eligible(good.tag, "other"))
    reconciler = IndexReconciler()
    first, second = [await _cycle(reconciler, engine.backend) for _ in range(2)]
    assert (first.processed, second.processed) == (0, 1)
    assert first.errors > 0
    assert await members(engine, good.tag, "lane:other:eligible") == [good]


async def test_an_unregistered_lane(
    engine: Engine, valkey: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its submitter is gone, and this process never heard of it."""
    delayed = await engine.create(lane="mail", delay_until=await engine.now() + 1000)
    await engine.create(lane="mail", execution_id=engine.new_id("elsewhere"))
    async with await ValkeyBackend.connect(parse_url(valkey.url)) as fresh:
        supervisor = idle(Engine(fresh))
        await fresh.transport.call("DEL", keys.LANES, keys.PLACES, keys.PARTITIONS)
        await engine.advance(1001)
        found = await supervisor.scan_once("index_reconciler")
        assert found == ScanResult(processed=3), "two partitions and a lane"
        assert await fresh.places.lanes_in_use() == ["mail"]
        assert await supervisor.scan_once("delayed_promoter") == ScanResult(processed=1)
        # Lost once more, while nothing changes in the partition.
        fresh.places.known_places.clear()
        await fresh.transport.call("DEL", keys.LANES, keys.PLACES)
        await supervisor.scan_once("index_reconciler")
        assert await fresh.places.lanes_in_use() == ["mail"]
    assert await engine.backend.reads.read_execution_state(delayed) is PublicState.WAITING
    lanes = [r.__dict__["lane"] for r in caplog.records if "lane" in r.__dict__]
    assert lanes == ["mail", "mail"]


async def test_a_malformed_signature_and_its_executions(engine: Engine) -> None:
    execution_id = await engine.create()
    tag, call = execution_id.tag, engine.backend.transport.call
    sigs = keys.lane(tag, "default", "sigs")
    index = keys.eligible(tag, "default").encode() + b":\xff"
    ghost = engine.new_id()
    await call("SADD", sigs, b"\xff")
    await call("ZADD", index, 1, ghost, 2, execution_id)
    reconciler = IndexReconciler()
    assert await _repaired_after(reconciler, engine.backend) == 2
    assert reconciler.repaired == 2
    assert await call("EXISTS", index) == 0
    await call("DEL", sigs)


async def test_more_lanes_than_a_survey_looks_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.scanners.index_reconciler._MAX_LANES_SEARCHED", 3)
    lanes = [f"lane-{number:02}" for number in range(20)]
    home = engine.new_id()
    ids = {
        lane: await engine.create(lane=lane, execution_id=ExecutionId.parse(f"{home.tag}:{uuid}"))
        for lane, uuid in zip(lanes, [new_uuid() for _ in lanes], strict=True)
    }
    reconciler = IndexReconciler()
    for _ in range(10):
        assert await _cycle(reconciler, engine.backend) == ScanResult()
    for lane in (lanes[0], lanes[19], lanes[7]):
        key = keys.eligible(home.tag, lane)
        await engine.backend.transport.call("ZREM", key, ids[lane])
        assert await _repaired_after(reconciler, engine.backend) == 2


@pytest.mark.corrupts
async def test_a_record_with_a_malformed_lane_registers_nothing(engine: Engine) -> None:
    execution_id = await engine.create()
    core = keys.core(execution_id.tag, execution_id)
    await engine.backend.transport.call("HSET", core, "lane_id", b"bad\x01\xff")
    await idle(engine).scan_once("index_reconciler")
    assert await engine.backend.places.lanes_in_use() == ["default"]


async def test_another_drift_than_before_is_seen_twice_too(engine: Engine) -> None:
    one = await engine.create()
    reconciler = IndexReconciler()
    await engine.backend.transport.call("DEL", keys.eligible(one.tag, "default"))
    await _cycle(reconciler, engine.backend)
    await engine.backend.executions.cancel_execution(one)
    await engine.backend.transport.call("DEL", keys.lane(one.tag, "default", "terminal"))
    repaired = [(await _cycle(reconciler, engine.backend)).processed for _ in range(2)]
    assert repaired == [0, 1]
