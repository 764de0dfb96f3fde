"""The worker registry: registration, heartbeats, death, listing (04 §9, S7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.api.events import Event
from flowfabric.engine.api.workers import Heartbeat
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import decode_entry
from flowfabric.valkey.address import parse_url
from tests.conformance.test_registry import ELSE, W1
from tests.support.engine import Engine, refused, untouched
from tests.support.server import TestServer


async def another_process(valkey: TestServer) -> ValkeyBackend:
    return await ValkeyBackend.connect(parse_url(valkey.url), prepare_with=PartitionCounts())


async def worker_events(engine: Engine) -> list[Event]:
    entries: Any = await engine.backend.transport.call(
        "XRANGE", "ff:worker:{default}:events", "-", "+"
    )
    return [decode_entry("worker:default", *entry) for entry in entries]


async def gone(engine: Engine, key: str) -> None:
    """Wait until the server itself has dropped a key."""
    while await engine.backend.transport.call("EXISTS", key):  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def test_register_refresh_and_list(engine: Engine) -> None:
    backend = engine.backend
    await engine.freeze(await engine.now())
    now = await engine.now()
    first = await backend.workers.register_worker(
        worker_id="w",
        worker_instance_id="w-1",
        lanes={"b", "a,c", "a"},
        capabilities={"gpu", "cuda"},
        liveness_ttl_ms=20_000,
    )
    assert first == "registered"
    (entry,) = await backend.workers.list_workers()
    assert (entry.worker_id, entry.worker_instance_id) == ("w", "w-1")
    assert (entry.lanes, entry.capabilities) == (("a", "a,c", "b"), ("cuda", "gpu"))
    assert (entry.registered_at_ms, entry.last_heartbeat_ms) == (now, now)
    assert (entry.liveness_ttl_ms, entry.namespace) == (20_000, "default")

    await engine.freeze(now + 50)
    second = await backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["z"], liveness_ttl_ms=30_000
    )
    assert second == "refreshed"
    (entry,) = await backend.workers.list_workers()
    assert (entry.lanes, entry.capabilities) == (("z",), ())
    assert (entry.registered_at_ms, entry.liveness_ttl_ms) == (now + 50, 30_000)
    for part in ("alive", "caps"):
        ttl = await backend.transport.call("PTTL", f"ff:worker:{{default}}:w-1:{part}")
        assert isinstance(ttl, int)
        assert 20_000 < ttl <= 30_000
    (event,) = await worker_events(engine)
    assert (event.type, event.at) == ("worker_registered", now)
    assert event.fields == {"worker_id": "w", "worker_instance_id": "w-1"}


async def test_only_if_absent_refuses_a_second_process(engine: Engine, valkey: TestServer) -> None:
    assert await engine.backend.workers.register_worker(**W1, only_if_absent=True) == "registered"
    # A repeat by the same process is its own.
    assert await engine.backend.workers.register_worker(**W1, only_if_absent=True) == "refreshed"
    second = await another_process(valkey)
    try:
        async with untouched(engine):
            error = await refused(
                second.workers.register_worker(**W1, only_if_absent=True), "invalid_input"
            )
        assert "instance_id in use" in error.detail
        assert await second.workers.register_worker(**W1) == "refreshed"
        await second.workers.mark_worker_dead("w-1")
        assert (
            await engine.backend.workers.register_worker(**W1, only_if_absent=True) == "registered"
        )
    finally:
        await second.aclose()


async def test_a_heartbeat_uses_the_registered_ttl(engine: Engine) -> None:
    backend = engine.backend
    assert await backend.workers.heartbeat_worker("w-1") is None
    await engine.freeze(await engine.now())
    now = await engine.now()
    await backend.workers.register_worker(**W1, liveness_ttl_ms=20_000)
    for part in ("alive", "caps"):
        await backend.transport.call("PEXPIRE", f"ff:worker:{{default}}:w-1:{part}", 9000)
    await engine.freeze(now + 100)
    assert await backend.workers.heartbeat_worker("w-1") == Heartbeat(now + 100 + 20_000)
    for part in ("alive", "caps"):
        ttl = await backend.transport.call("PTTL", f"ff:worker:{{default}}:w-1:{part}")
        assert isinstance(ttl, int)
        assert 15_000 < ttl <= 20_000
    (entry,) = await backend.workers.list_workers()
    assert (entry.last_heartbeat_ms, entry.registered_at_ms) == (now + 100, now)
    assert await backend.workers.heartbeat_worker("w-1", "elsewhere") is None


@pytest.mark.parametrize("part", ["alive", "caps"])
async def test_a_heartbeat_without_a_key_registers_nothing(engine: Engine, part: str) -> None:
    await engine.backend.workers.register_worker(**W1)
    await engine.backend.transport.call("DEL", f"ff:worker:{{default}}:w-1:{part}")
    async with untouched(engine):
        assert await engine.backend.workers.heartbeat_worker("w-1") is None
    assert await engine.backend.workers.register_worker(**W1) in {"registered", "refreshed"}
    assert await engine.backend.workers.heartbeat_worker("w-1") is not None


async def test_a_registration_expires_by_itself(engine: Engine) -> None:
    backend = engine.backend
    await backend.workers.register_worker(**W1, liveness_ttl_ms=20)
    await gone(engine, "ff:worker:{default}:w-1:alive")
    await gone(engine, "ff:worker:{default}:w-1:caps")
    assert await backend.workers.list_workers() == []
    assert await backend.workers.heartbeat_worker("w-1") is None
    # Free for anybody.
    outcome = await backend.workers.register_worker(**ELSE, only_if_absent=True)
    assert outcome == "registered"


async def test_death_removes_the_worker_and_leaves_its_leases(engine: Engine) -> None:
    backend = engine.backend
    handle = await engine.running()
    await backend.workers.register_worker(**W1)
    assert await backend.workers.mark_worker_dead("w-1", reason="deploy") == "marked"
    assert await backend.workers.list_workers() == []
    assert await backend.workers.mark_worker_dead("w-1") == "not_registered"
    assert await backend.workers.heartbeat_worker("w-1") is None
    await backend.leases.renew(handle)
    dead = (await worker_events(engine))[-1]
    assert (dead.type, dead.get("worker_id"), dead.get("reason")) == ("worker_dead", "w", "deploy")
    assert len(await worker_events(engine)) == 2
    assert await backend.workers.register_worker(**W1) == "registered"


async def test_listing_is_sorted_and_paged(engine: Engine) -> None:
    backend = engine.backend
    for number in (3, 1, 5, 2, 4):
        instance = f"w-{number}"
        await backend.workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["l"]
        )
    await backend.workers.register_worker(
        worker_id="x", worker_instance_id="w-0", lanes=[], namespace="n"
    )
    # Two whose records are gone stand at the head of the index.
    for number in (1, 2):
        for part in ("alive", "caps"):
            await backend.transport.call("DEL", f"ff:worker:{{default}}:w-{number}:{part}")

    async def page(after: str, limit: int) -> list[str]:
        found = await backend.workers.list_workers(after=after, limit=limit)
        return [entry.worker_instance_id for entry in found]

    assert await page("", 1000) == ["w-3", "w-4", "w-5"]
    assert await page("", 2) == ["w-3", "w-4"]
    assert await page("w-4", 2) == ["w-5"]
    assert await page("w-5", 2) == []
    assert await page("", 0) == []
    assert await backend.workers.list_workers("nobody") == []
