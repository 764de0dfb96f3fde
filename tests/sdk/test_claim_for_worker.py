"""A server reserves work for a worker through the same cycle that workers claim with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from flowfabric.core.contracts.leases import ClaimGrant
from flowfabric.core.errors import ContentionError, CorruptionError, ValidationError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.engine.http.address import ServerAddress
from flowfabric.engine.http.backend import HttpBackend
from flowfabric.scheduler.grants import NoWork, WorkerGrants
from flowfabric.scheduler.permits import WorkerAtCapacity
from tests.sdk.conftest import MakeWorker
from tests.server.conftest import serving
from tests.support.engine import TTL, Engine
from tests.support.sdk import submit

GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


async def granted(grants: WorkerGrants, instance: str = "w-1", **options: Any) -> ExecutionId:
    grant = await grants.claim_for_worker("default", "w", instance, **options)
    assert isinstance(grant, ClaimGrant)
    return grant.execution_id


async def test_a_worker_runs_what_was_reserved_for_it(
    engine: Engine, make_worker: MakeWorker
) -> None:
    (execution_id,) = await submit(engine.backend)
    before = await engine.now()
    grant = await WorkerGrants(engine.backend).claim_for_worker(
        "default", "w", "w-1", grant_ttl_ms=7_000
    )
    assert isinstance(grant, ClaimGrant)
    assert before + 7_000 <= grant.expires_at_ms <= await engine.now() + 7_000
    worker = await make_worker(worker_id="w", worker_instance_id="w-1")
    task = await worker.claim_from_grant("default", grant)
    assert task.execution_id == execution_id
    await task.complete()


async def test_nothing_is_reserved_twice(engine: Engine) -> None:
    """In claim order; a reserved execution does not hide those after it."""
    ids = await submit(engine.backend, 3)
    grants = WorkerGrants(engine.backend)
    assert [await granted(grants) for _ in ids] == sorted(ids)
    assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()


async def test_only_what_the_worker_can_do_is_reserved(engine: Engine) -> None:
    """Without a write: twenty executions that it cannot run do not hide the one that it can."""
    gpu = await submit(engine.backend, 20, policy=GPU)
    (plain,) = await submit(engine.backend)
    grants = WorkerGrants(engine.backend)
    assert await granted(grants) == plain
    before = await engine.dump()
    assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()
    assert await engine.dump() == before
    assert await granted(grants, worker_capabilities=["gpu", "ssd"]) == min(gpu)


async def test_only_of_its_namespace_or_of_all_in_turn(engine: Engine) -> None:
    (plain,) = await submit(engine.backend)
    noisy = sorted(await submit(engine.backend, 5, namespace="noisy"))
    (quiet,) = await submit(engine.backend, namespace="quiet")
    grants = WorkerGrants(engine.backend)
    assert await granted(grants, namespaces=["noisy"]) == noisy[0]
    assert await grants.claim_for_worker("default", "w", "w-1", namespaces=["none"]) == NoWork()
    with pytest.raises(ValidationError, match="namespace"):
        await grants.claim_for_worker("default", "w", "w-1", namespaces=["a:b"])
    found = [await granted(grants) for _ in range(6)]
    assert set(found[:3]) == {plain, noisy[1], quiet}
    assert found[3:] == noisy[2:]


async def test_every_partition_is_reached(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home first, then a window that moves on while workers ask."""
    grants = WorkerGrants(engine.backend)
    (far,) = await submit(engine.backend, partition=211)
    (home,) = await submit(engine.backend)
    assert await granted(grants) == home
    monkeypatch.setattr("flowfabric.scheduler.grants._ROTATION_S", 0.0)
    found = [await grants.claim_for_worker("default", "w", "w-1") for _ in range(256 // 32)]
    assert [one.execution_id for one in found if isinstance(one, ClaimGrant)] == [far]


async def test_where_work_was_left_comes_before_the_window(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await submit(engine.backend, 2, partition=211)
    grants = WorkerGrants(engine.backend)
    monkeypatch.setattr("flowfabric.scheduler.grants._ROTATION_S", 0.0)
    found: list[ExecutionId] = []
    while not found:
        one = await grants.claim_for_worker("default", "w", "w-1")
        found += [one.execution_id] if isinstance(one, ClaimGrant) else []
    monkeypatch.setattr("flowfabric.scheduler.grants._ROTATION_S", 60.0)
    assert [*found, await granted(grants, "another-instance")] == sorted(ids)


@pytest.mark.corrupts
async def test_a_damaged_partition_hides_no_other(engine: Engine) -> None:
    grants = WorkerGrants(engine.backend)
    (damaged,) = await submit(engine.backend)
    (good,) = await submit(engine.backend, partition=grants._start("w-1") % 256)
    index = f"ff:idx:{damaged.tag}:lane:default:eligible"
    await engine.backend.transport.call("SET", index, "no index")
    assert await granted(grants) == good
    with pytest.raises(CorruptionError):
        await grants.claim_for_worker("default", "w", "w-1")


async def test_claiming_via_a_server(engine: Engine, make_worker: MakeWorker) -> None:
    worker = await make_worker(namespaces=["a", "b"], capabilities=["gpu"])
    async with serving(engine) as http:
        host, port = http.address
        address = ServerAddress(host=host, port=port)
        async with await HttpBackend.connect(address) as server:
            assert await worker.claim_via_server(server, "default") is None
            await submit(engine.backend, namespace="c")
            (wanted,) = await submit(engine.backend, namespace="b", policy=GPU)
            task = await worker.claim_via_server(server, "default", grant_ttl_ms=2_000)
            assert task is not None
            assert task.execution_id == wanted
            (left,) = await submit(engine.backend, namespace="a")
            with pytest.raises(WorkerAtCapacity):
                await worker.claim_via_server(server, "default")
            await task.complete()
            # Nothing was reserved while there was no permit.
            task = await worker.claim_via_server(server, "default")
            assert task is not None
            assert task.execution_id == left
            await task.complete()


@pytest.mark.corrupts
async def test_a_damaged_record_hides_none_after_it(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, *good = sorted(await submit(engine.backend, 3))
    await engine.backend.transport.call(
        "HSET", f"ff:exec:{damaged.tag}:{damaged}:core", "created_at", "soon"
    )
    grants = WorkerGrants(engine.backend)
    assert [await granted(grants) for _ in good] == good
    assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()
    skipped = [r for r in caplog.records if getattr(r, "action", "") == "candidate_skipped"]
    assert {getattr(record, "execution_id", "") for record in skipped} == {damaged}


async def calls_of(engine: Engine, work: Awaitable[object]) -> int:
    """How many functions the store runs for some work."""

    async def count() -> int:
        stats: Any = await engine.backend.transport.call("INFO", "commandstats")
        found = re.search(rb"cmdstat_fcall:calls=(\d+)", stats)
        return 0 if found is None else int(found[1])

    before = await count()
    await work
    return await count() - before


async def test_a_paused_lane_costs_one_call(engine: Engine) -> None:
    await submit(engine.backend, 40)
    grants = WorkerGrants(engine.backend)
    await engine.backend.lanes.set_lane_state("default", "paused")
    assert await calls_of(engine, grants.claim_for_worker("default", "w", "w-1")) == 1
    await engine.backend.lanes.set_lane_state("default", "active")
    await granted(grants)


async def test_executions_of_a_full_quota_are_asked_about_together(engine: Engine) -> None:
    policy_id = new_uuid()
    await engine.backend.quotas.create_quota_policy(
        quota_policy_id=policy_id, window_seconds=60, max_requests_per_window=1, max_concurrent=0
    )
    first, *others = sorted(await submit(engine.backend, 81, policy={"quota_policy_id": policy_id}))
    grants = WorkerGrants(engine.backend)
    assert await granted(grants) == first
    # One attempt each, and a few calls for each page of them.
    assert await calls_of(engine, grants.claim_for_worker("default", "w", "w-1")) < 150
    for each in others:
        state = await engine.backend.reads.read_execution_state(each)
        assert state.value == "rate_limited"


async def test_a_draining_worker_costs_one_call_per_namespace(engine: Engine) -> None:
    """Its namesakes in other namespaces may get the rest."""
    await engine.backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"], namespaces=["a", "b"]
    )
    await engine.backend.workers.drain_worker("w-1")
    home = engine.new_id().partition
    for namespace in ("a", "b", "c"):
        await submit(engine.backend, 40 if namespace != "c" else 1, namespace=namespace)
        await submit(engine.backend, 40, namespace="a", partition=(home + 1) % 256)
    grants = WorkerGrants(engine.backend)
    found = await granted(grants)
    assert await engine.backend.reads.get_execution_namespace(found) == "c"

    async def nothing() -> None:
        assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()

    # One of `a`, one of `b`, and the one of `c` that is granted already.
    assert await calls_of(engine, nothing()) == 3


async def test_workers_that_serve_others_take_no_turns_away(engine: Engine) -> None:
    for namespace in ("a", "b", "c", "d"):
        await submit(engine.backend, 5, namespace=namespace)
    grants, taken = WorkerGrants(engine.backend), Counter[str]()
    for served in [("a", "d"), ("b", "c")] * 4:
        grant = await grants.claim_for_worker("default", "w", "w-1", namespaces=served)
        assert isinstance(grant, ClaimGrant)
        claim = await engine.backend.claims.claim_execution(
            grant, lane_id="default", worker_id="w", worker_instance_id="w-1", lease_ttl_ms=TTL
        )
        taken[claim.namespace] += 1
    assert taken == {"a": 2, "b": 2, "c": 2, "d": 2}


async def test_work_that_was_lost_is_reserved_too(engine: Engine, make_worker: MakeWorker) -> None:
    """03 D7: claim cycles serve it first-class, in the order of the lane."""
    lost = (await engine.running()).execution_id
    await engine.advance(1)
    (later,) = await submit(engine.backend)
    await engine.backend.leases.revoke_lease(lost)
    grants = WorkerGrants(engine.backend)
    grant = await grants.claim_for_worker("default", "w", "v-1")
    assert isinstance(grant, ClaimGrant)
    assert grant.execution_id == lost
    assert await granted(grants) == later
    assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()
    worker = await make_worker(worker_id="w", worker_instance_id="v-1")
    task = await worker.claim_from_grant("default", grant)
    assert (task.execution_id, task.handle.kind) == (lost, "reclaimed")
    await task.complete()
    with pytest.raises(ContentionError, match="execution_not_leaseable"):
        await worker.claim_from_grant("default", grant)


async def test_lost_work_in_its_grace_period_or_at_its_cap_is_not_reserved(engine: Engine) -> None:
    await engine.backend.lanes.set_lane_config("default", reclaim_grace_ms=60_000)
    handle = await engine.running(policy={"max_reclaim_count": 0})
    await engine.advance(TTL + 1)
    await engine.backend.upkeep.mark_lease_expired_if_due(
        handle.execution_id.tag, [handle.execution_id]
    )
    grants = WorkerGrants(engine.backend)
    for waited_ms, expected in ((0, "active"), (60_000, "failed")):
        await engine.advance(waited_ms)
        assert await grants.claim_for_worker("default", "w", "w-1") == NoWork()
        state = await engine.backend.reads.read_execution_state(handle.execution_id)
        assert state.value == expected


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"lane_id": ""}, "invalid_input"),
        ({"worker_id": "a b"}, "invalid_input"),
        ({"worker_instance_id": ""}, "invalid_input"),
        ({"grant_ttl_ms": 0}, "invalid_input"),
        ({"grant_ttl_ms": 60_001}, "invalid_input"),
        ({"worker_capabilities": ["a,b"]}, "invalid_capabilities"),
    ],
)
async def test_bad_requests_are_refused(engine: Engine, changed: dict[str, Any], code: str) -> None:
    asked: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    with pytest.raises(ValidationError) as caught:
        await WorkerGrants(engine.backend).claim_for_worker(**asked | changed)
    assert caught.value.code == code


async def test_many_reservations_hide_nothing(engine: Engine) -> None:
    """Whoever asks last still finds the last one, although all before it are reserved."""
    ids = await submit(engine.backend, 40)
    grants = WorkerGrants(engine.backend)
    found = [await granted(grants, f"w-{number}") for number in range(40)]
    assert sorted(found) == sorted(ids)
    assert await grants.claim_for_worker("default", "w", "w-41") == NoWork()


async def test_each_cycle_is_logged_for_debugging(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await submit(engine.backend)
    with caplog.at_level("DEBUG", "flowfabric.scheduler.grants"):
        await granted(WorkerGrants(engine.backend))
    (record,) = [each for each in caplog.records if vars(each).get("action") == "claim_cycle"]
    said = vars(record)
    assert (said["worker_instance_id"], said["partitions_hit"]) == ("w-1", 1)
    assert said["partitions_visited"] == said["partitions_skipped"] + 1
    assert 0 <= said["start_p"] < 256
    assert said["elapsed_ms"] >= 0
