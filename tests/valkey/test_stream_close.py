"""Closing: every way an attempt ends, with and without output, and what is left after a purge."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Handle
from tests.conformance.test_stream_close import prepared
from tests.support.engine import Engine
from tests.support.executions import Case, promote, trim
from tests.support.storage import meta, stream_key, waiting_tail
from tests.support.streams import ENDINGS, FIRST, append, payloads

DAY = 86_400_000


@pytest.mark.parametrize("wrote", [True, False], ids=["with output", "silent"])
@pytest.mark.parametrize("name", sorted(FIRST))
async def test_the_end_of_an_attempt_wakes_its_followers(
    engine: Engine,
    name: str,
    wrote: bool,
) -> None:
    handle = await prepared(engine, name, wrote=wrote)
    seen = await engine.backend.streams.read_stream(handle.execution_id, 0)
    after = seen.next_cursor if wrote else "0-0"
    tails = [await waiting_tail(engine, handle.execution_id, after=after) for _ in range(3)]
    await ENDINGS[name].end(engine, handle)
    async with asyncio.timeout(1):
        pages = await asyncio.gather(*tails)
    assert [(page.frames, page.closed_reason) for page in pages] == [((), ENDINGS[name].reason)] * 3
    assert all(page.closed_at is not None for page in pages)


async def test_followers_are_woken_within_a_tenth_of_a_second(engine: Engine) -> None:
    loop, delays = asyncio.get_running_loop(), list[float]()
    for _ in range(5):
        handle = await engine.running()
        tail = await waiting_tail(engine, handle.execution_id)
        started = loop.time()
        await engine.backend.executions.complete(handle)
        async with asyncio.timeout(2):
            await tail
        delays.append(loop.time() - started)
    assert sorted(delays)[2] < 0.1


async def test_no_marker_is_ever_visible(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"x")
    tail = await waiting_tail(engine, handle.execution_id, after="99999999999999-0")
    await engine.backend.executions.complete(handle)
    await tail
    assert await payloads(engine, handle) == [b"x"]


async def test_closing_a_stream_without_followers_costs_nothing(engine: Engine) -> None:
    handle = await engine.running()
    before = set(await engine.dump())
    await engine.backend.executions.complete(handle)
    added = {name.decode() for name in set(await engine.dump()) - before}
    assert not [name for name in added if name.startswith("ff:stream:")]


# --- several attempts, several followers --------------------------------------------------------


async def test_followers_of_different_attempts_do_not_disturb_each_other(engine: Engine) -> None:
    """Somebody who waits for a later attempt takes nothing from those who follow this one."""
    case = await Case.make(engine, "active")
    backend, execution_id = engine.backend, case.execution_id
    current = await waiting_tail(engine, execution_id, 0)
    later = await waiting_tail(engine, execution_id, 1)
    far = await waiting_tail(engine, execution_id, 5)
    await backend.executions.fail(case.held, "boom", "transient")
    async with asyncio.timeout(5):
        assert (await current).closed_reason == "attempt_failure"
    assert not later.done()
    await engine.advance(1000)
    await promote(engine, execution_id)
    await case.claim()
    await append(engine, case.held, b"second")
    async with asyncio.timeout(5):
        page = await later
    assert [frame.payload for frame in page.frames] == [b"second"]
    again = await waiting_tail(engine, execution_id, 1, after=page.next_cursor)
    await backend.executions.complete(case.held)
    async with asyncio.timeout(5):
        assert (await again).closed_reason == "attempt_success"
    assert not far.done()
    far.cancel()
    await asyncio.wait([far])


async def test_followers_of_an_attempt_still_to_come(engine: Engine) -> None:
    execution_id = await engine.create()
    tail = await waiting_tail(engine, execution_id)
    handle = (await engine.claim()).handle
    await engine.backend.executions.complete(handle)
    async with asyncio.timeout(5):
        assert (await tail).closed_reason == "attempt_success"


async def test_followers_of_an_execution_still_to_come(engine: Engine) -> None:
    """Nothing can be noted of an execution that does not exist; its end is noticed all the same."""
    execution_id = engine.new_id()
    tail = await waiting_tail(engine, execution_id)
    await engine.create(execution_id=execution_id)
    handle = (await engine.claim()).handle
    await engine.backend.executions.complete(handle)
    async with asyncio.timeout(5):
        assert (await tail).closed_reason == "attempt_success"


async def test_the_list_of_followed_attempts_is_bounded(engine: Engine) -> None:
    handle = await engine.running()
    execution_id, backend = handle.execution_id, engine.backend
    for index in range(30):
        await backend.streams.tail_stream(execution_id, index, block_ms=1)
    fields: Any = await backend.transport.call(
        "HGET", f"ff:exec:{execution_id.tag}:{execution_id}:core", "tailed"
    )
    assert fields == b",0,1,2,3,4,5,6,7,"
    tail = await waiting_tail(engine, execution_id, 0)
    await backend.executions.complete(handle)
    async with asyncio.timeout(5):
        await tail


async def test_a_reclaim_stores_how_the_attempt_ended(engine: Engine) -> None:
    for name in ("reclaim", "reclaim after revoke", "reclaim over the cap"):
        handle = await prepared(engine, name, wrote=True)
        provisional = await meta(engine, handle)
        assert provisional["closed_reason"] in {"lease_expired", "lease_revoked"}
        await engine.advance(5)
        await ENDINGS[name].end(engine, handle)
        final = await meta(engine, handle)
        assert final["closed_reason"] == ENDINGS[name].reason
        assert int(final["closed_at"]) >= int(provisional["closed_at"]) + 5


async def test_closed_at_and_reason_come_together(engine: Engine) -> None:
    handle, now = await engine.running(), await engine.now()
    await append(engine, handle, b"x")
    stored = await meta(engine, handle)
    assert not {"closed_at", "closed_reason"} & set(stored)
    await engine.freeze(now + 7)
    await engine.backend.executions.complete(handle)
    stored = await meta(engine, handle)
    assert (stored["closed_at"], stored["closed_reason"]) == (str(now + 7), "attempt_success")


# --- purge --------------------------------------------------------------------------------------


async def test_a_purge_leaves_nothing(engine: Engine) -> None:
    case = await Case.make(engine, "active")
    backend, execution_id = engine.backend, case.execution_id
    handles: list[Handle] = []
    for attempt in range(2):
        handles.append(case.held)
        await append(engine, case.held, b"x")
        await append(engine, case.held, b'{"a":1}', mode="summary")
        tail = await waiting_tail(engine, execution_id, attempt, after="99999999999999-0")
        if attempt == 0:
            await backend.executions.fail(case.held, "boom", "transient")
            await engine.advance(1000)
            await promote(engine, execution_id)
            await case.claim()
        else:
            await backend.executions.complete(case.held)
        await tail
    names = {name.decode() for name in await engine.dump()}
    for handle in handles:
        for suffix in ("", ":meta", ":closed"):
            assert stream_key(handle, suffix) in names
    await engine.advance(DAY)
    assert await trim(engine, execution_id) == "purged"
    left = [name for name in await engine.dump() if execution_id.encode() in name]
    assert left == []
    page = await backend.streams.read_stream(execution_id, 0)
    assert (page.frames, page.is_closed) == ((), False)
    assert await backend.streams.read_summary(execution_id, 0) is None


async def test_a_follower_alone_leaves_nothing_behind_a_purge(engine: Engine) -> None:
    handle = await engine.running()
    tail = await waiting_tail(engine, handle.execution_id)
    await engine.backend.executions.complete(handle)
    await tail
    await engine.advance(DAY)
    assert await trim(engine, handle.execution_id) == "purged"
    assert not [n for n in await engine.dump() if handle.execution_id.encode() in n]
    # A late follower does not bring the execution back.
    await engine.backend.streams.tail_stream(handle.execution_id, 0, block_ms=1)
    assert not [n for n in await engine.dump() if handle.execution_id.encode() in n]
