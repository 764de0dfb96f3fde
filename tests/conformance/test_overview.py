"""What people ask of the engine: the newest executions, waits, everything about one."""

from __future__ import annotations

from flowfabric.core.conditions import Single
from flowfabric.core.contracts.budgets import Exhausted
from flowfabric.core.contracts.quotas import FullQuota
from flowfabric.core.state import PublicState
from flowfabric.engine.api.reads import Filter
from flowfabric.engine.overview import (
    ReachedLimits,
    list_newest,
    list_waits,
    read_detail,
    read_wait,
)
from flowfabric.sdk.diagnosis import explain
from tests.support.admission import budget, claimed, limited, quota
from tests.support.engine import LANE, Engine
from tests.support.suspension import SECRET


async def test_the_newest_come_first_and_all_are_counted(engine: Engine) -> None:
    ids = []
    for _ in range(3):
        ids.append(await engine.create())
        await engine.advance(1000)
    await engine.claim()
    listing = await list_newest(engine.backend, Filter(), 2)
    assert [row.execution_id for row in listing.rows] == [ids[2], ids[1]]
    assert listing.states == {"waiting": 2, "active": 1}
    assert listing.complete
    everything = await list_newest(engine.backend, Filter(), None)
    oldest = everything.rows[-1]
    assert oldest.public_state is PublicState.ACTIVE
    assert (oldest.total_attempt_count, oldest.worker_instance_id is None) == (1, False)


async def test_what_waits_and_how_it_ended(engine: Engine) -> None:
    backend = engine.backend
    await backend.secrets.seed_at_boot(SECRET)
    handle = await engine.running()
    eid = handle.execution_id
    assert (await read_wait(backend, eid))[1] is None
    now = await backend.meta.server_time_ms()
    await backend.suspensions.suspend(
        handle, condition=Single("go"), timeout_at=now + 60_000, timeout_behavior="fail"
    )
    waits, left_out = await list_waits(backend, lane=LANE, namespace="default", limit=5)
    (wait,) = waits
    assert (wait.execution_id, wait.until, left_out) == (eid, now + 60_000, 0)
    (waitpoint,) = wait.waitpoints
    assert waitpoint.waitpoint_key == "go"
    assert await list_waits(backend, lane="other", namespace=None, limit=5) == ([], 0)
    assert await list_waits(backend, lane=None, namespace="other", limit=5) == ([], 0)
    await backend.signals.deliver_approval_signal(
        eid, waitpoint.waitpoint_id, "go", decided_by="ann"
    )
    _, last = await read_wait(backend, eid)
    assert last is not None
    assert last.close_reason == "resumed"
    assert [answer.source_identity for answer in last.answers] == ["ann"]


async def test_everything_about_one(engine: Engine) -> None:
    eid = await engine.create(input_payload=b"{}", policy={"max_reclaim_count": 5})
    detail = await read_detail(engine.backend, eid)
    assert (detail.payload, detail.result, detail.running) == (b"{}", None, False)
    assert detail.why_not_running is not None
    assert detail.why_not_running.live_workers == 0
    await engine.claim()
    assert (await read_detail(engine.backend, eid)).running
    await engine.backend.executions.cancel_execution(eid)
    assert (await read_detail(engine.backend, eid)).why_not_running is None


async def test_the_limits_that_keep_it_from_starting(engine: Engine) -> None:
    spent, policy = await budget(engine, 10, spent=10), await quota(engine, cap=1)
    await limited(engine, quota=policy)
    (running,) = await claimed(engine)
    eid = await limited(engine, spent, quota=policy)
    limits = explain(await read_detail(engine.backend, eid)).limits
    assert limits.budgets == (Exhausted(spent, "tokens", 10, 10),)
    assert limits.quota == FullQuota(policy, "concurrency", None)
    assert explain(await read_detail(engine.backend, running)).limits == ReachedLimits()


async def test_a_deployment_can_be_checked_through_the_interface(engine: Engine) -> None:
    found = {each.name: each for each in await engine.backend.meta.diagnose()}
    assert {"connection", "version", "eviction", "partitions", "indexes"} <= set(found)
    assert found["workers"].detail == "no live worker: nothing runs"


async def test_what_the_store_spends(engine: Engine) -> None:
    meta, eid = engine.backend.meta, await engine.create()
    before, (entries, size) = await meta.usage(), await meta.feed_size(eid.partition)
    await engine.backend.executions.cancel_execution(eid)
    after, feed = await meta.usage(), await meta.feed_size(eid.partition)
    assert after.commands > before.commands
    assert (after.cpu_s >= before.cpu_s > 0, after.data_bytes > 0, after.blocked) == (True, True, 0)
    assert feed[0] > entries
    assert feed[1] > size
