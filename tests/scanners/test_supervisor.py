from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from flowfabric.core.errors import NotFoundError, TransportError, ValidationError
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners import ScannerSettings, ScannerSupervisor
from flowfabric.scanners.base import Cycle, ScanResult
from flowfabric.scanners.settings import INTERVALS_S
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.scanning import QUICK, break_record, create_delayed, idle, running
from tests.support.sdk import until
from tests.support.server import TestServer

HOURLY = ScannerSettings(intervals_s=dict.fromkeys(INTERVALS_S, 3600.0), leader_ttl_s=3600)
GATED = msgspec.structs.replace(QUICK, intervals_s={**QUICK.intervals_s, "index_reconciler": 0.1})


class _Gate:
    """A scanner that works until it is let go, and notes whether two cycles ever met."""

    name = "index_reconciler"

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.inside = self.most = 0

    async def scan(self, cycle: Cycle) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        try:
            await self.release.wait()
        finally:
            self.inside -= 1


class _Faulty:
    """A scanner with a fault of its own, which ends after a while."""

    name = "index_reconciler"

    def __init__(self) -> None:
        self.faults = 3

    async def scan(self, cycle: Cycle) -> None:
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault of the scanner itself")


async def test_a_crashed_scanner_is_started_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = ScannerSupervisor(engine.backend, GATED)
    supervisor._runners["index_reconciler"].scanner = _Faulty()
    with caplog.at_level(logging.ERROR):
        supervisor.start()
        await until(lambda: supervisor.status()["index_reconciler"].cycles > 0)
        await supervisor.stop()
    fields = [record.__dict__ for record in caplog.records]
    assert [f["restart_count"] for f in fields] == [1, 2, 3]
    assert {(f["action"], f["scanner"]) for f in fields} == {
        ("scanner_crashed", "index_reconciler")
    }
    assert all(f["exc_info"] for f in fields)


async def test_a_cancelled_scanner_is_started_again(engine: Engine) -> None:
    async with running(engine.backend) as supervisor:
        await until(lambda: supervisor.status()["lease_expiry"].cycles > 0)
        (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "ff-scanner-lease_expiry"]
        task.cancel()
        await asyncio.wait([task])
        seen = supervisor.status()["lease_expiry"].cycles
        await until(lambda: supervisor.status()["lease_expiry"].cycles > seen + 1)


async def test_cycles_of_one_scanner_never_overlap(engine: Engine) -> None:
    gate = _Gate()
    async with running(engine.backend, GATED) as supervisor:
        supervisor._runners["index_reconciler"].scanner = gate
        await gate.entered.wait()
        extra = asyncio.create_task(supervisor.scan_once("index_reconciler"))
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 3)
        assert gate.most == 1
        gate.release.set()
        await extra
    assert gate.most == 1


async def test_stop_ends_sleeps_at_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Everybody sleeps for an hour: a stop that waits for one of them never comes to its end."""
    supervisor = ScannerSupervisor(engine.backend, HOURLY)
    supervisor.start()
    await until(lambda: all(s.cycles for s in supervisor.status().values()))
    with caplog.at_level(logging.WARNING):
        await supervisor.stop(timeout=3600)
    assert caplog.records == []
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("ff-")] == []


async def test_stop_while_another_process_leads(engine: Engine, valkey: TestServer) -> None:
    """Who does not lead sleeps as long as the leader's lease lasts."""
    other = await ValkeyBackend.connect(parse_url(valkey.url))
    async with other, running(engine.backend, HOURLY) as leader:
        await leader.leadership.scanning.wait()
        follower = ScannerSupervisor(other, HOURLY)
        asked = await _looks_at_the_lease(other)
        follower.start()

        async def asks() -> bool:
            return await _looks_at_the_lease(other) > asked

        await until(asks)
        await follower.stop(timeout=3600)
        assert not follower.leadership.scanning.is_set()
        assert leader.leadership.is_leader


async def _looks_at_the_lease(backend: ValkeyBackend) -> int:
    info: Any = await backend.transport.call("INFO", "commandstats")
    text = info.decode() if isinstance(info, bytes) else str(info)
    return int(text.partition("cmdstat_pttl:calls=")[2].partition(",")[0] or 0)


