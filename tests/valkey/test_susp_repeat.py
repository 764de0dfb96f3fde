"""The idempotency key of suspend; strange names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.engine import Engine, refused
from tests.support.lua_keys import suspend_dedup
from tests.support.suspension import GO, Waits


async def test_no_key_is_no_dedup(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await waits.park(handle=handle, idempotency_key="")
    await refused(
        waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key=""),
        "execution_not_active",
    )
    names: Any = await engine.backend.transport.call("KEYS", "ff:dedup:suspend:*")
    assert names == []


@pytest.mark.parametrize(
    ("timeout_in", "ttl"),
    [
        (None, 604_800_000),
        (5_000, 65_000),
        (-5_000, 60_000),
        (10**9, 604_800_000),
        (604_740_000, 604_800_000),
    ],
)
async def test_how_long_a_key_lives(engine: Engine, timeout_in: int | None, ttl: int) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    await engine.freeze(await engine.now())
    timeout = None if timeout_in is None else await engine.now() + timeout_in
    await waits.park(handle=handle, idempotency_key="x", timeout_at=timeout)
    left: Any = await engine.backend.transport.call(
        "PTTL", suspend_dedup(handle.execution_id.tag, handle.execution_id)
    )
    assert ttl - 5_000 < left <= ttl


@pytest.mark.corrupts
@pytest.mark.parametrize("damage", ["string", "garbage", "number"])
async def test_an_unreadable_entry_is_a_miss(engine: Engine, damage: str) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    key = suspend_dedup(handle.execution_id.tag, handle.execution_id)
    if damage == "string":
        await engine.backend.transport.call("SET", key, "x")
    elif damage == "garbage":
        await waits.write(key, x=b"\xc1")
    else:
        stored: dict[str, object] = {"reply": 7, "lease": handle.lease, "expires_at": 2**45}
        await waits.write(key, x=msgspec.msgpack.encode(stored))
    first = await waits.park(handle=handle, idempotency_key="x")
    assert (
        await waits.backend.suspensions.suspend(handle, condition=GO, idempotency_key="x") == first
    )


async def test_answers_go_with_the_execution(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running(policy={"stream_policy": {"retention_ttl_ms": 1}})
    await waits.park(handle=handle, idempotency_key="x")
    await engine.backend.executions.cancel_execution(handle.execution_id)
    await engine.advance(2)
    assert await waits.trim(handle.execution_id) == ["purged"]
    names: Any = await engine.backend.transport.call("KEYS", "ff:dedup:*")
    assert names == []


async def test_an_execution_keeps_so_many_answers(engine: Engine) -> None:
    waits = await Waits.open(engine)
    handle = await engine.running()
    for number in range(105):
        parked = await waits.park(handle=handle, idempotency_key=f"k-{number}")
        await waits.send(parked)
        handle = (await engine.claim()).handle
    name = suspend_dedup(handle.execution_id.tag, handle.execution_id)
    assert await engine.backend.transport.call("HLEN", name) == 5
