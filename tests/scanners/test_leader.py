from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from flowfabric.engine.api.upkeep import Leader
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners import ScannerFilter, ScannerSettings, ScannerSupervisor
from flowfabric.scanners.leader import LeaderElection
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.scanning import DEFAULTS, QUICK, create_delayed, running
from tests.support.sdk import until
from tests.support.server import TestServer

REPOSITORY = Path(__file__).parents[2]
LEASE = keys.leader(keys.LEADERS_TAG, "")
DUTIES = keys.leaders(keys.LEADERS_TAG)


async def _owner(backend: ValkeyBackend) -> bytes | None:
    found: Any = await backend.transport.call("GET", LEASE)
    return found


async def test_takes_over_when_the_leaders_process_is_killed(
    engine: Engine, valkey: TestServer
) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.scanners.leader_child", valkey.url),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"leading\n"
        async with running(engine.backend, DEFAULTS) as supervisor:
            await until(lambda: _follows(engine.backend, supervisor))
            child.kill()
            await child.wait()
            killed_at = asyncio.get_running_loop().time()
            await asyncio.wait_for(supervisor.leadership.scanning.wait(), 10)
            assert asyncio.get_running_loop().time() - killed_at < 6
            assert await _owner(engine.backend) == supervisor.leadership.identity.encode()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def _follows(backend: ValkeyBackend, supervisor: ScannerSupervisor) -> bool:
    return await _owner(backend) is not None and not supervisor.leadership.scanning.is_set()


async def test_a_clean_stop_hands_over(engine: Engine) -> None:
    async with running(engine.backend) as first:
        await first.leadership.scanning.wait()
        assert await _owner(engine.backend) == first.leadership.identity.encode()
    assert await _owner(engine.backend) is None


async def test_a_stop_leaves_a_foreign_lease_alone(engine: Engine) -> None:
    async with running(engine.backend) as supervisor:
        await supervisor.leadership.scanning.wait()
        await engine.backend.transport.call("SET", LEASE, "another", "PX", 60_000)
    assert await _owner(engine.backend) == b"another"


async def test_steps_back_when_another_holds_the_lease(engine: Engine) -> None:
    settings = ScannerSettings(leader_ttl_s=0.2)
    async with running(engine.backend, settings) as supervisor:
        await supervisor.leadership.scanning.wait()
        await engine.backend.transport.call("SET", LEASE, "another", "PX", 60_000)
        await until(lambda: not supervisor.leadership.scanning.is_set())
        assert not supervisor.leadership.is_leader


async def test_a_process_without_progress_gives_up_the_lease_but_keeps_running(
    engine: Engine,
) -> None:
    well = True
    leadership = LeaderElection(engine.backend, ttl_s=0.2, healthy=lambda: well)
    stop = asyncio.Event()
    task = asyncio.create_task(leadership.run(stop))
    await leadership.scanning.wait()
    well = False

    async def free() -> bool:
        return await _owner(engine.backend) is None

    await until(free)
    assert leadership.scanning.is_set()
    await engine.backend.transport.call("SET", LEASE, "another", "PX", 500)
    await until(lambda: not leadership.scanning.is_set())
    well = True
    await until(lambda: leadership.is_leader)
    stop.set()
    await task


async def test_a_full_server_still_grants_the_lease(engine: Engine) -> None:
    """Only scanning frees memory again."""
    call = engine.backend.transport.call
    leadership = LeaderElection(engine.backend, ttl_s=0.2, healthy=lambda: True)
    stop = asyncio.Event()
    await call("CONFIG", "SET", "maxmemory", "1")
    try:
        task = asyncio.create_task(leadership.run(stop))
        await leadership.scanning.wait()
        assert leadership.is_leader
    finally:
        await call("CONFIG", "SET", "maxmemory", "0")
    stop.set()
    await task


