"""The same promises where partitions live on different nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.core.conditions import AllOf, Single
from flowfabric.core.contracts.suspension import Accepted, SeedOutcome, Suspended, UsePending
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.cluster import TestCluster
from tests.support.engine import Engine, refused
from tests.support.leases import running
from tests.support.scanning import idle
from tests.support.sdk import until
from tests.support.suspension import SECRET, Waits

LANES = [f"lane-{number}" for number in range(9)]
COUNTS = PartitionCounts(flow=64, budget=1, quota=1)


@pytest.fixture
async def clustered(cluster: TestCluster) -> AsyncIterator[Engine]:
    backend = await ValkeyBackend.connect(parse_url(cluster.url), prepare_with=COUNTS)
    await backend.transport.call_all_primaries("FLUSHALL")
    await backend.meta.prepare()
    yield Engine(backend)
    await backend.aclose()


async def test_every_partition_has_its_keys(clustered: Engine) -> None:
    backend = clustered.backend
    assert await backend.secrets.seed_at_boot(SECRET) == SeedOutcome(installed=COUNTS.flow)
    assert await backend.secrets.seed_at_boot(SECRET) == SeedOutcome(match=COUNTS.flow)
    summary = await backend.secrets.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32, 60_000)
    assert summary.rotated == COUNTS.flow
    for partition in range(0, COUNTS.flow, 7):
        kids = await backend.secrets.list_waitpoint_hmac_kids(partition)
        assert kids.current_kid == "k2"
        assert [kid.kid for kid in kids.verifying] == ["k1"]


async def test_pauses_on_every_node(clustered: Engine) -> None:
    waits = await Waits.open(clustered)
    parked: dict[ExecutionId, Suspended] = {}
    for lane in LANES:
        handle = await running(clustered, lane=lane)
        both = AllOf((Single("a"), Single("b")))
        parked[handle.execution_id] = await waits.park(both, handle=handle)
    assert len({one.tag for one in parked}) > 3
    listed = await waits.backend.suspensions.list_suspended()
    assert {entry.execution_id for entry in listed.entries} == set(parked)
    for execution_id, one in parked.items():
        assert (
            len((await waits.backend.waitpoints.list_pending_waitpoints(execution_id)).entries) == 2
        )
        assert await waits.effect(one) == "appended_to_waitpoint"
        assert await waits.effect(one, at=1) == "resume_condition_satisfied"
    for lane in LANES:
        (claim,) = await clustered.claim_all(lane=lane)
        assert claim.resume_cause is not None
        assert len(await waits.backend.waitpoints.observe_signals(claim.handle)) == 2
    assert (await waits.backend.suspensions.list_suspended()).entries == ()


async def test_buffers_timeouts_and_endings(clustered: Engine) -> None:
    waits = await Waits.open(clustered)
    supervisor = idle(clustered)
    timeout = await clustered.now() + 1
    for lane in LANES[:3]:
        handle = await running(clustered, lane=lane)
        pending = await waits.backend.waitpoints.create_waitpoint(handle, "k", 60_000)
        unused = await waits.backend.waitpoints.create_waitpoint(handle, "k", 1)
        outcome = await waits.signal(handle.execution_id, pending, "no")
        assert isinstance(outcome, Accepted)
        await waits.backend.suspensions.suspend(
            handle,
            condition=Single("k", "go"),
            waitpoints=[UsePending(pending.waitpoint_id)],
            timeout_at=timeout,
        )
        assert unused.waitpoint_id

    async def passed() -> bool:
        return await clustered.now() > timeout + 1

    await until(passed)
    assert (await supervisor.scan_once("suspension_timeout")).processed == 3
    assert (await supervisor.scan_once("pending_wp_expiry")).errors == 0
    for lane in LANES[:3]:
        execution_id = clustered.new_id(lane)
        tag = execution_id.tag
        handle = await running(clustered, lane=lane)
        parked = await waits.park(handle=handle)
        assert parked.handle.execution_id.tag == tag
        await waits.backend.executions.cancel_execution(handle.execution_id)
        await refused(waits.send(parked), "target_not_signalable")
