"""Gauges that are read from the engine at a scrape."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.metrics import Meter
from flowfabric.engine.valkey import keys
from flowfabric.observability import Gauges
from tests.support.engine import Engine
from tests.support.flows import submitted, without_followups
from tests.support.storage import commands
from tests.support.suspension import Waits


@pytest.fixture
def gauges(engine: Engine, meter: Meter) -> Gauges:
    """Gauges that are read at every refresh."""
    return Gauges(engine.backend, meter, max_age_s=0)


async def test_depths_by_lane(engine: Engine, meter: Meter, gauges: Gauges) -> None:
    for _ in range(3):
        await engine.create()
    await engine.create(lane="mails")
    await engine.running(lane="mails")
    flow = await submitted(engine, "a>b")
    lost = await engine.running(lane="lost")
    await engine.advance(60_000)
    tag = lost.execution_id.tag
    await engine.backend.upkeep.mark_lease_expired_if_due(tag, [lost.execution_id])
    await gauges.refresh()
    depth = meter.numbers["ff_eligible_depth"]
    assert depth["default",] == 3 + 1
    assert depth["mails",] == 1
    assert meter.value("ff_blocked_depth", "default", "dependencies") == 1
    assert meter.value("ff_blocked_depth", "default", "budget") == 0
    assert meter.value("ff_reclaimable_depth", "lost") == 1
    assert flow.nodes


async def test_a_deleted_lane_disappears(meter: Meter) -> None:
    meter.replace("ff_eligible_depth", {("old",): 3, ("kept",): 1})
    meter.replace("ff_eligible_depth", {("kept",): 2})
    assert meter.numbers["ff_eligible_depth"] == {("kept",): 2}


async def test_ages_begin_when_an_execution_becomes_claimable(
    engine: Engine, meter: Meter, gauges: Gauges
) -> None:
    delayed = await engine.create(delay_ms=3_600_000)
    await engine.create(lane="mails")
    await engine.advance(3_600_000)
    await engine.backend.upkeep.promote_delayed(delayed.tag, "default", [delayed])
    await engine.advance(5000)
    await gauges.refresh()
    ages = meter.numbers["ff_oldest_eligible_age_seconds"]
    assert ages["default",] == pytest.approx(5, abs=2)
    assert ages["mails",] == pytest.approx(3605, abs=5)
    await engine.claim(lane="mails")
    await gauges.refresh()
    assert meter.value("ff_oldest_eligible_age_seconds", "mails") == 0


async def test_many_lanes_cost_few_calls(
    engine: Engine, meter: Meter, gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        await engine.create(lane=f"lane-{number}")
    transport, sent = engine.backend.transport, list[str]()
    original = transport.fcall

    async def counted(function: str, *args: Any, **options: Any) -> Any:
        sent.append(function)
        return await original(function, *args, **options)

    monkeypatch.setattr(transport, "fcall", counted)
    await gauges.refresh()
    assert len(meter.numbers["ff_eligible_depth"]) >= 200
    assert sent.count("ff_count_lanes") < 20
    assert sent.count("ff_oldest_eligible") < 20


async def test_a_low_priority_that_starves(engine: Engine, meter: Meter, gauges: Gauges) -> None:
    await engine.create()
    await engine.advance(600_000)
    for _ in range(20):
        await engine.create(priority=9)
    await gauges.refresh()
    age = meter.value("ff_oldest_eligible_age_seconds", "default")
    assert age == pytest.approx(600, abs=30)


async def test_workers_by_namespace(engine: Engine, meter: Meter, gauges: Gauges) -> None:
    workers = engine.backend.workers
    for instance, namespace in (("w-1", "default"), ("w-2", "default"), ("w-3", "shop")):
        await workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["default"], namespace=namespace
        )
    await gauges.refresh()
    assert meter.numbers["ff_workers_alive"] == {("default",): 2, ("shop",): 1}
    await workers.mark_worker_dead("w-3", "shop")
    await gauges.refresh()
    assert meter.value("ff_workers_alive", "shop") == 0


async def test_suspensions_by_reason(engine: Engine, meter: Meter, gauges: Gauges) -> None:
    waits = await Waits.open(engine)
    parked = [await waits.park() for _ in range(2)]
    await gauges.refresh()
    (labels,) = meter.numbers["ff_suspensions_open"]
    assert labels[0] == "default"
    assert meter.value("ff_suspensions_open", *labels) == 2
    for one in parked:
        await waits.send(one)
    await gauges.refresh()
    assert meter.numbers["ff_suspensions_open"] == {}


async def test_suspensions_beyond_the_first_have_no_reason(
    engine: Engine, meter: Meter, gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.observability.gauges._MAX_SUSPENDED", 1)
    monkeypatch.setattr("flowfabric.observability.gauges._PAGE", 1)
    waits = await Waits.open(engine)
    for _ in range(3):
        await waits.park()
    await gauges.refresh()
    assert meter.value("ff_suspensions_open", "default", "other") == 2


async def test_signing_keys_and_tokens_of_older_ones(
    engine: Engine, meter: Meter, gauges: Gauges
) -> None:
    waits = await Waits.open(engine)
    parked = await waits.park()
    number = str(parked.handle.execution_id.partition)
    await gauges.refresh()
    assert meter.value("ff_waitpoint_kids", number) == 1
    assert meter.value("ff_waitpoint_tokens_old_kid_open") == 0
    await engine.backend.secrets.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32)
    again = Gauges(engine.backend, meter, max_age_s=0)
    await again.refresh()
    assert meter.value("ff_waitpoint_kids", number) == 2
    assert meter.value("ff_waitpoint_tokens_old_kid_open") == 1


async def test_backlogs_of_flows(engine: Engine, meter: Meter, gauges: Gauges) -> None:
    await gauges.refresh()
    assert meter.value("ff_cancel_backlog_depth") == 0
    await without_followups(engine)
    flow = await submitted(engine, "a b")
    await engine.backend.calls.fcall("ff_test_units", "{fp:0}", (1,), op="test")
    await engine.backend.flows.cancel_flow(flow.flow_id)
    await gauges.refresh()
    assert meter.value("ff_cancel_backlog_depth") == 1
    assert meter.value("ff_cascade_backlog_depth") == 0
    while (await engine.backend.flows.drain_flow_cancel(flow.flow_id))[2]:
        pass


@pytest.mark.corrupts
async def test_what_cannot_be_read_keeps_its_last_value(
    engine: Engine, meter: Meter, gauges: Gauges
) -> None:
    execution_id = await engine.create()
    meter.set("ff_cancel_backlog_depth", 7)
    key = keys.index(execution_id.tag, "cancel_backlog")
    await engine.backend.transport.call("SET", key, "damaged")
    await gauges.refresh()
    assert meter.value("ff_cancel_backlog_depth") == 7
    assert meter.value("ff_eligible_depth", "default") == 1


async def test_a_refresh_within_the_cache_time_reads_nothing(engine: Engine, meter: Meter) -> None:
    cached = Gauges(engine.backend, meter, max_age_s=60)
    await cached.refresh()
    before = await commands(engine.backend)
    await cached.refresh()
    # The command that asks is one itself.
    assert await commands(engine.backend) - before <= 1
