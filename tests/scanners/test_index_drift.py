"""From the record alone: every entry that is lost, wrong or one too many, in every state."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.support.engine import TTL, Engine
from tests.support.executions import ATTEMPT_TIMEOUT, CODES, POLICY, Case
from tests.support.scanning import rings
from tests.support.storage import everywhere
from tests.support.suspension import Waits

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}
LANE_INDEXES = (
    *("eligible", "eligible:gpu", "delayed", "active", "reclaimable", "reclaimable:gpu"),
    *("suspended", "terminal", "blocked:dependencies", "blocked:budget", "blocked:quota"),
    *("blocked:route", "blocked:operator", "blocked:lane"),
)
TIMERS = ("lease_expiry", "attempt_timeout", "execution_deadline", "suspension_timeout")
WRONG = 9e15


async def put(engine: Engine, execution_id: ExecutionId, name: str, score: float) -> None:
    key = keys.index(execution_id.tag, name)
    if name.startswith("worker:"):
        await engine.backend.transport.call("SADD", key, execution_id)
    else:
        await engine.backend.transport.call("ZADD", key, score, execution_id)


async def take(engine: Engine, execution_id: ExecutionId, name: str) -> None:
    key = keys.index(execution_id.tag, name)
    command = "SREM" if name.startswith("worker:") else "ZREM"
    await engine.backend.transport.call(command, key, execution_id)


async def mended(
    engine: Engine, execution_id: ExecutionId, right: dict[str, float | None], what: str
) -> None:
    """The drift is reported, a check changes nothing, and the repair brings back what was."""
    reconcile, tag = engine.backend.upkeep.reconcile_execution_index, execution_id.tag
    damaged = await everywhere(engine, execution_id)
    (seen,) = await reconcile(tag, [execution_id], "check")
    assert seen.startswith("drifted:"), what
    assert await everywhere(engine, execution_id) == damaged
    (answer,) = await reconcile(tag, [execution_id], "repair")
    assert answer == f"repaired:{seen.partition(' ')[2]}", what
    assert await everywhere(engine, execution_id) == right, what
    assert await reconcile(tag, [execution_id], "check") == ["consistent"], what


async def neighbours(engine: Engine) -> None:
    """Other lanes and signatures exist, and workers hold something."""
    await engine.create(lane="other")
    await engine.create(lane="third", execution_id=engine.new_id())
    await engine.create(policy=GPU)


@pytest.mark.parametrize("state", CODES)
async def test_what_is_lost_is_found_again(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await neighbours(engine)
    right = await everywhere(engine, case.execution_id)
    for name in right:
        await take(engine, case.execution_id, name)
        await mended(engine, case.execution_id, right, name)
    for name in right:
        await take(engine, case.execution_id, name)
    await mended(engine, case.execution_id, right, "all at once")


@pytest.mark.parametrize("state", CODES)
async def test_wrong_scores_are_put_right(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    right = await everywhere(engine, case.execution_id)
    for name, score in right.items():
        if score is not None:
            for wrong in (score + 1, WRONG, float("-inf")):
                await put(engine, case.execution_id, name, wrong)
                await mended(engine, case.execution_id, right, f"{name} {wrong}")


@pytest.mark.parametrize("state", CODES)
async def test_what_is_too_many_is_removed(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    await neighbours(engine)
    right = await everywhere(engine, case.execution_id)
    record: Any = await engine.backend.transport.call(
        "HGET", keys.core(case.execution_id.tag, case.execution_id), "worker"
    )
    lanes = [f"lane:{lane}:{name}" for lane in ("default", "third") for name in LANE_INDEXES]
    workers = ["worker:w-1:leases"] if record else []
    # An index under a signature that the lane does not know is seen by nobody.
    known = [name for name in lanes if not name.startswith("lane:third:") or "gpu" not in name]
    for name in (*known, *TIMERS, *workers):
        if name in right:
            continue
        await put(engine, case.execution_id, name, WRONG)
        await mended(engine, case.execution_id, right, name)


@pytest.mark.parametrize("state", CODES)
async def test_without_its_record_nothing_is_left(engine: Engine, state: str) -> None:
    case = await Case.make(engine, state)
    execution_id, tag = case.execution_id, case.execution_id.tag
    left: Any = await engine.backend.transport.call("KEYS", f"*{execution_id}*")
    await engine.backend.transport.call("DEL", *left)
    reconcile = engine.backend.upkeep.reconcile_execution_index
    assert await reconcile(tag, [execution_id], "check") == ["orphan"]
    assert await reconcile(tag, [execution_id], "repair") == ["orphan_removed"]
    assert await everywhere(engine, execution_id) == {}
    for mode in ("check", "repair"):
        assert await reconcile(tag, [execution_id], mode) == ["consistent"], "nobody holds it"


@pytest.mark.parametrize("lost", [False, True], ids=["waiting", "lost"])
async def test_work_that_waits_for_a_worker_with_its_task(engine: Engine, lost: bool) -> None:
    execution_id = await engine.create(execution_kind="new", policy=GPU)
    if lost:
        await engine.claim(capabilities=["gpu"])
        await engine.backend.leases.revoke_lease(execution_id)
    await engine.claim_all(capabilities=["gpu"], tasks=["old"])
    right = await everywhere(engine, execution_id)
    index = "reclaimable" if lost else "eligible"
    assert f"lane:default:{index}:gpu,task:new" in right
    await take(engine, execution_id, f"lane:default:{index}:gpu,task:new")
    await put(engine, execution_id, f"lane:default:{index}", 1)
    await mended(engine, execution_id, right, "back where anyone would take it")


async def test_a_signature_that_its_lane_forgot(engine: Engine) -> None:
    execution_id = await engine.create(policy=GPU)
    sigs = keys.lane(execution_id.tag, "default", "sigs")
    await engine.backend.transport.call("DEL", sigs)
    assert await engine.claim_all(capabilities=["gpu"]) == []
    bell = keys.bell("default", "gpu")
    await engine.backend.transport.call("DEL", keys.wake(bell))
    reconcile = engine.backend.upkeep.reconcile_execution_index
    verdicts = await reconcile(execution_id.tag, [execution_id], "check")
    assert verdicts == ["drifted:eligible none>sigs"]
    await reconcile(execution_id.tag, [execution_id], "repair")
    assert await rings(engine, bell) == [str(execution_id.partition).encode()]
    assert len(await engine.claim_all(capabilities=["gpu"])) == 1


@pytest.mark.parametrize("lost", [True, False])
async def test_where_requirements_keep_executions_apart(engine: Engine, lost: bool) -> None:
    """Every index under a signature, for what waits and for what a worker lost."""
    execution_id = await engine.create(policy=GPU)
    if lost:
        await engine.claim(capabilities=["gpu"])
        await engine.backend.leases.revoke_lease(execution_id)
    right = await everywhere(engine, execution_id)
    assert f"lane:default:{'reclaimable' if lost else 'eligible'}:gpu" in right
    for name, score in right.items():
        await take(engine, execution_id, name)
        await mended(engine, execution_id, right, name)
        await put(engine, execution_id, name, WRONG)
        await mended(engine, execution_id, right, f"{name} {score}")
    for name in ("eligible", "eligible:gpu", "reclaimable", "reclaimable:gpu"):
        if f"lane:default:{name}" not in right:
            await put(engine, execution_id, f"lane:default:{name}", WRONG)
            await mended(engine, execution_id, right, name)
    await engine.backend.transport.call("DEL", keys.lane(execution_id.tag, "default", "sigs"))
    await mended(engine, execution_id, right, "sigs")
    assert len(await engine.claim_all(capabilities=["gpu"])) == 1


@pytest.mark.parametrize("paused_ms", [1, 3000, ATTEMPT_TIMEOUT - 1])
async def test_the_timer_of_a_resumed_attempt(engine: Engine, paused_ms: int) -> None:
    """What it had left is not on the record: it may come late, never early, and not never."""
    case = await Case.make(engine, "active")
    await engine.advance(paused_ms)
    await engine.backend.executions.delay(case.held, 1)
    await case.claim()
    execution_id = case.execution_id
    timer = keys.index(execution_id.tag, "attempt_timeout")
    due: Any = await engine.backend.transport.call("ZSCORE", timer, execution_id)
    reconcile = engine.backend.upkeep.reconcile_execution_index
    assert await reconcile(execution_id.tag, [execution_id], "check") == ["consistent"]
    await engine.backend.transport.call("ZREM", timer, execution_id)
    await reconcile(execution_id.tag, [execution_id], "repair")
    again: Any = await engine.backend.transport.call("ZSCORE", timer, execution_id)
    assert due <= again <= due + ATTEMPT_TIMEOUT
    assert await reconcile(execution_id.tag, [execution_id], "check") == ["consistent"]
    for wrong in (again + 1, due - ATTEMPT_TIMEOUT):
        await engine.backend.transport.call("ZADD", timer, wrong, execution_id)
        verdict = "drifted:active attempt_timeout>attempt_timeout"
        assert await reconcile(execution_id.tag, [execution_id], "check") == [verdict]
        await reconcile(execution_id.tag, [execution_id], "repair")


@pytest.mark.parametrize("timed", [True, False])
async def test_the_score_of_a_suspension(engine: Engine, timed: bool) -> None:
    waits = await Waits.open(engine)
    timeout = await engine.now() + 60_000 if timed else None
    execution_id = (await waits.park(timeout_at=timeout)).handle.execution_id
    right = await everywhere(engine, execution_id)
    for name in right:
        await put(engine, execution_id, name, WRONG)
        await mended(engine, execution_id, right, name)


async def test_another_priority_weight_rescores_the_lane(engine: Engine) -> None:
    """What waits was scored with the old one; that is no drift while it is scored anew."""
    execution_id, tag = await engine.create(priority=5), engine.new_id().tag
    await engine.backend.lanes.set_lane_config("default", priority_weight_ms=1000)
    created = int((await engine.backend.reads.read_execution_info(execution_id)).created_at)
    reconcile = engine.backend.upkeep.reconcile_execution_index
    assert await reconcile(tag, [execution_id], "repair") == ["consistent"]
    lost = await engine.create(priority=7)
    await engine.backend.transport.call("ZREM", keys.eligible(tag, "default"), lost)
    assert await reconcile(tag, [lost], "repair") == ["repaired:none>eligible"]
    assert ((await everywhere(engine, lost))["lane:default:eligible"] or created) < created
    # Once the marks are gone, a wrong score is drift again.
    await engine.backend.transport.call("DEL", keys.index(tag, "rescore"))
    assert await reconcile(tag, [execution_id], "repair") == ["repaired:eligible>eligible"]
    assert (await everywhere(engine, execution_id))["lane:default:eligible"] == created - 5000


async def test_one_call_for_many(engine: Engine) -> None:
    """Drifted, right, gone and unreadable ones side by side, more than a command may name."""
    ids = [await engine.create(policy=POLICY) for _ in range(450)]
    tag, call = ids[0].tag, engine.backend.transport.call
    await call("ZREM", keys.eligible(tag, "default"), ids[0], ids[440])
    await call("ZREM", keys.index(tag, "execution_deadline"), ids[1], ids[440])
    ghost = engine.new_id()
    await call("ZADD", keys.index(tag, "all_executions"), 0, ghost)
    audit = await engine.backend.upkeep.audit_indexes(tag, [*ids, ghost], ["default"], "repair")
    repaired = {ids[0]: "eligible", ids[1]: "execution_deadline"}
    repaired[ids[440]] = "eligible+execution_deadline"
    expected = [f"repaired:none>{repaired[i]}" if i in repaired else "consistent" for i in ids]
    assert audit.verdicts == [*expected, "orphan_removed"]
    assert audit.lanes == ["default"]


@pytest.mark.corrupts
async def test_an_unreadable_index_only_affects_its_own_executions(engine: Engine) -> None:
    delayed = await engine.create(delay_until=await engine.now() + 60_000)
    waiting = await engine.create()
    call, tag = engine.backend.transport.call, waiting.tag
    for name in ("lane:default:delayed", "lane:default:blocked:route", "suspension_timeout"):
        await call("DEL", keys.index(tag, name))
        await call("SET", keys.index(tag, name), "garbage")
    await call("DEL", keys.eligible(tag, "default"))
    broken, repaired = await engine.backend.upkeep.reconcile_execution_index(
        tag, [delayed, waiting]
    )
    assert broken.startswith(f"error:{delayed}: {keys.lane(tag, 'default', 'delayed')}: WRONGTYPE")
    assert repaired == "repaired:none>eligible"


@pytest.mark.corrupts
async def test_a_record_that_cannot_be_read_is_left_alone(engine: Engine) -> None:
    held = await engine.running()
    core = keys.core(held.execution_id.tag, held.execution_id)
    before = await everywhere(engine, held.execution_id)
    reconcile = engine.backend.upkeep.reconcile_execution_index
    for field, value in (("lease_expires_at", "soon"), ("state", b"\xff"), ("worker", None)):
        if value is None:
            await engine.backend.transport.call("HDEL", core, field)
        else:
            await engine.backend.transport.call("HSET", core, field, value)
        (verdict,) = await reconcile(held.execution_id.tag, [held.execution_id], "repair")
        assert verdict.startswith(f"error:{held.execution_id}: ")
    assert await everywhere(engine, held.execution_id) == before


async def test_a_lease_that_ends_leaves_nothing_to_repair(engine: Engine) -> None:
    """The same attempt through every change of hands."""
    case = await Case.make(engine, "active")
    reconcile, execution_id = engine.backend.upkeep.reconcile_execution_index, case.execution_id
    for step in ("renew", "expire", "reclaim", "revoke", "reclaim", "complete"):
        if step == "renew":
            await engine.backend.leases.renew_lease(execution_id, case.held, TTL)
        elif step == "expire":
            await engine.advance(TTL)
            await engine.backend.upkeep.mark_lease_expired_if_due(execution_id.tag, [execution_id])
        elif step == "revoke":
            await engine.backend.leases.revoke_lease(execution_id)
        elif step == "reclaim":
            case.handle = (await engine.claim(instance="w-2")).handle
        else:
            await engine.backend.executions.complete(case.held)
        assert await reconcile(execution_id.tag, [execution_id], "check") == ["consistent"], step
