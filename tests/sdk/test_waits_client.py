"""Answering waits from outside: by token, by key, as an operator, in async and plain code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.conditions import AllOf, Single
from flowfabric.core.contracts.suspension import Accepted, DuplicateSignal, Suspended
from flowfabric.core.errors import EngineError, NotFoundError, ValidationError
from flowfabric.sdk.client import Client
from flowfabric.sdk.sync import SyncClient
from tests.support.engine import Engine
from tests.support.server import TestServer
from tests.support.suspension import Waits

BOTH = AllOf((Single("legal", "approved"), Single("money", "approved")))
NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
async def waits(engine: Engine) -> Waits:
    return await Waits.open(engine)


@pytest.fixture
async def client(engine: Engine, valkey: TestServer) -> AsyncIterator[Client]:
    async with await Client.connect(valkey.url) as connected:
        yield connected


def first(parked: Suspended) -> tuple[Any, str, Any]:
    """What answering its first waitpoint needs."""
    details = parked.details
    return parked.handle.execution_id, details.waitpoint_id, details.waitpoint_token


async def test_a_signal_with_its_token(client: Client, waits: Waits) -> None:
    execution_id, waitpoint_id, token = first(await waits.park())
    with pytest.raises(ValidationError, match="invalid_token"):
        await client.deliver_signal(execution_id, waitpoint_id, "k1:" + "0" * 40, "go")
    outcome = await client.deliver_signal(
        execution_id,
        waitpoint_id,
        token.reveal(),
        "go",
        payload=b"\xff",
        payload_encoding="binary",
        signal_category="callback",
        source_type="service",
        source_identity="mailer",
        correlation_id="c-1",
        idempotency_key="once",
        target_scope="execution",
        signal_id=NOBODY,
        created_at=5,
        dedup_ttl_ms=60_000,
        max_signals_per_execution=3,
        signal_maxlen=10,
    )
    assert outcome == Accepted(NOBODY, "resume_condition_satisfied")
    stored = await client.backend.waitpoints.read_signal(execution_id, NOBODY)
    assert stored is not None
    assert (stored.payload, stored.source_identity, stored.correlation_id) == (
        b"\xff",
        "mailer",
        "c-1",
    )
    again = await client.deliver_signal(
        execution_id, waitpoint_id, token, "go", idempotency_key="once"
    )
    assert again == DuplicateSignal(NOBODY)


async def test_a_trusted_caller_may_delay_the_resume(client: Client, waits: Waits) -> None:
    execution_id, waitpoint_id, token = first(await waits.park())
    await client.deliver_signal(execution_id, waitpoint_id, token, "go", resume_delay_ms=60_000)
    assert (await client.backend.reads.read_execution_state(execution_id)).value == "delayed"


async def test_approval_by_key_or_id(client: Client, waits: Waits) -> None:
    parked = await waits.park(BOTH)
    execution_id = parked.handle.execution_id
    legal = await client.approve(execution_id, "legal", by="ada", payload=b'"fine"')
    assert isinstance(legal, Accepted)
    assert legal.effect == "appended_to_waitpoint"
    stored = await client.backend.waitpoints.read_signal(execution_id, legal.signal_id)
    assert stored is not None
    assert (stored.source_identity, stored.source_type, stored.payload) == (
        "ada",
        "operator",
        b'"fine"',
    )
    repeat = await client.approve(execution_id, "legal", by="ada")
    assert repeat == DuplicateSignal(legal.signal_id)
    other = await client.approve(execution_id, "legal", "rejected", by="ada")
    assert isinstance(other, Accepted)
    money = await client.approve(execution_id, parked.details.waitpoints[1].waitpoint_id)
    assert isinstance(money, Accepted)
    assert money.resumed


async def test_approval_of_what_is_not_open(client: Client, waits: Waits, engine: Engine) -> None:
    execution_id = (await waits.park(BOTH)).handle.execution_id
    for name in ("lega", NOBODY, ""):
        with pytest.raises(NotFoundError, match="'legal', 'money'") as caught:
            await client.approve(execution_id, name)
        assert caught.value.code == "waitpoint_not_found"
    handle = await engine.running()
    for _ in range(2):
        await engine.backend.waitpoints.create_waitpoint(handle, "same", 60_000)
    with pytest.raises(
        ValidationError, match="'same' matches several; pass one of the ids"
    ) as refused:
        await client.approve(handle.execution_id, "same")
    assert refused.value.code == "invalid_input"
    with pytest.raises(NotFoundError, match="is active and waits for no answer"):
        await client.signal((await engine.running()).execution_id, "same", "go")
    with pytest.raises(NotFoundError, match="execution_not_found"):
        await client.approve(engine.new_id(), "same")


async def test_a_numbered_wait_is_found_by_its_name(client: Client, waits: Waits) -> None:
    execution_id = (await waits.park(Single("ask#2"))).handle.execution_id
    outcome = await client.signal(execution_id, "ask", "go")
    assert isinstance(outcome, Accepted)
    assert outcome.resumed


async def test_tokens_listings_and_the_bridge(client: Client, waits: Waits) -> None:
    execution_id, waitpoint_id, token = first(await waits.park())
    assert await client.read_waitpoint_token(execution_id, waitpoint_id) == token
    assert await client.read_waitpoint_token(execution_id, NOBODY) is None
    (entry,) = (await client.list_pending_waitpoints(execution_id)).entries
    assert (entry.waitpoint_id, entry.required_signal_names) == (waitpoint_id, ("go",))
    (row,) = (await client.list_suspended(limit=10)).entries
    assert row.execution_id == execution_id
    with pytest.raises(NotFoundError, match="waitpoint_token_not_found"):
        await client.verify_and_deliver(execution_id, NOBODY, token, "go")
    with pytest.raises(ValidationError, match="invalid_token"):
        await client.verify_and_deliver(execution_id, waitpoint_id, "k1:" + "0" * 40, "go")
    done = await client.verify_and_deliver(execution_id, waitpoint_id, token, "go", payload=b"1")
    assert isinstance(done, Accepted)
    assert done.resumed


async def test_a_resume_by_hand(client: Client, waits: Waits) -> None:
    execution_id = (await waits.park()).handle.execution_id
    resumed = await client.resume(execution_id, resume_delay_ms=60_000)
    assert resumed.public_state.value == "delayed"
    with pytest.raises(EngineError, match="execution_not_suspended"):
        await client.resume(execution_id)


async def test_plain_code_has_the_same_methods(
    waits: Waits, engine: Engine, valkey: TestServer
) -> None:
    parked = [await waits.park() for _ in range(4)]
    other = await waits.park(BOTH)

    def use() -> list[bool]:
        with SyncClient.connect(valkey.url) as sync:
            execution_id, waitpoint_id, token = first(parked[0])
            assert len(sync.list_suspended().entries) == 5
            assert sync.read_waitpoint_token(execution_id, waitpoint_id) == token
            assert len(sync.list_pending_waitpoints(execution_id).entries) == 1
            outcomes = [
                sync.deliver_signal(execution_id, waitpoint_id, token, "go"),
                sync.verify_and_deliver(*first(parked[1]), "go"),
                sync.signal(parked[2].handle.execution_id, "k", "go", payload=b"1"),
                sync.approve(other.handle.execution_id, "money"),
            ]
            assert sync.resume(parked[3].handle.execution_id).public_state.value == "waiting"
            assert sync.read_stream(execution_id, 0).frames == ()
            return [isinstance(outcome, Accepted) and outcome.resumed for outcome in outcomes]

    assert await asyncio.to_thread(use) == [True, True, True, False]


async def test_runs_are_answered_and_followed_from_plain_code(
    waits: Waits, valkey: TestServer
) -> None:
    app = ff.Fabric(valkey.url)

    @app.task()
    async def ask(ctx: ff.Context) -> int:
        await ctx.stream("asking")
        return (await ctx.wait_for("number")).payload + 1

    def use() -> tuple[int, list[bytes]]:
        with ff.SyncFabric(app) as sync:
            run = sync.submit(ask)
            frames = run.stream()
            seen = [next(frames).payload]
            while True:
                try:
                    run.signal("number", "is", 41)
                    break
                except NotFoundError:
                    # It has written, but does not wait yet.
                    continue
            result = run.result(10)
            return result, seen + [frame.payload for frame in frames]

    async with app, app.worker(scanners=False):
        assert await asyncio.to_thread(use) == (42, [b"asking", b"asking"])
