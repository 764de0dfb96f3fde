"""The scanners on a cluster, where every partition has its own slot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.scanners.settings import INTERVALS_S
from flowfabric.valkey.address import parse_url
from flowfabric.valkey.transport import Transport
from tests.support.engine import TTL, Engine
from tests.support.scanning import QUICK, idle, running
from tests.support.sdk import until
from tests.support.server import TestServer, free_port


@pytest.fixture
async def clustered() -> AsyncIterator[Engine]:
    # By default the bus port is 10,000 above, which a high free port has no room for.
    bus = str(free_port())
    server = TestServer("--cluster-enabled", "yes", "--cluster-port", bus, port=free_port())
    try:
        client = Transport(parse_url(server.url))
        await client.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def serves() -> bool:
            info: Any = await client.call("CLUSTER", "INFO")
            return "cluster_state:ok" in (info.decode() if isinstance(info, bytes) else str(info))

        await until(serves)
        await client.aclose()
        backend = await ValkeyBackend.connect(
            parse_url(f"valkey+cluster://127.0.0.1:{server.port}"),
            prepare_with=PartitionCounts(),
        )
        async with backend:
            yield Engine(backend)
    finally:
        server.stop()


async def test_every_scanner_over_several_slots(clustered: Engine) -> None:
    engine = clustered
    due = await engine.now() + 1000
    lanes = ("default", "second", "third")
    delayed = [await engine.create(lane=lane, delay_until=due) for lane in lanes]
    lost = [await engine.running(lane=lane) for lane in lanes]
    assert len({one.tag for one in delayed}) == 3
    await engine.advance(TTL)
    supervisor = idle(engine)
    assert (await supervisor.scan_once("delayed_promoter")).processed == 3
    assert (await supervisor.scan_once("lease_expiry")).processed == 3
    for name in INTERVALS_S:
        assert (await supervisor.scan_once(name)).errors == 0
    for lane, handle, promoted in zip(lanes, lost, delayed, strict=True):
        claims = await engine.claim_all(lane=lane, instance="w-2")
        kinds = {claim.handle.execution_id: claim.handle.kind for claim in claims}
        assert kinds == {handle.execution_id: "reclaimed", promoted: "fresh"}


async def test_a_running_supervisor_takes_the_cheap_look(clustered: Engine) -> None:
    engine = clustered
    for lane in ("default", "second"):
        await engine.create(lane=lane)
    async with running(engine.backend, QUICK) as supervisor:
        await until(lambda: supervisor.status()["delayed_promoter"].cycles > 2)
        one = await engine.create(lane="second", delay_until=await engine.now() + 100)

        async def promoted() -> bool:
            return await engine.backend.reads.read_execution_state(one) is PublicState.WAITING

        await until(promoted)
        assert sum(status.errors for status in supervisor.status().values()) == 0
