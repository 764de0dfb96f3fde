"""The unblock scanner: what comes back, what stays, and in which order."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.state import PublicState
from flowfabric.engine import metrics
from flowfabric.engine.api.admission import Block
from flowfabric.engine.valkey import keys
from flowfabric.scanners import ScannerFilter
from flowfabric.scanners.unblock import UnblockScanner
from tests.scanners.test_budget_scanners import Impatient
from tests.sdk.test_admission import spoil
from tests.support.admission import budget, claimed, limited, quota, slots, worker
from tests.support.engine import LANE, Engine
from tests.support.flows import without_followups
from tests.support.scanning import idle


async def states(engine: Engine, ids: list[ExecutionId]) -> list[str]:
    return [(await engine.backend.reads.read_execution_state(each)).value for each in ids]


async def hold(engine: Engine, ids: list[ExecutionId], reason: str, **fields: Any) -> None:
    """Held back without a note at the budget or quota, as if the process had died."""
    blocks = [Block(execution_id=each, reason=reason, **fields) for each in ids]
    assert await engine.backend.admission.block_many(ids[0].tag, blocks) == [None] * len(ids)


async def scan(engine: Engine, **options: Any) -> int:
    result = await idle(engine, **options).scan_once("unblock")
    return result.processed


async def test_work_comes_back_when_its_budgets_are_open(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric.engine")
    spent, other = await budget(engine, 1, spent=1), await budget(engine)
    held = [await limited(engine, spent), await limited(engine, other, spent)]
    free = [await limited(engine, other), await limited(engine), await limited(engine, spent)]
    await hold(engine, [*held, *free], "waiting_for_budget")
    await engine.backend.budgets.report_usage_admin(other, {"tokens": 5})
    assert await scan(engine) == 2
    assert await states(engine, [*held, free[2]]) == ["rate_limited"] * 3
    assert await states(engine, free[:2]) == ["waiting"] * 2
    fields = map(vars, caplog.records)
    told = {each["execution_id"] for each in fields if each.get("action") == "execution_unblocked"}
    assert told == set(free[:2])
    tag = f"ff:budget:{{b:*}}:{spent}"
    names: Any = await engine.backend.transport.call("KEYS", f"{tag}:usage")
    await engine.backend.transport.call("HSET", names[0], "tokens", 0)
    assert await scan(engine) == 3
    assert await states(engine, [*held, *free]) == ["waiting"] * 5


@pytest.mark.corrupts
async def test_unreadable_limits_keep_work_back(engine: Engine) -> None:
    meter = metrics.enable()
    damaged = await budget(engine)
    held = [await limited(engine, damaged)]
    await hold(engine, held, "waiting_for_budget")
    await spoil(engine, damaged)
    result = await idle(engine).scan_once("unblock")
    assert (result.processed, result.errors) == (0, 1)
    assert await states(engine, held) == ["rate_limited"]
    assert meter.numbers["ff_admission_faults_total"] == {("budget",): 1}


@pytest.mark.corrupts
async def test_an_unreadable_quota_keeps_work_back(engine: Engine) -> None:
    meter = metrics.enable()
    damaged = await quota(engine, rate=1)
    held = [await limited(engine, quota=damaged)]
    await hold(engine, held, "waiting_for_quota")
    (key,) = await engine.backend.transport.call("KEYS", f"ff:quota:{{q:*}}:{damaged}")
    await engine.backend.transport.call("HSET", key, "max_requests_per_window", "no number")
    result = await idle(engine).scan_once("unblock")
    assert (result.processed, result.errors) == (0, 1)
    assert await states(engine, held) == ["rate_limited"]
    assert meter.numbers["ff_admission_faults_total"] == {("quota",): 1}


@pytest.mark.corrupts
@pytest.mark.parametrize("stored", ["no-uuid", "\udcff"])
async def test_an_id_that_is_none_keeps_work_back(engine: Engine, stored: str) -> None:
    held = [await limited(engine, await budget(engine))]
    await hold(engine, held, "waiting_for_budget")
    raw = stored.encode(errors="surrogateescape")
    await engine.backend.transport.call("HSET", keys.core(held[0].tag, held[0]), "budget_ids", raw)
    assert await scan(engine) == 0
    await engine.backend.transport.call(
        "HSET", keys.core(held[0].tag, held[0]), "budget_ids", await budget(engine)
    )
    assert await states(engine, held) == ["rate_limited"]


async def test_only_the_headroom_is_let_go_by_priority(engine: Engine) -> None:
    policy = await quota(engine, rate=3)
    await limited(engine, quota=policy)
    assert len(await claimed(engine)) == 1
    held = [await limited(engine, quota=policy, priority=n) for n in (1, 4, 2, 3)]
    await hold(engine, held, "waiting_for_quota")
    assert await scan(engine) == 2
    assert await states(engine, held) == ["rate_limited", "waiting", "rate_limited", "waiting"]


async def test_work_without_a_policy_comes_back(engine: Engine) -> None:
    unlimited = await quota(engine)
    held = [await limited(engine, quota=name) for name in (unlimited, new_uuid(), None)]
    await hold(engine, held, "waiting_for_quota")
    assert await scan(engine) == 3


async def test_a_cycle_that_runs_out_of_time_continues_where_it_stopped(engine: Engine) -> None:
    stuck = await limited(engine, await budget(engine, 1, spent=1))
    free = await limited(engine, await budget(engine), lane="other")
    for each in (stuck, free):
        await hold(engine, [each], "waiting_for_budget")
    scanner = UnblockScanner()
    for _ in range(3):
        territory = {stuck.tag: frozenset({LANE}), free.tag: frozenset({"other"})}
        cycle = Impatient(engine.backend, territory)
        cycle.checks = 4
        await scanner.scan(cycle)
    assert await states(engine, [stuck, free]) == ["rate_limited", "waiting"]


async def test_the_retry_time_is_kept(engine: Engine) -> None:
    policy = await quota(engine, rate=5)
    held = [await limited(engine, quota=policy)]
    await hold(engine, held, "waiting_for_quota", retry_in_ms=5000)
    assert await scan(engine) == 0
    await engine.advance(5000)
    assert await scan(engine) == 1


@pytest.mark.parametrize("jitter", [0, 500])
async def test_a_retry_time_of_a_longer_window_is_not_kept(engine: Engine, jitter: int) -> None:
    """After the window was shortened, those that it left blocked start within the new one."""
    policy, quotas = await quota(engine, rate=1, window=86_400), engine.backend.quotas
    ids = [await limited(engine, quota=policy) for _ in range(3)]
    started = await claimed(engine)
    assert len(started) == 1
    await quotas.update_quota_policy(policy, window_seconds=1, jitter_ms=jitter)
    for _ in ids[1:]:
        await engine.advance(2000)
        await scan(engine)
        started += await claimed(engine)
    assert sorted(started) == sorted(ids)


async def test_stuck_work_in_front_hides_nothing(engine: Engine) -> None:
    spent, other = await budget(engine, 1, spent=1), await budget(engine)
    stuck = [await limited(engine, spent) for _ in range(120)]
    await hold(engine, stuck, "waiting_for_budget")
    await engine.advance(10)
    late = [await limited(engine, other) for _ in range(5)]
    await hold(engine, late, "waiting_for_budget")
    assert await scan(engine) == 5
    assert set(await states(engine, late)) == {"waiting"}


async def test_blocks_for_other_reasons_stay(engine: Engine) -> None:
    reasons = ["paused_by_operator", "paused_by_policy", "waiting_for_capable_worker"]
    held = [await engine.create() for _ in reasons]
    for each, reason in zip(held, reasons, strict=True):
        await hold(engine, [each], reason)
    assert await scan(engine) == 0
    # An entry of the wrong index is not let go.
    key = keys.lane(held[0].tag, "default", "blocked:budget")
    await engine.backend.transport.call("ZADD", key, 1, held[0])
    assert await scan(engine) == 0
    assert (await engine.vector(held[0])).blocking_reason == "paused_by_operator"
    await engine.backend.transport.call("ZREM", key, held[0])


async def test_the_filter_of_the_process_applies(engine: Engine) -> None:
    ours = await limited(engine, namespace="ours")
    others = await limited(engine, namespace="others")
    await hold(engine, [ours, others], "waiting_for_budget")
    assert await scan(engine, accept=ScannerFilter(namespace="ours")) == 1
    assert await states(engine, [ours, others]) == ["waiting", "rate_limited"]


async def test_two_scanners_let_go_once(engine: Engine) -> None:
    held = [await limited(engine) for _ in range(3)]
    await hold(engine, held, "waiting_for_budget")
    await engine.backend.admission.unblock_many(held[0].tag, held[:1], "waiting_for_budget")
    assert await scan(engine) == 2
    assert await scan(engine) == 0


async def test_a_freed_slot_without_a_note_is_found(engine: Engine) -> None:
    await without_followups(engine)
    policy = await quota(engine, cap=1)
    await limited(engine, quota=policy)
    (claim,) = await worker(engine).claim_many(1)
    held = [await limited(engine, quota=policy)]
    await hold(engine, held, "waiting_for_quota")
    await engine.backend.executions.complete(claim.handle)
    assert await scan(engine) == 1
    assert await slots(engine, policy) == 0
    assert await engine.backend.reads.read_execution_state(held[0]) is PublicState.WAITING
