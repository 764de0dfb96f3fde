"""Drains that last: marks are renewed, leases are revoked in the end (04 §9)."""

from __future__ import annotations

from typing import Any

from flowfabric.engine.valkey import keys
from flowfabric.scanners.base import ScanResult
from tests.conformance.test_worker_drain import W1
from tests.support.engine import LANE, Engine
from tests.support.scanning import idle


async def test_leases_are_revoked_after_the_timeout(engine: Engine) -> None:
    backend = engine.backend
    await engine.freeze(await engine.now())
    await backend.workers.register_worker(**W1)
    handle = await engine.running()
    await backend.workers.drain_worker("w-1", timeout_ms=5000)
    scanner = idle(engine)
    await engine.advance(4000)
    assert await scanner.scan_once("worker_drain") == ScanResult()
    await backend.leases.renew(handle)
    await engine.advance(1001)
    assert await scanner.scan_once("worker_drain") == ScanResult(processed=1)
    info = await backend.reads.read_execution_info(handle.execution_id)
    assert info.state_vector.ownership_state.value == "lease_revoked"
    assert info.blocking_detail == "lease revoked: drained"
    assert (await engine.claim(instance="w-2")).handle.execution_id == handle.execution_id
    assert await scanner.scan_once("worker_drain") == ScanResult()


async def test_an_interrupted_drain_continues(engine: Engine) -> None:
    """The process of the operator died before it reached the partitions."""
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    await backend.workers.drain_worker("w-1")
    tag = (await engine.create()).tag
    await backend.transport.call("DEL", keys.index(tag, "draining"))
    await idle(engine).scan_once("worker_drain")
    assert await engine.claim_all() == []
    left: Any = await backend.transport.call("PTTL", keys.index(tag, "draining"))
    assert 0 < left <= 60_000


async def test_marks_expire_after_the_worker_has_left(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    waiting = await engine.create()
    await backend.workers.drain_worker("w-1")
    await backend.transport.call("DEL", keys.drains("{default}"))
    await idle(engine).scan_once("worker_drain")
    assert await backend.upkeep.list_drains() == []
    assert await backend.transport.call("EXISTS", keys.DRAINS) == 0
    assert await engine.claim_all() == []
    await engine.advance(60_001)
    assert [claim.execution_id for claim in await engine.claim_all()] == [waiting]


async def test_a_swept_worker_is_no_longer_drained(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    waiting = await engine.create()
    await backend.workers.drain_worker("w-1")
    assert await engine.claim_all() == []
    for part in ("alive", "caps"):
        await backend.transport.call("DEL", f"ff:worker:{{default}}:w-1:{part}")
    await idle(engine).scan_once("worker_sweeper")
    assert await backend.upkeep.list_drains() == []
    # Another process may start with the same id.
    assert [claim.execution_id for claim in await engine.claim_all()] == [waiting]


async def test_another_worker_pays_nothing_but_a_look(engine: Engine) -> None:
    """With a drain in the partition, claims of others still find plain, routed and lost work."""
    backend = engine.backend
    await backend.workers.register_worker(**W1)
    plain = await engine.create()
    gpu = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    routed = await engine.create(policy=gpu)
    await backend.workers.drain_worker("w-1")
    claims = await engine.claim_all(instance="w-2", capabilities=["gpu"])
    assert {claim.execution_id for claim in claims} == {plain, routed}
    assert claims[0].handle.lane_id == LANE
