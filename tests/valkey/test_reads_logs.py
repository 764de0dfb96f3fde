"""What the engine writes into its log: operators, ends, wear, lanes (02 §20, 03 §15, 01 §13)."""

from __future__ import annotations

import logging

import pytest

from flowfabric.core.partition import PartitionCounts, solo_partition
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.layers.audit import warn_of_reclaims
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.boot import report_collisions
from tests.conformance.test_reads_logs import Records, said
from tests.support.engine import LANE, Engine
from tests.support.leases import reclaim


@pytest.mark.parametrize("way", ["claim_many", "grant", "complete_and_claim"])
@pytest.mark.parametrize(("before", "warned"), [(98, False), (99, True), (100, False), (199, True)])
async def test_a_warning_at_every_hundredth_reclaim(
    engine: Engine, caplog: Records, way: str, before: int, warned: bool
) -> None:
    backend = engine.backend
    handle = await engine.running(policy={"max_reclaim_count": 1000})
    execution_id = handle.execution_id
    other = None
    if way == "complete_and_claim":
        other = await engine.running()
    key = keys.core(execution_id.tag, execution_id)
    await backend.transport.call(
        *("HSET", key, "lease_reclaim_count", before, "attempt", f"{handle.attempt_id}/{before}"),
        key=key,
    )
    await backend.leases.revoke_lease(execution_id)
    caplog.clear()
    if way == "claim_many":
        claim = await engine.claim()
    elif way == "grant":
        claim = await reclaim(engine, execution_id)
    else:
        assert other is not None
        _, claimed = await backend.claims.complete_and_claim(
            execution_id.tag, [Completion(other)], engine.want(), 1
        )
        (claim,) = claimed.claims
    warnings = said(caplog, "reclaimed_often")
    assert [w["reclaim_count"] for w in warnings] == ([before + 1] if warned else [])
    for warning in warnings:
        assert warning["levelno"] == logging.WARNING
        assert warning["lease_epoch"] == claim.handle.lease_epoch
    await backend.executions.cancel_execution(execution_id)


@pytest.mark.corrupts
async def test_a_damaged_count_of_reclaims_costs_a_warning_not_the_claim(
    engine: Engine, caplog: Records
) -> None:
    handle = await engine.running()
    key = keys.core(handle.execution_id.tag, handle.execution_id)
    for damaged in ("many", "1.5", b"\xff"):
        await engine.backend.transport.call("HSET", key, "lease_reclaim_count", damaged, key=key)
        await warn_of_reclaims(engine.backend.reads, handle)
    assert said(caplog, "reclaimed_often") == []


async def test_lanes_that_share_a_partition_are_logged_at_boot(
    engine: Engine, caplog: Records
) -> None:
    backend = engine.backend
    caplog.set_level(logging.DEBUG, "flowfabric.engine.valkey.boot")
    await backend.meta.prepare()
    (clean,) = said(caplog, "lane_collisions")
    assert (clean["grade"], clean["levelno"], clean["shared"]) == ("clean", logging.DEBUG, [])
    home = solo_partition(LANE, backend.counts)
    twin = next(
        name
        for name in (f"lane-{n}" for n in range(10_000))
        if solo_partition(name, backend.counts) == home
    )
    await backend.transport.call("SADD", keys.LANES, twin, key=keys.LANES)
    caplog.clear()
    await backend.meta.prepare()
    (shared,) = said(caplog, "lane_collisions")
    assert (shared["grade"], shared["levelno"]) == ("remediate", logging.WARNING)
    assert shared["shared"] == [[LANE, twin]]
    assert (shared["affected"], shared["lanes"]) == (2, 2)
    for placement, lanes in (("spread", 1), ("pinned", 2)):
        caplog.clear()
        await backend.lanes.set_lane_config(twin, placement=placement)
        await backend.meta.prepare()
        (told,) = said(caplog, "lane_collisions")
        assert (told["grade"] == "clean", told["lanes"]) == (placement == "spread", lanes)


async def test_few_shared_lanes_among_many_are_no_warning(engine: Engine, caplog: Records) -> None:
    counts = PartitionCounts(flow=65_535)
    names = [f"lane-{n}" for n in range(200)]
    await engine.backend.transport.call("SADD", keys.LANES, *names, key=keys.LANES)
    caplog.set_level(logging.DEBUG, "flowfabric.engine.valkey.boot")
    await report_collisions(engine.backend.transport, counts)
    (told,) = said(caplog, "lane_collisions")
    assert told["levelno"] < logging.WARNING