async def test_two_at_once_have_one_effect(engine: Engine, valkey: TestServer) -> None:
    other = await ValkeyBackend.connect(parse_url(valkey.url))
    ids = await create_delayed(engine, 120, in_ms=100)
    apart = ScannerSettings(intervals_s=QUICK.intervals_s, disabled=frozenset({"doorbell"}))
    async with other, running(engine.backend) as one, running(other, apart) as two:
        await asyncio.gather(one.leadership.scanning.wait(), two.leadership.scanning.wait())
        assert one.leadership.duty != two.leadership.duty, "both scan"

        async def all_done() -> bool:
            done = [s.status()["delayed_promoter"].processed for s in (one, two)]
            return sum(done) >= 120

        await until(all_done)
        assert sum(s.status()["delayed_promoter"].errors for s in (one, two)) == 0
    claims = await engine.claim_all(200)
    assert sorted(claim.handle.execution_id for claim in claims) == ids


async def test_only_one_of_two_alike_scans(engine: Engine, valkey: TestServer) -> None:
    other = await ValkeyBackend.connect(parse_url(valkey.url))
    # Both live in this process: when it stalls, the lease must not go over.
    alike = ScannerSettings(intervals_s=QUICK.intervals_s, leader_ttl_s=60)
    async with other, running(engine.backend, alike) as one:
        await one.leadership.scanning.wait()
        async with running(other, alike) as two:
            await create_delayed(engine, 5, in_ms=500)
            await until(lambda: one.status()["delayed_promoter"].processed == 5)
            assert two.status()["delayed_promoter"].cycles == 0
            assert not two.status()["delayed_promoter"].stuck


@pytest.mark.parametrize(
    "settings",
    [
        ScannerSettings(disabled=frozenset({"doorbell"})),
        ScannerSettings(filter=ScannerFilter(namespace="acme")),
        ScannerSettings(filter=ScannerFilter(instance_tag=("a", "b"))),
    ],
)
async def test_processes_with_other_duties_have_another_leader(
    engine: Engine, settings: ScannerSettings
) -> None:
    assert ScannerSupervisor(engine.backend, settings).leadership.duty


def _process(supervisor: ScannerSupervisor) -> str:
    return supervisor.leadership.identity.rpartition(":")[0]


async def test_every_leader_is_found(engine: Engine, valkey: TestServer) -> None:
    assert await engine.backend.leadership.leaders() == []
    other = await ValkeyBackend.connect(parse_url(valkey.url))
    # So long a lease is not renewed meanwhile: it is listed when it is taken.
    apart = ScannerSettings(disabled=frozenset({"doorbell"}), leader_ttl_s=3600)

    async def found() -> bool:
        return len(await engine.backend.leadership.leaders()) == 2

    async with other, running(other, apart) as partial:
        await partial.leadership.scanning.wait()
        async with running(engine.backend) as whole:
            await until(found)
            assert await engine.backend.leadership.leaders() == [
                Leader(_process(whole), partial=False),
                Leader(_process(partial), partial=True),
            ]
    assert await engine.backend.leadership.leaders() == [], "the lease counts, not the list"
    names: Any = await engine.backend.transport.call("SMEMBERS", DUTIES)
    assert list(names) == [partial.leadership.duty.encode()]


async def test_a_lost_list_is_written_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.scanners.leader._ACQUIRE_AGAIN_S", 0.1)
    settings = ScannerSettings(disabled=frozenset({"doorbell"}), leader_ttl_s=3)

    async def found() -> bool:
        return len(await engine.backend.leadership.leaders()) == 1

    async with running(engine.backend, settings):
        await until(found)
        await engine.backend.transport.call("DEL", DUTIES)
        await until(found)


async def test_the_usual_lease_is_not_listed(engine: Engine) -> None:
    async with running(engine.backend) as supervisor:
        await supervisor.leadership.scanning.wait()
    assert await engine.backend.transport.call("EXISTS", DUTIES) == 0
