from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.api.events import Event
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.feeds import decode_entry
from flowfabric.scanners.base import ScanResult
from tests.support import lua_keys
from tests.support.engine import Engine
from tests.support.scanning import idle

NAMESPACE = "{default}"


async def register(engine: Engine, *instances: str) -> None:
    for instance in instances:
        await engine.backend.workers.register_worker(
            worker_id="w", worker_instance_id=instance, lanes=["default"]
        )


async def expire(engine: Engine, *instances: str) -> None:
    """What the server does once the heartbeats stop."""
    for instance in instances:
        await engine.backend.transport.call(
            *("DEL", lua_keys.worker_alive(NAMESPACE, instance)),
            keys.worker_record(NAMESPACE, instance),
        )


async def indexed(engine: Engine) -> set[bytes]:
    found: Any = await engine.backend.transport.call("HKEYS", keys.workers(NAMESPACE))
    return set(found)


async def feed(engine: Engine) -> list[Event]:
    entries: Any = await engine.backend.transport.call(
        "XRANGE", keys.worker_events(NAMESPACE), "-", "+"
    )
    return [decode_entry("worker:default", *entry) for entry in entries]


async def test_expired_workers_leave_the_index(engine: Engine) -> None:
    await register(engine, "a", "b", "c")
    await expire(engine, "a", "c")
    assert await idle(engine).scan_once("worker_sweeper") == ScanResult(processed=2)
    assert await indexed(engine) == {b"b"}
    told = [e for e in await feed(engine) if e.type == "worker_expired"]
    assert {event.get("worker_instance_id") for event in told} == {"a", "c"}
    assert {event.get("worker_id") for event in told} == {"w"}
    assert await idle(engine).scan_once("worker_sweeper") == ScanResult()


async def test_a_worker_with_either_key_stays(engine: Engine) -> None:
    await register(engine, "a", "b")
    call = engine.backend.transport.call
    await call("DEL", lua_keys.worker_alive(NAMESPACE, "a"))
    await call("DEL", keys.worker_record(NAMESPACE, "b"))
    assert await idle(engine).scan_once("worker_sweeper") == ScanResult()
    assert await indexed(engine) == {b"a", b"b"}


async def test_very_many_are_swept_in_parts(engine: Engine) -> None:
    many = [f"w-{number}" for number in range(1000)]
    await engine.backend.transport.call(
        "HSET", keys.workers(NAMESPACE), *(part for each in many for part in (each, "w"))
    )
    await register(engine, "alive")
    assert await idle(engine).scan_once("worker_sweeper") == ScanResult(processed=1000)
    assert await indexed(engine) == {b"alive"}


@pytest.mark.corrupts
async def test_a_damaged_namespace_hides_no_other(engine: Engine) -> None:
    await register(engine, "a")
    await expire(engine, "a")
    call = engine.backend.transport.call
    await call("SADD", keys.NAMESPACES, "broken", b"\xff")
    await call("SET", keys.workers("{broken}"), "x")
    assert await idle(engine).scan_once("worker_sweeper") == ScanResult(processed=1, errors=1)
