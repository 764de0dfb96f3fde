"""`quota_reconciler`: slots that no run holds, expired entries, policies without a definition."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.quotas import QuotaReconciliation
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import quota_partition
from flowfabric.engine.valkey import keys
from flowfabric.scanners.base import ScanResult
from tests.support import lua_keys
from tests.support.engine import Engine, refused
from tests.support.quotas import WINDOW, admit, policy, used
from tests.support.scanning import idle

NAME = "quota_reconciler"


def tag(engine: Engine, name: str) -> str:
    return f"{{q:{quota_partition(name, engine.backend.counts)}}}"


async def scan(engine: Engine) -> ScanResult:
    return await idle(engine).scan_once(NAME)


async def running(engine: Engine, name: str) -> Handle:
    """An execution that was admitted, claimed and confirmed."""
    handle = await engine.running()
    run = handle.lease_epoch
    await admit(engine, name, handle.execution_id, run=run)
    await engine.backend.quotas.confirm_admission(name, handle.execution_id, run=run)
    return handle


async def slots(engine: Engine, name: str) -> list[bytes]:
    found: Any = await engine.backend.transport.call(
        "ZRANGE", keys.quota_slots(tag(engine, name), name), 0, -1
    )
    return found


async def stored(engine: Engine, key: str) -> int:
    found: Any = await engine.backend.transport.call("EXISTS", key)
    return found


async def test_without_policies_it_asks_once(engine: Engine) -> None:
    assert await engine.backend.quotas.quota_partitions() == []
    assert await scan(engine) == ScanResult()


async def test_it_frees_the_slots_of_runs_that_ended(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    name = await policy(engine, max_concurrent=5)
    ended = [await running(engine, name) for _ in range(3)]
    live = [await running(engine, name) for _ in range(2)]
    for handle in ended:
        await engine.backend.executions.complete(handle)
    with caplog.at_level(logging.INFO):
        assert await scan(engine) == ScanResult(processed=3)
    assert sorted(await slots(engine, name)) == sorted(h.execution_id.encode() for h in live)
    (told,) = [r for r in caplog.records if getattr(r, "action", "") == "quota_corrected"]
    assert (vars(told)["stored"], vars(told)["actual"], vars(told)["quota_id"]) == (5, 2, name)
    # The policy is as full as before: two run, and a third is refused.
    await engine.backend.quotas.update_quota_policy(name, max_concurrent=2)
    assert await admit(engine, name) == "concurrency"
    assert await scan(engine) == ScanResult()


@pytest.mark.parametrize("how", ["suspended", "delayed", "lapsed", "deleted", "unknown"])
async def test_a_slot_is_live_while_its_execution_is_active(engine: Engine, how: str) -> None:
    name = await policy(engine, max_concurrent=5)
    if how == "unknown":
        lost = engine.new_id()
        await engine.backend.quotas.confirm_admission(name, lost)
    else:
        handle = await running(engine, name)
        match how:
            case "suspended" | "delayed":
                await engine.backend.executions.delay(handle, await engine.now() + 10**6)
            case "deleted":
                await engine.backend.executions.complete(handle)
                await engine.backend.executions.purge_execution(handle.execution_id)
            case _:
                # Whoever reclaims it does not pass admission again.
                await engine.advance(10**6)
                await engine.backend.upkeep.mark_lease_expired_if_due(
                    handle.execution_id.tag, [handle.execution_id]
                )
    assert (await scan(engine)).processed == (0 if how == "lapsed" else 1)
    assert len(await slots(engine, name)) == (1 if how == "lapsed" else 0)


async def test_a_lost_confirm_is_made_up_for(engine: Engine) -> None:
    name, handle = await policy(engine, max_concurrent=1), await engine.running()
    await admit(engine, name, handle.execution_id)
    assert await scan(engine) == ScanResult(processed=1)
    await engine.advance(WINDOW)
    assert await admit(engine, name) == "concurrency"


async def test_the_slot_of_an_earlier_run_is_taken_over(engine: Engine) -> None:
    name, handle = await policy(engine, max_concurrent=1), await engine.running()
    await engine.backend.executions.delay(handle, 1)
    await engine.claim()
    await engine.backend.quotas.confirm_admission(name, handle.execution_id, run=1)
    assert await scan(engine) == ScanResult(processed=1)
    # What arrives late about the first run leaves the second its slot.
    await engine.backend.quotas.release_admission(name, handle.execution_id, run=1)
    assert len(await slots(engine, name)) == 1


async def test_a_slot_that_waits_for_its_claim_stays(engine: Engine) -> None:
    name, waiting = await policy(engine, max_concurrent=1), await engine.create()
    await admit(engine, name, waiting)
    assert await scan(engine) == ScanResult()
    assert (await used(engine, name))[1] == 1
    await engine.advance(WINDOW)
    assert await scan(engine) == ScanResult()
    assert await slots(engine, name) == []


async def test_it_drops_expired_entries(engine: Engine) -> None:
    name = await policy(engine, max_requests_per_window=9)
    for _ in range(3):
        await admit(engine, name)
    await engine.advance(WINDOW)
    await scan(engine)
    for key in (lua_keys.quota_window, lua_keys.quota_guards):
        assert await stored(engine, key(tag(engine, name), name)) == 0


async def test_slots_remain_until_released_after_the_cap_was_removed(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=1)
    handle = await running(engine, name)
    await engine.backend.quotas.update_quota_policy(name, max_concurrent=0)
    assert await scan(engine) == ScanResult()
    await engine.backend.executions.complete(handle)
    assert await scan(engine) == ScanResult(processed=1)
    assert await slots(engine, name) == []


async def test_every_policy_of_every_partition(engine: Engine) -> None:
    names = [await policy(engine, max_concurrent=1) for _ in range(130)]
    for name in names:
        await engine.backend.quotas.confirm_admission(name, engine.new_id())
    assert await scan(engine) == ScanResult(processed=130)
    assert len(await engine.backend.quotas.quota_partitions()) > 20


async def test_many_slots(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=5000)
    live = await running(engine, name)
    gone = [engine.new_id() for _ in range(1500)]
    await engine.backend.quotas.confirm_many(name, gone)
    assert await scan(engine) == ScanResult(processed=1500)
    assert await slots(engine, name) == [live.execution_id.encode()]


@pytest.mark.corrupts
async def test_a_policy_without_a_definition_leaves_the_index(engine: Engine) -> None:
    kept, name = await policy(engine, max_concurrent=1), await policy(engine, max_concurrent=1)
    await admit(engine, name)
    await engine.backend.quotas.note_blocked(name, [engine.new_id()])
    place = tag(engine, name)
    await engine.backend.transport.call("DEL", keys.quota(place, name))
    assert await scan(engine) == ScanResult(processed=1)
    rows = (await engine.backend.quotas.list_quota_policies()).entries
    assert [row.quota_policy_id for row in rows] == [kept]
    for key in (lua_keys.quota_window, lua_keys.quota_guards, keys.quota_slots, keys.quota_blocked):
        assert await stored(engine, key(place, name)) == 0
    assert await scan(engine) == ScanResult()


@pytest.mark.corrupts
@pytest.mark.parametrize("part", ["record", "slots", "window", "limit"])
async def test_an_unreadable_policy_counts_and_stays(engine: Engine, part: str) -> None:
    good, bad = [await policy(engine, max_concurrent=1) for _ in range(2)]
    for name in (good, bad):
        await engine.backend.quotas.confirm_admission(name, engine.new_id())
    place, call = tag(engine, bad), engine.backend.transport.call
    key = {
        "slots": keys.quota_slots(place, bad),
        "window": lua_keys.quota_window(place, bad),
    }.get(part, keys.quota(place, bad))
    if part == "limit":
        await call("HSET", key, "active_concurrency_cap", "many")
    else:
        await call("SET", key, "x")
    assert await scan(engine) == ScanResult(processed=1, errors=1)
    assert await slots(engine, good) == []
    index: Any = await call("ZSCORE", keys.index(place, "quota_policies"), bad)
    assert index == 0


@pytest.mark.corrupts
async def test_a_slot_whose_execution_cannot_be_read_stays(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=9)
    handle = await running(engine, name)
    core = keys.core(handle.execution_id.tag, handle.execution_id)
    call = engine.backend.transport.call
    await call("SET", core, "x")
    await call("ZADD", keys.quota_slots(tag(engine, name), name), 2e13, b"\xff no id")
    assert await scan(engine) == ScanResult(errors=2)
    assert len(await slots(engine, name)) == 2
    await call("DEL", core)
    await call("HSET", core, "state", "??????")
    assert (await scan(engine)).errors == 2


async def test_only_slots_that_are_as_they_were_read_change(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=2)
    place, execution_id = tag(engine, name), engine.new_id()
    await engine.backend.quotas.confirm_admission(name, execution_id, run=1)

    async def correct(member: ExecutionId, score: float, run: int | str) -> list[Any]:
        args = (name, member, repr(score), run)
        reply = await engine.backend.calls.fcall("ff_quota_reconcile", place, args, op="test")
        return reply[3:5]

    # In between it was released, admitted and claimed again.
    await engine.backend.quotas.confirm_admission(name, execution_id, run=2)
    assert await correct(execution_id, 1e13 + 1, "") == [0, 0]
    assert await correct(engine.new_id(), 1e13 + 1, "") == [0, 0]
    assert await correct(engine.new_id(), 1e13 + 1, 1) == [0, 0]
    assert await slots(engine, name) == [execution_id.encode()]
    assert await correct(execution_id, 1e13 + 2, "") == [1, 0]
    assert await slots(engine, name) == []


async def test_a_freed_slot_opens_the_policy(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=1)
    told: list[tuple[str, int | None]] = []

    async def opened(quota_policy_id: str, headroom: int | None) -> None:
        told.append((quota_policy_id, headroom))

    engine.backend.quotas.on_quota_opened = opened
    await engine.backend.quotas.confirm_admission(name, engine.new_id())
    await engine.backend.quotas.note_blocked(name, [engine.new_id()])
    await scan(engine)
    assert told == [(name, 1)]


@pytest.mark.parametrize("partition", [-1, 32, 1.5, None])
async def test_the_partition_is_checked(engine: Engine, partition: Any) -> None:
    with pytest.raises(Exception, match="partition"):
        await engine.backend.quotas.reconcile_quota_counters(partition)


async def test_one_partition_is_scanned_alone(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=1)
    await engine.backend.quotas.confirm_admission(name, engine.new_id())
    own = quota_partition(name, engine.backend.counts)
    other = (own + 1) % engine.backend.counts.quota
    scanners = idle(engine)
    assert await scanners.scan_once(NAME, other) == ScanResult()
    assert await scanners.scan_once(NAME, own) == ScanResult(processed=1)
    count = engine.backend.counts.quota
    error = await refused(scanners.scan_once(NAME, count), "invalid_input")
    assert f"must be below {count}" in error.detail


async def test_what_one_pass_answers(engine: Engine) -> None:
    name = await policy(engine, max_concurrent=1)
    await engine.backend.quotas.confirm_admission(name, engine.new_id())
    outcome = await engine.backend.quotas.reconcile_quota_counters(
        quota_partition(name, engine.backend.counts)
    )
    assert outcome == QuotaReconciliation(policies=1, changed=1)
