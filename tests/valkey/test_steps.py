"""Step records as they are stored: one key per execution, damage is named, calls stay short."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.steps import Recorded, StepPage
from flowfabric.core.errors import CorruptionError
from tests.support import lua_keys
from tests.support.engine import Engine, refused, untouched
from tests.support.server_time import assert_short

LARGEST = 262_144


def key_of(handle: Handle) -> str:
    return lua_keys.steps(handle.execution_id.tag, handle.execution_id)


async def record(engine: Engine, handle: Handle, key: str, **step: Any) -> Any:
    return await engine.backend.steps.record_step(handle.execution_id, handle, key, **step)


async def test_records_are_fields_of_one_key(engine: Engine) -> None:
    handle = await engine.running()
    before = set(await engine.dump())
    await record(engine, handle, "a", result=b"r")
    await record(engine, handle, "k:a", status="pending")
    stored = await engine.dump()
    assert set(stored) - before == {key_of(handle).encode()}
    assert set(stored[key_of(handle).encode()]) == {b"n", b"k:a", b"k:k:a", b"r:1", b"r:2"}


@pytest.mark.parametrize("keep_steps", [False, True])
async def test_a_replay_deletes_the_key(engine: Engine, *, keep_steps: bool) -> None:
    handle = await engine.running()
    await record(engine, handle, "a")
    await engine.backend.executions.complete(handle)
    await engine.backend.executions.replay_execution(handle.execution_id, keep_steps=keep_steps)
    assert (key_of(handle).encode() in await engine.dump()) is keep_steps


DAMAGE: dict[str, tuple[tuple[Any, ...], str]] = {
    "wrong type": (("SET", "x"), "stored keys: "),
    "no record": (("HDEL", "r:1"), "steps: record 1 is missing"),
    "no msgpack": (("HSET", "r:1", b"\xc1"), "steps: record 1 cannot be read"),
    "another record": (("HSET", "r:1", b"\x91\x07"), "steps: record 1 cannot be read"),
    "no totals": (("HSET", "n", "many"), "steps: the number of records cannot be read"),
}


@pytest.mark.corrupts
@pytest.mark.parametrize("name", sorted(DAMAGE))
async def test_damage_is_named_and_hides_no_claim(engine: Engine, name: str) -> None:
    handle = await engine.running()
    await record(engine, handle, "a", status="pending")
    (command, *args), problem = DAMAGE[name]
    await engine.backend.transport.call(command, key_of(handle), *args)
    async with untouched(engine):
        read = engine.backend.steps.read_steps(handle.execution_id)
        for call in (read, record(engine, handle, "a")):
            error = await refused(call, "corruption")
            assert isinstance(error, CorruptionError)
            assert error.detail.startswith(f"{handle.execution_id}: {problem}")
    await engine.backend.executions.delay(handle, 1)
    claim = await engine.claim()
    # Whoever needs them reads them, and hears why that fails.
    assert claim.steps == StepPage((), 0)
    await engine.backend.executions.complete(claim.handle)


async def test_a_deleted_key_starts_again(engine: Engine) -> None:
    handle = await engine.running()
    await record(engine, handle, "a")
    await engine.backend.transport.call("DEL", key_of(handle))
    assert await engine.backend.steps.read_steps(handle.execution_id) == StepPage()
    assert await record(engine, handle, "b") == Recorded(1)


async def test_recording_and_reading_are_short(engine: Engine) -> None:
    handle = await engine.running()
    await asyncio.gather(*(record(engine, handle, f"k{n}") for n in range(2000)))
    numbers = iter(range(1000))

    async def write() -> None:
        await record(engine, handle, f"large{next(numbers)}", result=bytes(LARGEST))

    async def read() -> None:
        await engine.backend.steps.read_steps(handle.execution_id)

    async def read_large() -> None:
        await engine.backend.steps.read_steps(handle.execution_id, 2000)

    await assert_short(engine, "ff_record_step", write)
    for _ in range(16):
        await write()
    await assert_short(engine, "ff_read_steps", read)
    await assert_short(engine, "ff_read_steps", read_large)


async def test_claiming_what_has_steps_is_short(engine: Engine) -> None:
    handles = [await engine.running() for _ in range(40)]
    for handle in handles:
        await asyncio.gather(*(record(engine, handle, f"k{n}") for n in range(200)))
        await engine.backend.executions.delay(handle, 1)

    async def claim() -> None:
        for each in await engine.claim_all(40):
            await engine.backend.executions.delay(each.handle, 1)

    await assert_short(engine, "ff_claim_many", claim)
