"""The look at the keyspace after every test: what it must find."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.ids import new_uuid
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.leaks import find_leaks
from tests.support.suspension import Waits

pytestmark = pytest.mark.corrupts


async def problem(engine: Engine) -> str:
    """The one thing that is wrong."""
    (found,) = await find_leaks(engine.backend)
    return found


async def suspended(engine: Engine) -> tuple[str, str]:
    """A suspension that was signalled twice with a key: its waitpoint and its signal key."""
    waits = await Waits.open(engine)
    parked = await waits.park(idempotency_key="once")
    await waits.send(parked, "other", idempotency_key="first", payload=b"1")
    assert await find_leaks(engine.backend) == []
    tag = parked.handle.execution_id.tag
    (signal,) = await _keys(engine, "ff:signal:*:payload")
    return f"ff:wp:{tag}:{parked.details.waitpoint_id}", signal.removesuffix(":payload")


async def _keys(engine: Engine, pattern: str) -> list[str]:
    found: Any = await engine.backend.transport.call("KEYS", pattern)
    return [name.decode() for name in found]


async def test_waitpoints_have_an_execution(engine: Engine) -> None:
    waitpoint, _ = await suspended(engine)
    call = engine.backend.transport.call
    await call("HSET", waitpoint, "execution_id", engine.new_id())
    assert {p.partition(": ")[0] for p in await find_leaks(engine.backend)} == {
        "waitpoint key without an owner"
    }
    await call("HDEL", waitpoint, "execution_id")
    assert "waitpoint key without an owner" in (await find_leaks(engine.backend))[0]
    await call("DEL", waitpoint)
    assert await problem(engine) == f"waitpoint key without its waitpoint: {waitpoint}:signals"


async def test_signals_have_an_execution(engine: Engine) -> None:
    _, signal = await suspended(engine)
    call = engine.backend.transport.call
    await call("DEL", signal)
    assert await problem(engine) == f"signal key without an owner: {signal}:payload"
    await call("DEL", f"{signal}:payload")
    assert await find_leaks(engine.backend) == []
    stray = f"ff:signal:{engine.new_id()}:{new_uuid()}"
    await call("HSET", stray, "signal_name", "go")
    assert await problem(engine) == f"signal key without an owner: {stray}"


@pytest.mark.parametrize("pattern", ["ff:sigdedup:*", "ff:dedup:suspend:*"])
async def test_what_recognises_repeats_ends_by_itself(engine: Engine, pattern: str) -> None:
    await suspended(engine)
    (name,) = await _keys(engine, pattern)
    await engine.backend.transport.call("PERSIST", name)
    assert await problem(engine) == f"temporary key without a time to live: {name}"


@pytest.mark.parametrize("index", ["lease_expiry", "lane:default:delayed", "worker:w-1:leases"])
async def test_what_only_an_index_knows(engine: Engine, index: str) -> None:
    await engine.running()
    ghost, name = engine.new_id(), keys.index(engine.new_id().tag, index)
    if index.startswith("worker:"):
        await engine.backend.transport.call("SADD", name, ghost)
    else:
        await engine.backend.transport.call("ZADD", name, 1, ghost)
    assert await problem(engine) == f"{ghost}: orphan"
