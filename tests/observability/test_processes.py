"""What workers, servers, scanners and subscribers count besides their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric.core.errors import WorkerAtCapacity
from flowfabric.engine.metrics import Meter
from flowfabric.scanners.base import Cycle
from flowfabric.scanners.settings import ScannerSettings
from flowfabric.scanners.supervisor import ScannerSupervisor
from flowfabric.scheduler.grants import NoWork, WorkerGrants
from flowfabric.sdk.worker import Worker
from flowfabric.server.dispatcher import EventDispatcher
from tests.support.engine import Engine, refused
from tests.support.scanning import QUICK, idle
from tests.support.sdk import claims_of, config, opener, serving, submit, until
from tests.support.server import TestServer

CYCLES = "ff_claim_outcome_total"


@pytest.fixture
async def worker(engine: Engine, valkey: TestServer) -> AsyncIterator[Worker]:
    """A worker with one permit."""
    async with await Worker.connect(config(), opener(valkey.url)) as connected:
        yield connected


async def test_claim_cycles_by_what_they_found(
    engine: Engine, worker: Worker, meter: Meter
) -> None:
    await engine.create()
    tasks, _ = await claims_of(worker).claim_from("default", engine.new_id().tag, 1)
    assert len(tasks) == 1
    assert meter.numbers[CYCLES] == {("default", "granted"): 1}
    assert meter.value("ff_claim_from_grant_duration_seconds", "default") == 1


async def test_a_cycle_without_work(engine: Engine, worker: Worker, meter: Meter) -> None:
    await claims_of(worker).claim_from("default", engine.new_id().tag, 1)
    assert meter.numbers[CYCLES] == {("default", "no_work"): 1}


async def test_a_cycle_that_failed(engine: Engine, worker: Worker, meter: Meter) -> None:
    await refused(claims_of(worker).claim_from("default", "{fp:9999}", 1), "invalid_input")
    assert meter.numbers[CYCLES] == {("default", "error"): 1}


async def test_a_worker_without_permits(engine: Engine, worker: Worker, meter: Meter) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def hold(_: object) -> None:
        started.set()
        await release.wait()

    await submit(engine.backend, 2)
    async with serving(worker, {"job": hold}):
        await started.wait()
        await until(lambda: meter.value("ff_worker_at_capacity_total") > 0)
        before = meter.value("ff_worker_at_capacity_total")
        with pytest.raises(WorkerAtCapacity):
            await worker.claims.claim_with(lambda: asyncio.sleep(0, None))
        assert meter.value("ff_worker_at_capacity_total") == before + 1
        release.set()
        await until(lambda: meter.value("ff_attempt_outcome_total", "default", "ok") == 2)
    # The second execution was claimed by a cycle of its own or by the call that completed.
    assert meter.value(CYCLES, "default", "granted") == 2


async def test_grants_of_a_server(engine: Engine, meter: Meter) -> None:
    grants = WorkerGrants(engine.backend)
    await engine.create(lane="mails")
    assert not isinstance(await grants.claim_for_worker("mails", "w", "w-1"), NoWork)
    # A client may ask for any name, so only a registered lane is named.
    await grants.claim_for_worker("mails", "w", "w-1")
    await grants.claim_for_worker("nowhere", "w", "w-1")
    counts = meter.numbers[CYCLES]
    assert counts == {
        ("mails", "granted"): 1,
        ("mails", "no_work"): 1,
        ("unknown", "no_work"): 1,
    }


async def test_a_cycle_of_a_scanner(engine: Engine, meter: Meter) -> None:
    scanners = idle(engine)
    await engine.running()
    await engine.advance(60_000)
    await scanners.scan_once("lease_expiry")
    await scanners.scan_once("lease_expiry")
    assert meter.value("ff_scanner_cycle_total", "lease_expiry") == 2
    assert meter.value("ff_scanner_cycle_duration_seconds", "lease_expiry") == 2
    assert meter.numbers["ff_scanner_items_total"] == {("lease_expiry", "processed"): 1}


async def test_a_scanner_that_is_late(engine: Engine, meter: Meter) -> None:
    runner = idle(engine)._runners["lease_expiry"]
    await engine.running()
    await runner.cycle()
    await runner.cycle()
    assert meter.value("ff_scanner_lag_seconds", "lease_expiry") == 0
    # The lease is due in 30 s; the next cycle comes 10 s after that.
    runner._shared.watch.clock._offset_ms += 40_000
    await runner.cycle()
    assert meter.value("ff_scanner_lag_seconds", "lease_expiry") == pytest.approx(10, abs=5)


async def test_a_process_that_no_longer_scans_is_not_late(engine: Engine, meter: Meter) -> None:
    """Otherwise an alert on the lag would fire until the process restarts."""
    scanners = idle(engine)
    runner = scanners._runners["lease_expiry"]
    await engine.running()
    await runner.cycle()
    runner._shared.watch.clock._offset_ms += 40_000
    await runner.cycle()
    assert meter.value("ff_scanner_lag_seconds", "lease_expiry") > 0
    assert not scanners.leadership.scanning.is_set()
    following = asyncio.create_task(runner.run())
    await until(lambda: meter.value("ff_scanner_lag_seconds", "lease_expiry") == 0, "no lag")
    await scanners.stop()
    await following


class _Crashing:
    name = "index_reconciler"

    async def scan(self, cycle: Cycle) -> None:
        raise RuntimeError("broken")


async def test_a_scanner_that_crashes(engine: Engine, meter: Meter) -> None:
    scanners = ScannerSupervisor(engine.backend, QUICK)
    scanners._runners["index_reconciler"].scanner = _Crashing()
    scanners.start()
    await until(lambda: meter.value("ff_scanner_restarts_total", "index_reconciler") > 0)
    await scanners.stop()


async def test_the_dispatcher_counts_what_it_read_itself(engine: Engine, meter: Meter) -> None:
    events = engine.backend.events
    execution_id = await engine.create()
    await engine.backend.executions.cancel_execution(execution_id)
    await engine.advance(90_000)
    async with await events.subscribe_completion("start") as feed:
        await anext(feed)
    assert not meter.numbers["ff_event_dispatch_total"]
    dispatcher = EventDispatcher(engine.backend, ScannerSettings())
    dispatcher._cursor = "start"
    dispatcher.start()
    await until(lambda: bool(meter.numbers["ff_event_dispatch_lag_seconds"]))
    await dispatcher.stop()
    assert meter.numbers["ff_event_dispatch_total"] == {("ok",): 1}
    # By the engine's clock, which is ahead of this host's.
    assert meter.value("ff_event_dispatch_lag_seconds") == pytest.approx(90, abs=20)