async def test_stop_abandons_what_does_not_end(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = _Gate()
    supervisor = ScannerSupervisor(engine.backend, GATED)
    supervisor._runners["index_reconciler"].scanner = gate
    supervisor.start()
    await gate.entered.wait()
    with caplog.at_level(logging.WARNING):
        await supervisor.stop(timeout=0.05)
    assert gate.inside == 0
    assert [record.__dict__["action"] for record in caplog.records] == ["scanners_abandoned"]


async def test_stop_keeps_to_its_bound_while_the_server_is_away(
    engine: Engine, valkey: TestServer
) -> None:
    """A call has ten seconds of patience; giving up the lease may not take them."""
    with FaultProxy(valkey.socket_path) as proxy:
        async with await ValkeyBackend.connect(parse_url(proxy.url)) as backend:
            supervisor = ScannerSupervisor(backend, HOURLY)
            supervisor.start()
            await until(lambda: all(s.cycles for s in supervisor.status().values()))
            assert supervisor.leadership.is_leader
            proxy.down()
            async with asyncio.timeout(5):
                await supervisor.stop(timeout=0.1)


async def test_stop_twice_and_without_start(engine: Engine) -> None:
    supervisor = ScannerSupervisor(engine.backend, QUICK)
    await supervisor.stop()
    await supervisor.stop()


async def test_a_long_cycle_stops_between_pages(engine: Engine) -> None:
    await create_delayed(engine, 120)
    await engine.advance(1001)
    supervisor = idle(engine)
    supervisor._stop.set()
    found = await supervisor.scan_once("delayed_promoter")
    assert found == ScanResult(more=True)


async def test_status_counts(engine: Engine) -> None:
    async with running(engine.backend) as supervisor:
        await create_delayed(engine, 7, in_ms=300)
        await until(lambda: supervisor.status()["delayed_promoter"].processed == 7)
        status = supervisor.status()
        assert status.keys() == INTERVALS_S.keys()
        promoter = status["delayed_promoter"]
        assert promoter.cycles > 0
        assert promoter.last_duration_s > 0
        assert promoter.last_progress_at is not None
        assert 0 <= asyncio.get_running_loop().time() - promoter.last_progress_at < 5
        assert (promoter.errors, promoter.restarts, promoter.stuck) == (0, 0, False)


async def test_no_progress_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.scanners.supervisor._STUCK_AT_LEAST_S", 0.0)
    gate = _Gate()
    async with running(engine.backend, GATED) as supervisor:
        supervisor._runners["index_reconciler"].scanner = gate
        await until(lambda: _stuck(supervisor) == {"index_reconciler"})
        gate.release.set()


def _stuck(supervisor: ScannerSupervisor) -> set[str]:
    return {name for name, status in supervisor.status().items() if status.stuck}


async def test_an_outage_is_said_once_and_survived(
    engine: Engine, valkey: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    (delayed,) = await create_delayed(engine, 1, in_ms=3_600_000)
    with FaultProxy(valkey.socket_path) as proxy:
        backend = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=0.05)
        async with backend, running(backend) as supervisor:
            await until(lambda: supervisor.status()["lease_expiry"].cycles > 0)
            caplog.set_level(logging.INFO)
            caplog.clear()
            proxy.down()
            await until(lambda: supervisor.status()["lease_expiry"].errors >= 3)
            await until(lambda: all(s.errors for s in supervisor.status().values() if _often(s)))
            assert [r.levelname for r in _said(caplog)] == ["WARNING"]
            assert "cannot reach Valkey, trying again: " in _said(caplog)[0].message
            await engine.advance(3_600_001)
            proxy.up()
            await until(lambda: supervisor.status()["delayed_promoter"].processed == 1)
            assert supervisor.status()["lease_expiry"].restarts == 0
            (healed,) = _said(caplog)[1:]
            assert healed.__dict__["action"] == "outage_ended"
            assert "Valkey answers again after " in healed.message
    (claim,) = await engine.claim_all()
    assert claim.handle.execution_id == delayed


class _CutOff:
    """A scanner that an outage catches in the middle of a cycle, in every partition."""

    name = "index_reconciler"
    lost = True

    async def scan(self, cycle: Cycle) -> None:
        for number in range(3 * self.lost):
            error = TransportError("transport", "the connection was lost", ambiguous=True)
            cycle.failed("partition not readable", error, partition=f"{{fp:{number}}}")


async def test_an_outage_within_a_cycle_is_an_outage_too(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    supervisor = idle(engine)
    scanner = supervisor._runners["index_reconciler"].scanner = _CutOff()
    for _ in range(2):
        await supervisor.scan_once("index_reconciler")
    assert [r.__dict__["action"] for r in _said(caplog)] == ["outage_began"]
    scanner.lost = False
    await supervisor.scan_once("index_reconciler")
    assert [r.__dict__["action"] for r in _said(caplog)] == ["outage_began", "outage_ended"]


async def test_a_cycle_that_reads_nothing_does_not_end_an_outage(
    valkey: TestServer, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with FaultProxy(valkey.socket_path) as proxy:
        backend = await ValkeyBackend.connect(parse_url(proxy.url), request_timeout=0.05)
        async with backend:
            runner = ScannerSupervisor(backend, GATED)._runners["index_reconciler"]
            scanner = runner.scanner = _CutOff()
            await runner.cycle()
            proxy.down()
            scanner.lost = False
            await runner.cycle()
            assert [r.__dict__["action"] for r in _said(caplog)] == ["outage_began"]
            proxy.up()
            await until(lambda: _cycled_well(runner))
            assert [r.__dict__["action"] for r in _said(caplog)] == ["outage_began", "outage_ended"]


async def _cycled_well(runner: Any) -> bool:
    return not (await runner.cycle()).errors


def _said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What scanners said of their trouble; the counts of their cycles are not in it."""
    actions = {"scanner_failure", "outage_began", "scanner_recovered", "outage_ended"}
    return [
        r
        for r in caplog.records
        if r.levelno >= logging.INFO and r.__dict__.get("action") in actions
    ]


def _often(status: Any) -> bool:
    return status.interval_s < 5


async def test_trouble_of_one_scanner_is_said_once_and_when_it_ends(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """An index of the wrong type cannot be read, whatever the connection is like."""
    caplog.set_level(logging.INFO)
    await engine.create(delay_ms=60_000)
    supervisor = idle(engine)
    await supervisor.scan_once("lease_expiry")
    caplog.clear()
    key = keys.index(engine.new_id().tag, "lease_expiry")
    await engine.backend.transport.call("SET", key, "garbage")
    for _ in range(3):
        assert (await supervisor.scan_once("lease_expiry")).errors == 1
    assert [r.levelname for r in _said(caplog)] == ["WARNING"]
    await engine.backend.transport.call("DEL", key)
    for _ in range(2):
        assert (await supervisor.scan_once("lease_expiry")).errors == 0
    first, healed = _said(caplog)
    assert (first.__dict__["scanner"], healed.__dict__["scanner"]) == ("lease_expiry",) * 2
    assert (healed.levelname, healed.__dict__["failed_cycles"]) == ("INFO", 3)


@pytest.mark.corrupts
async def test_only_errors_are_logged_at_info(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    (poison,) = await create_delayed(engine, 1)
    supervisor = idle(engine)
    caplog.set_level(logging.DEBUG, "flowfabric.scanners")
    await supervisor.scan_once("delayed_promoter")
    await break_record(engine, poison)
    await engine.advance(1001)
    await supervisor.scan_once("delayed_promoter")
    told = [r for r in caplog.records if r.__dict__.get("action") == "scanner_cycle"]
    assert [(r.levelname, r.__dict__["errors"]) for r in told] == [("DEBUG", 0), ("INFO", 1)]


async def test_disabled_scanners_do_not_exist(engine: Engine) -> None:
    settings = ScannerSettings(disabled=frozenset({"lease_expiry", "index_reconciler"}))
    supervisor = ScannerSupervisor(engine.backend, settings)
    assert supervisor.status().keys() == INTERVALS_S.keys() - settings.disabled
    with pytest.raises(NotFoundError, match=r"scanner_not_found: \w+; enabled are \w+, "):
        await supervisor.scan_once("lease_expiry")


async def test_scan_once_refuses_a_partition_out_of_range(engine: Engine) -> None:
    with pytest.raises(ValidationError, match="partition: must be below 256"):
        await idle(engine).scan_once("lease_expiry", 256)


async def test_lanes_of_this_process_are_walked_at_once(engine: Engine) -> None:
    async with running(engine.backend) as supervisor:
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 0)
        await engine.create(lane="brand new", delay_until=await engine.now() + 50)
        await until(lambda: supervisor.status()["delayed_promoter"].processed == 1, timeout=2)


async def test_lanes_of_other_processes_are_found(engine: Engine, valkey: TestServer) -> None:
    settings = ScannerSettings(intervals_s=QUICK.intervals_s, territory_refresh_s=0.1)
    other = await ValkeyBackend.connect(parse_url(valkey.url))
    async with other, running(other, settings) as supervisor:
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 0)
        await engine.create(lane="brand new", delay_until=await engine.now() + 50)
        await until(lambda: supervisor.status()["delayed_promoter"].processed == 1)
