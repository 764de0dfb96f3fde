"""Listings and the token read: paging, order, and no token where none belongs."""

from __future__ import annotations

import logging

import pytest

from flowfabric.core.conditions import AllOf, Single
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine, refused
from tests.support.leases import running
from tests.support.server_time import commands_run
from tests.support.suspension import GO, Waits


@pytest.mark.corrupts
async def test_damaged_waitpoints_are_left_out_with_a_warning(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(AllOf(tuple(Single(key) for key in "abcd")))
    execution_id = parked.handle.execution_id
    first, second, third, _ = [
        f"ff:wp:{execution_id.tag}:{w.waitpoint_id}" for w in parked.details.waitpoints
    ]
    call = engine.backend.transport.call
    await call("HDEL", first, "waitpoint_token")
    await call("HDEL", second, "created_at")
    await call("DEL", third)
    await call("SADD", keys.pending_waitpoints(execution_id.tag, execution_id), "not-an-id")
    with caplog.at_level(logging.WARNING):
        page = await waits.backend.waitpoints.list_pending_waitpoints(execution_id)
    assert [e.waitpoint_key for e in page.entries] == ["d"]
    assert [r.__dict__["action"] for r in caplog.records] == ["record_unreadable"] * 4
    assert len(page.damaged) == 4
    assert "k1:" not in caplog.text


async def test_a_page_of_waitpoints_reads_no_closed_ones(engine: Engine) -> None:
    waits, costs = await Waits.open(engine), list[int]()
    parked = await waits.park(timeout_at=await engine.now() + 60_000)
    for _ in range(2):
        ran = await commands_run(engine)
        page = await waits.backend.waitpoints.list_pending_waitpoints(parked.handle.execution_id)
        assert [one.waitpoint_key for one in page.entries] == ["k"]
        costs.append(await commands_run(engine) - ran)
        for _ in range(50):
            await waits.send(parked)
            parked = await waits.park(handle=(await engine.claim()).handle)
    assert costs[0] == costs[1]


async def test_the_token_read_without_a_key_store(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    execution_id, point = parked.handle.execution_id, parked.details.waitpoint_id
    await engine.backend.transport.call("DEL", f"ff:sec:{execution_id.tag}:waitpoint_hmac")
    await refused(
        waits.backend.signals.read_waitpoint_token(execution_id, point),
        "hmac_secret_not_initialized",
    )


async def test_a_page_of_the_suspended_reads_the_lanes_of_its_partition(engine: Engine) -> None:
    waits, costs = await Waits.open(engine), list[int]()
    parked = (await waits.park()).handle.execution_id
    for _ in range(2):
        ran = await commands_run(engine)
        page = await waits.backend.suspensions.list_suspended(partition=parked.partition)
        assert [one.execution_id for one in page.entries] == [parked]
        costs.append(await commands_run(engine) - ran)
        other = f"{{fp:{(parked.partition + 1) % engine.backend.counts.flow}}}"
        await engine.backend.places.register_places({other: [f"lane{n}" for n in range(200)]})
    assert costs[1] < costs[0] + 20


@pytest.mark.corrupts
async def test_rows_whose_suspension_has_ended_are_skipped(engine: Engine) -> None:
    waits = await Waits.open(engine)
    parked = [await waits.park(GO, handle=await running(engine)) for _ in range(5)]
    ids = sorted(one.handle.execution_id for one in parked)
    for lost in ids[1:4]:
        await engine.backend.transport.call("DEL", f"ff:exec:{lost.tag}:{lost}:suspension:current")
    page = await waits.backend.suspensions.list_suspended(limit=2)
    assert [e.execution_id for e in page.entries] == [ids[0], ids[4]]
    assert page.next_cursor is None


@pytest.mark.corrupts
@pytest.mark.parametrize("details", ["{", "[" * 200_000 + "]" * 200_000])
async def test_a_question_that_cannot_be_read_hides_no_other(engine: Engine, details: str) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park(details={"a": 1})
    healthy = await waits.park(prompt="Go?")
    eid = parked.handle.execution_id
    await waits.write(f"ff:exec:{eid.tag}:{eid}:suspension:current", details=details)
    page = await waits.backend.suspensions.list_suspended()
    assert [one.execution_id for one in page.entries] == [healthy.handle.execution_id]
    assert page.damaged == (f"{eid}: details: cannot be decoded",)
    await refused(waits.backend.reads.describe_execution(eid), "corruption")
    (one,) = (await waits.backend.waitpoints.list_pending_waitpoints(eid)).entries
    assert one.waitpoint_id == parked.details.waitpoint_id
