"""Quota policies as stored: damaged keys, bounded work, the feed, the server's memory limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.quotas import Admitted, Unlimited
from flowfabric.core.errors import CorruptionError, EngineError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts, quota_partition
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support import lua_keys
from tests.support.engine import Engine, prepared_backend, refused, untouched
from tests.support.quotas import WINDOW, admit, policy, used
from tests.support.server import TestServer
from tests.support.server_time import commands_run
from tests.valkey.mutation import private_engine, private_server

__all__ = ["private_engine", "private_server"]
STORED = ("requests_per_window_seconds", "max_requests_per_window", "active_concurrency_cap")
PARTS = {
    "record": keys.quota,
    "window": lua_keys.quota_window,
    "guards": lua_keys.quota_guards,
    "slots": keys.quota_slots,
    "blocked": keys.quota_blocked,
}


def place(engine: Engine, name: str, part: str) -> str:
    tag = f"{{q:{quota_partition(name, engine.backend.counts)}}}"
    return PARTS[part](tag, name)


async def test_all_keys_share_the_partition_of_the_policy(engine: Engine) -> None:
    name = await policy(engine, max_requests_per_window=2, max_concurrent=2)
    await admit(engine, name)
    await engine.backend.quotas.note_blocked(name, [engine.new_id()])
    found: Any = await engine.backend.transport.call("KEYS", f"*{name}*")
    assert sorted(found) == sorted(place(engine, name, part).encode() for part in PARTS)


@pytest.mark.corrupts
@pytest.mark.parametrize("part", ["record", "window", "guards", "slots"])
async def test_a_key_of_the_wrong_type_admits_no_execution(engine: Engine, part: str) -> None:
    quotas = engine.backend.quotas
    name = await policy(engine, max_requests_per_window=5, max_concurrent=5)
    good = await policy(engine, max_requests_per_window=5)
    await engine.backend.transport.call("SET", place(engine, name, part), "x")
    async with untouched(engine):
        answers = await quotas.admit_many(name, [engine.new_id(), engine.new_id()])
        assert [type(each) for each in answers] == [CorruptionError] * 2
        error = await refused(quotas.check_admission(name, engine.new_id()), "corruption")
        assert error.detail.startswith(f"quota {name}: ")
    # One damaged policy stops nobody else.
    assert isinstance((await quotas.admit_many(good, [engine.new_id()]))[0], Admitted)


@pytest.mark.corrupts
@pytest.mark.parametrize("part", ["record", "slots"])
async def test_a_key_of_the_wrong_type_in_other_calls(engine: Engine, part: str) -> None:
    quotas, execution_id = engine.backend.quotas, engine.new_id()
    name = await policy(engine, max_requests_per_window=5, max_concurrent=5)
    good = await policy(engine)
    await engine.backend.transport.call("SET", place(engine, name, part), "x")
    async with untouched(engine):
        await refused(quotas.get_quota_status(name), "corruption")
        await refused(quotas.confirm_admission(name, execution_id), "corruption")
        await refused(quotas.release_admission(name, execution_id), "corruption")
        page = await quotas.list_quota_policies()
    assert [row.quota_policy_id for row in page.entries] == [good]
    assert len(page.damaged) == 1
    assert page.damaged[0].startswith(f"quota {name}: ")


@pytest.mark.corrupts
async def test_damaged_records_in_other_calls(engine: Engine) -> None:
    quotas = engine.backend.quotas
    name = await policy(engine)
    await engine.backend.transport.call("SET", place(engine, name, "record"), "x")
    async with untouched(engine):
        await refused(quotas.create_quota_policy(name), "corruption")
        await refused(quotas.update_quota_policy(name, jitter_ms=1), "corruption")
        await refused(quotas.read_quota_policy_limits(name), "corruption")
        await refused(quotas.note_blocked(name, [engine.new_id()]), "corruption")
    await engine.backend.transport.call("SET", place(engine, name, "blocked"), "x")
    await refused(quotas.blocked(name), "corruption")


@pytest.mark.corrupts
@pytest.mark.parametrize("value", ["many", "-1", "1.5", "9007199254740992", " 1"])
@pytest.mark.parametrize("field", [*STORED, "jitter_ms"])
async def test_an_unparsable_limit_is_corruption(engine: Engine, field: str, value: str) -> None:
    quotas, name = engine.backend.quotas, await policy(engine, max_requests_per_window=5)
    await engine.backend.transport.call("HSET", place(engine, name, "record"), field, value)
    async with untouched(engine):
        error = await refused(quotas.check_admission(name, engine.new_id()), "corruption")
        assert error.detail == f"quota {name}: {field}: is not a whole number"
        await refused(quotas.read_quota_policy_limits(name), "corruption")
        await refused(quotas.get_quota_status(name), "corruption")
        await refused(quotas.create_quota_policy(name), "corruption")


async def test_an_absent_limit_is_0(engine: Engine) -> None:
    name = await policy(engine, max_requests_per_window=5, max_concurrent=5, jitter_ms=5)
    record = place(engine, name, "record")
    await engine.backend.transport.call("HDEL", record, *STORED, "jitter_ms")
    limits = await engine.backend.quotas.read_quota_policy_limits(name)
    assert limits is not None
    assert (limits.max_requests_per_window, limits.max_concurrent) == (0, 0)
    assert (limits.window_seconds, limits.window_ms) == (0, WINDOW)
    assert await engine.backend.quotas.admit_many(name, [engine.new_id()]) == [Unlimited()]


@pytest.mark.corrupts
async def test_a_lost_entry_of_the_index_is_restored(engine: Engine) -> None:
    quotas, name = engine.backend.quotas, await policy(engine, jitter_ms=5)
    index = keys.index(f"{{q:{quota_partition(name, engine.backend.counts)}}}", "quota_policies")
    await engine.backend.transport.call("DEL", index)
    assert (await quotas.list_quota_policies()).entries == ()
    await quotas.create_quota_policy(name)
    await engine.backend.transport.call("ZADD", index, 0, "no uuid")
    page = await quotas.list_quota_policies()
    assert [row.quota_policy_id for row in page.entries] == [name]
    assert page.damaged == ("quota_policies: member: 'no uuid' is not a UUID",)


@pytest.mark.corrupts
async def test_a_malformed_execution_that_waits_is_left_out(engine: Engine) -> None:
    name, waiting = await policy(engine, max_concurrent=1), engine.new_id()
    await engine.backend.quotas.note_blocked(name, [waiting])
    await engine.backend.transport.call("ZADD", place(engine, name, "blocked"), 1, "nobody")
    page = await engine.backend.quotas.blocked(name)
    assert (page.entries, len(page.damaged)) == ((waiting,), 1)


async def test_a_page_of_those_that_wait_in_one_place_costs_a_page(engine: Engine) -> None:
    """Executions of one call were created at the same time, and have the same priority."""
    quotas, name = engine.backend.quotas, await policy(engine, max_concurrent=1)
    ids = sorted(engine.new_id() for _ in range(1000))
    await quotas.note_blocked(name, ids, [7] * len(ids))
    first = await quotas.blocked(name, 900)
    assert (list(first.entries), first.next_cursor is None) == (ids[:900], False)
    ran = await commands_run(engine)
    page = await quotas.blocked(name, 5, first.next_cursor or "")
    assert list(page.entries) == ids[900:905]
    assert await commands_run(engine) - ran < 25


async def crowded(engine: Engine) -> tuple[str, ExecutionId]:
    """A policy with more expired entries than two calls remove, and the last of them."""
    name = await policy(engine, max_requests_per_window=5000, max_concurrent=5000)
    await engine.backend.quotas.admit_many(name, [engine.new_id() for _ in range(2100)])
    await engine.advance(WINDOW)
    last: Any = await engine.backend.transport.call("ZRANGE", place(engine, name, "window"), -1, -1)
    assert await used(engine, name) == (0, 0)
    assert await admit(engine, name) == "admitted"
    return name, ExecutionId(last[0].decode())


async def test_what_expired_does_not_count_although_it_is_still_stored(engine: Engine) -> None:
    """A call removes 1000 entries at most, so that it never holds the server for long."""
    name, last = await crowded(engine)
    assert await engine.backend.transport.call("ZCARD", place(engine, name, "window")) == 1101
    assert await admit(engine, name, last) == "admitted"
    assert await used(engine, name) == (2, 2)
    await engine.backend.quotas.update_quota_policy(name, max_requests_per_window=2)
    assert (await admit(engine, name)).startswith("rate ")
    for part, count in (("window", "ZCARD"), ("guards", "HLEN"), ("slots", "ZCARD")):
        assert await engine.backend.transport.call(count, place(engine, name, part)) == 2


async def test_a_slot_that_ended_is_no_own_slot_although_it_is_still_stored(
    engine: Engine,
) -> None:
    name, last = await crowded(engine)
    await engine.backend.quotas.update_quota_policy(name, max_concurrent=1)
    assert (await admit(engine, name, last)).startswith("concurrency ")


async def test_feeds_of_policies_are_trimmed_by_age(engine: Engine) -> None:
    upkeep = engine.backend.upkeep
    assert await upkeep.trim_policy_events(2**45) == 0
    for _ in range(3):
        await policy(engine)
    assert await upkeep.trim_policy_events(1) == 0
    assert await upkeep.trim_policy_events(2**45) == 3


async def test_at_the_memory_limit_stored_work_is_still_admitted(private_engine: Engine) -> None:
    quotas, execution_id = private_engine.backend.quotas, private_engine.new_id()
    await private_engine.advance(0)
    name = await policy(private_engine, max_concurrent=1)
    call = private_engine.backend.transport.call
    await call("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(TransportError) as caught:
            await policy(private_engine)
        assert caught.value.kind == "out_of_memory"
        assert await admit(private_engine, name, execution_id) == "admitted"
        await quotas.confirm_admission(name, execution_id)
        await quotas.note_blocked(name, [execution_id])
        await quotas.update_quota_policy(name, max_concurrent=2)
        await quotas.release_admission(name, execution_id)
    finally:
        await call("CONFIG", "SET", "maxmemory", "0")


async def test_a_lost_connection_denies_each_candidate(valkey: TestServer) -> None:
    async with prepared_backend(valkey.url) as backend:
        engine = Engine(backend)
        name = await policy(engine, max_concurrent=1)
        client = await ValkeyBackend.connect(
            parse_url(valkey.url), prepare_with=PartitionCounts(), request_timeout=0.2
        )
        await client.aclose()
        answers = await client.quotas.admit_many(name, [engine.new_id(), engine.new_id()])
        assert all(isinstance(each, EngineError) for each in answers)
        assert await used(engine, name) == (0, 0)


async def test_schedulers_that_race_admit_as_many_as_the_limits_allow(engine: Engine) -> None:
    name = await policy(engine, max_requests_per_window=30, max_concurrent=20)
    ids = [engine.new_id() for _ in range(40)]

    async def scheduler(start: int) -> list[Any]:
        picked = ids[start:] + ids[:start]
        found: list[Any] = []
        for first in range(0, 40, 4):
            found += await engine.backend.quotas.admit_many(name, picked[first : first + 4])
        return found

    answers = [
        each for part in await asyncio.gather(*map(scheduler, range(0, 40, 5))) for each in part
    ]
    assert sum(isinstance(each, Admitted) for each in answers) == 20
    assert await used(engine, name) == (20, 20)
