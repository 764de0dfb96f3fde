"""Calls about quota policies stay short at their limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId, new_uuid
from flowfabric.core.partition import quota_partition
from flowfabric.engine.valkey import keys
from tests.support import lua_keys
from tests.support.engine import Engine
from tests.support.quotas import WINDOW, policy
from tests.support.server_time import assert_short, command

FULL = 20_000


def ids(engine: Engine, count: int) -> list[ExecutionId]:
    return [engine.new_id() for _ in range(count)]


async def crowded(engine: Engine) -> tuple[str, str]:
    """A policy with very many admissions, half of which are over, and its partition."""
    name = await policy(engine, max_requests_per_window=10**6, max_concurrent=10**6)
    tag = f"{{q:{quota_partition(name, engine.backend.counts)}}}"
    now = await engine.now()
    for start in range(0, FULL, 2000):
        found = ids(engine, 2000)
        age = 2 * WINDOW if start < FULL // 2 else 0
        await add(engine, lua_keys.quota_window(tag, name), now - age, found)
        await add(engine, keys.quota_slots(tag, name), now - age + 1000, found)
        guards = [part for each in found for part in (each, "0123456789ab")]
        await command(engine, "HSET", lua_keys.quota_guards(tag, name), *guards)
    return name, tag


async def add(engine: Engine, key: str, score: int, members: Iterable[str]) -> None:
    await command(engine, "ZADD", key, *(part for each in members for part in (score, each)))


async def test_calls_for_many_executions_of_a_crowded_policy(engine: Engine) -> None:
    name, tag = await crowded(engine)
    quotas, some = engine.backend.quotas, ids(engine, 256)

    async def admit() -> None:
        await quotas.admit_many(name, some)

    async def confirm() -> None:
        await quotas.confirm_many(name, some)

    async def release() -> None:
        await quotas.release_many(name, some)

    async def block() -> None:
        await quotas.note_blocked(name, some)

    async def reconcile() -> None:
        slots = [part for each in some[:200] for part in (each, "1.5", "free")]
        await engine.backend.calls.fcall("ff_quota_reconcile", tag, (name, *slots), op="test")

    await assert_short(engine, "ff_quota_admit", admit)
    await assert_short(engine, "ff_quota_confirm", confirm)
    await assert_short(engine, "ff_quota_block", block)
    await assert_short(engine, "ff_quota_release", release, confirm)
    await assert_short(engine, "ff_quota_reconcile", reconcile, confirm)


async def test_the_status_of_many_crowded_policies(engine: Engine) -> None:
    name, tag = await crowded(engine)

    async def status() -> None:
        await engine.backend.calls.fcall("ff_quota_status", tag, [name] * 200, op="test")

    await assert_short(engine, "ff_quota_status", status)


@pytest.mark.parametrize("function", ["admit", "confirm", "release", "block"])
async def test_the_server_refuses_oversized_batches(engine: Engine, function: str) -> None:
    name = await policy(engine, max_requests_per_window=5, max_concurrent=5)
    tag = f"{{q:{quota_partition(name, engine.backend.counts)}}}"
    more = {"admit": (new_uuid(), 1), "release": ("",)}.get(function, ())
    items: list[Any] = [part for each in ids(engine, 257) for part in (each, 1)]
    before = await engine.digest()
    with pytest.raises(EngineError, match="batch_too_large: 256 items"):
        await engine.backend.calls.fcall(
            f"ff_quota_{function}", tag, (name, *more, *items), op="test"
        )
    assert await engine.digest() == before
