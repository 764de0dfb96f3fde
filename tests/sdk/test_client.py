"""The client: submitting, waiting for ends that are pushed, reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from flowfabric.core.contracts.executions import Created, Duplicate
from flowfabric.core.contracts.leases import Revoked
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.errors import EngineError, NotFoundError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import ExpireReason
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.feeds import _FeedLink
from flowfabric.sdk.client import (
    Client,
    ExecutionCancelled,
    ExecutionExpired,
    ExecutionFailed,
    NotFinished,
)
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import submit, until, valkey_of, watch_of
from tests.support.server import TestServer
from tests.support.suspension import SECRET


@pytest.fixture
async def client(engine: Engine, valkey: TestServer) -> AsyncIterator[Client]:
    async with await Client.connect(valkey.url) as client:
        yield client
        await until(lambda: watch_of(client).waiting == 0, "no waiter left behind")


async def test_submit_variants(client: Client) -> None:
    first = await client.submit("job", b"\x00\xff", idempotency_key="k", tags={"a": "b"})
    assert isinstance(first, Created)
    again = await client.submit("job", b"other", idempotency_key="k")
    assert again == Duplicate(first.execution_id)
    fixed = ExecutionId.solo("default", client.backend.counts)
    assert isinstance(await client.submit("job", execution_id=fixed), Created)
    assert isinstance(await client.submit("job", execution_id=fixed), Duplicate)
    context = await client.read_context(first.execution_id)
    assert context is not None
    assert (context.input_payload, context.execution_kind) == (b"\x00\xff", "job")
    assert context.tags == {"a": "b"}
    snapshot = await client.inspect(first.execution_id)
    assert snapshot is not None
    assert snapshot.public_state.value == "waiting"


async def test_submit_many_answers_in_order(client: Client) -> None:
    items = [client.new_execution("job", str(n).encode()) for n in range(600)]
    items[7] = client.new_execution("", b"no kind")
    outcomes = await client.submit_many(items)
    assert len(outcomes) == 600
    assert isinstance(outcomes[7], EngineError)
    others = [o.execution_id for o in outcomes if isinstance(o, Created)]
    assert others == [i.execution_id for n, i in enumerate(items) if n != 7]


async def test_unknown_execution(client: Client) -> None:
    nobody = ExecutionId.solo("default", client.backend.counts)
    assert await client.inspect(nobody) is None
    assert await client.read_context(nobody) is None
    for call in (client.wait(nobody), client.result(nobody), client.result_now(nobody)):
        with pytest.raises(NotFoundError, match="execution_not_found"):
            await call
    with pytest.raises(EngineError):
        await client.cancel(nobody)


async def test_result_distinguishes_the_ends(client: Client, engine: Engine) -> None:
    done = (await submit(engine.backend))[0]
    claim = await engine.claim()
    with pytest.raises(NotFinished, match="active"):
        await client.result_now(done)
    await engine.backend.executions.complete(claim.handle, b"yes")
    assert await client.result(done) == await client.result_now(done) == b"yes"

    failed = (await submit(engine.backend))[0]
    await engine.backend.executions.fail(
        (await engine.claim()).handle, "boom\n  File ...", "handler_error"
    )
    with pytest.raises(ExecutionFailed) as caught:
        await client.result(failed)
    assert str(caught.value) == "job failed after 1 attempt: boom"
    outcome = await client.wait(failed)
    assert (outcome.failure_category, outcome.attempts) == ("handler_error", 1)

    cancelled = (await submit(engine.backend))[0]
    await client.cancel(cancelled, "not needed")
    with pytest.raises(ExecutionCancelled, match="not needed"):
        await client.result(cancelled)

    policy = {"timeout_policy": {"execution_deadline_ms": 1000}}
    expired = (await submit(engine.backend, policy=policy))[0]
    await engine.advance(2000)
    await engine.backend.upkeep.expire_execution(
        expired.tag, ExpireReason.EXECUTION_DEADLINE, [expired]
    )
    with pytest.raises(ExecutionExpired):
        await client.result_now(expired)


async def test_purge(client: Client, engine: Engine) -> None:
    execution_id = (await client.submit("job")).execution_id
    with pytest.raises(EngineError, match="execution_not_terminal"):
        await client.purge(execution_id)
    await client.cancel(execution_id)
    await client.purge(execution_id)
    assert await client.inspect(execution_id) is None


async def test_change_priority_list_and_replay(client: Client, engine: Engine) -> None:
    first, second = await submit(engine.backend, 2)
    await client.change_priority(second, 9)
    claim = await engine.claim()
    assert claim.handle.execution_id == second
    await engine.backend.executions.complete(claim.handle, b"1")
    page = await client.list(limit=10)
    assert {item.execution_id for item in page.executions} == {first, second}
    await client.replay(second, "once more")
    with pytest.raises(NotFinished):
        await client.result_now(second)


async def test_what_operators_do(client: Client, engine: Engine) -> None:
    backend = engine.backend
    await backend.secrets.seed_at_boot(SECRET)
    handle = await engine.running()
    execution_id = handle.execution_id
    assert await client.read_summary(execution_id, 0) is None
    await backend.streams.append_frame(handle, Frame(payload=b'{"a":1}'), mode="summary")
    summary = await client.read_summary(execution_id, 0)
    assert summary is not None
    assert summary.document_json == b'{"a":1}'
    waitpoint = await backend.waitpoints.create_waitpoint(handle, "later", 60_000)
    assert await client.close_waitpoint(execution_id, waitpoint.waitpoint_id, "not needed")
    assert not await client.close_waitpoint(execution_id, waitpoint.waitpoint_id)
    await backend.executions.complete(handle)
    with pytest.raises(EngineError, match="replay_not_allowed"):
        await client.replay(execution_id, expected_replay_count=4)
    await client.replay(
        execution_id, "again", requested_by="ada", expected_replay_count=0, keep_steps=True
    )
    claim = await engine.claim()
    attempt = (await backend.reads.read_attempts(execution_id))[1]
    assert (attempt.replay_reason, attempt.replay_requested_by) == ("again", "ada")
    with pytest.raises(EngineError, match="stale_lease"):
        await client.revoke_lease(execution_id, expected_lease_id=handle.lease_id)
    revoked = await client.revoke_lease(execution_id, expected_lease_id=claim.handle.lease_id)
    assert isinstance(revoked, Revoked)


async def test_rotating_the_secret(client: Client, engine: Engine) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    summary = await client.rotate_waitpoint_hmac_secret_all("k2", "cd" * 32, grace_ms=1000)
    assert (summary.rotated, summary.failed) == (engine.backend.counts.flow, ())
    kids = await client.list_waitpoint_hmac_kids(5)
    assert (kids.current_kid, [key.kid for key in kids.verifying]) == ("k2", ["k1"])


# --- waiting --------------------------------------------------------------------------------


@pytest.fixture
def only_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look by a clock comes in the time of a test: what is seen was told by the server."""
    for interval in ("_WAIT_S", "_RECHECK_S"):
        monkeypatch.setattr(f"flowfabric.engine.events.completions.{interval}", 3600.0)


@pytest.mark.usefixtures("only_pushed")
async def test_end_is_pushed(client: Client, engine: Engine) -> None:
    """And while nothing happens, nothing is sent: the connections fall silent."""
    (execution_id,) = await submit(engine.backend)
    waiter = asyncio.create_task(client.result(execution_id, 30))
    claim = await engine.claim()
    await until(lambda: reading(client, execution_id.tag), "the reader")
    (watcher,) = watch_of(client)._watchers.values()
    link = cast("_FeedLink", watcher._reader.link)
    await until(lambda: link._client_id > 0, "its connection")
    ids = [link._client_id, await valkey_of(client).transport.call("CLIENT", "ID")]
    await until(lambda: silent(engine, *ids), "a second without a command")
    await engine.backend.executions.complete(claim.handle, b"x")
    assert await waiter == b"x"


def reading(client: Client, tag: str) -> bool:
    feed = tag[1:-1]
    return any(feed in each._reader.reading for each in watch_of(client)._watchers.values())


async def silent(engine: Engine, *ids: int) -> bool:
    """Whether the server heard nothing from these connections for a second."""
    raw: Any = await engine.backend.transport.call("CLIENT", "LIST", "ID", *ids)
    idle = [int(line.partition(b" idle=")[2].split()[0]) for line in raw.splitlines()]
    # Told in whole seconds: 1 may be a moment around the turn of one.
    return len(idle) == len(ids) and min(idle) >= 2


async def test_many_waiters_over_partitions_share_one_reader(
    client: Client, engine: Engine, valkey: TestServer
) -> None:
    ids: list[ExecutionId] = []
    for partition in range(12):
        ids += await submit(engine.backend, 25, partition=partition)
    clients = await connected(engine)
    waiters = [asyncio.create_task(client.result(i, 20)) for i in ids for _ in range(2)]
    tags = {i.tag for i in ids}
    await until(lambda: all(reading(client, tag) for tag in tags), "all feeds")
    assert await connected(engine) == clients + 1
    want = engine.want()
    for tag in tags:
        claims = (await engine.backend.claims.claim_many(want, tag, 100)).claims
        for claim in claims:
            await engine.backend.executions.complete(
                claim.handle, claim.handle.execution_id.encode()
            )
    results = await asyncio.gather(*waiters)
    assert results == [i.encode() for i in ids for _ in range(2)]


async def connected(engine: Engine) -> int:
    raw: Any = await engine.backend.transport.call("INFO", "clients")
    text = raw if isinstance(raw, str) else raw.decode()
    return int(text.partition("connected_clients:")[2].split()[0])


@pytest.mark.usefixtures("only_pushed")
async def test_new_feed_is_followed_at_once(client: Client, engine: Engine) -> None:
    """The reader blocks on one feed when a waiter for another comes, again and again."""
    (never,) = await submit(engine.backend, partition=0)
    parked = asyncio.create_task(client.wait(never))
    await until(lambda: reading(client, never.tag), "the reader")
    for partition in range(1, 30):
        (execution_id,) = await submit(engine.backend, partition=partition)
        waiter = asyncio.create_task(client.result(execution_id, 30))
        claimed = await engine.backend.claims.claim_many(engine.want(), execution_id.tag, 1)
        await engine.backend.executions.complete(claimed.claims[0].handle, b"x")
        assert await waiter == b"x"
    parked.cancel()
    await asyncio.wait([parked])


async def test_timeout_and_cancellation_leave_nothing(client: Client, engine: Engine) -> None:
    ids = await submit(engine.backend, 5)
    for execution_id in ids[:3]:
        with pytest.raises(TimeoutError):
            await client.wait(execution_id, timeout=0.01)
    waiters = [asyncio.create_task(client.wait(i)) for i in ids for _ in range(3)]
    await until(lambda: watch_of(client).waiting == 5, "the waiters")
    for waiter in waiters:
        waiter.cancel()
    await asyncio.wait(waiters)
    assert all(waiter.cancelled() for waiter in waiters)
    (watcher,) = watch_of(client)._watchers.values()
    assert (watcher.waiters, watcher._reader.positions) == ({}, {})


async def test_replayed_execution_is_waited_for_again(client: Client, engine: Engine) -> None:
    (execution_id,) = await submit(engine.backend)
    await engine.backend.executions.complete((await engine.claim()).handle, b"first")
    assert await client.result(execution_id) == b"first"
    await client.replay(execution_id)
    waiter = asyncio.create_task(client.result(execution_id, 10))
    claim = await engine.claim()
    await engine.backend.executions.complete(claim.handle, b"second")
    assert await waiter == b"second"


async def test_closing_wakes_the_waiters(engine: Engine, valkey: TestServer) -> None:
    client = await Client.connect(valkey.url)
    (execution_id,) = await submit(engine.backend)
    waiter = asyncio.create_task(client.wait(execution_id))
    await until(lambda: reading(client, execution_id.tag), "the waiter")
    await client.aclose()
    with pytest.raises(TransportError, match="closed"):
        await waiter


async def test_wait_survives_cuts_of_the_connection(
    engine: Engine, valkey: TestServer, proxy: FaultProxy
) -> None:
    async with await Client.connect(proxy.url) as client:
        (execution_id,) = await submit(engine.backend)
        waiter = asyncio.create_task(client.result(execution_id, 20))
        await until(lambda: reading(client, execution_id.tag), "the reader")
        claim = await engine.claim()
        for _ in range(3):
            proxy.cut()
            await until(lambda: proxy.connections > 0, "a new connection")
        proxy.down()
        # The end comes while nobody can hear it.
        await engine.backend.executions.complete(claim.handle, b"x")
        proxy.up()
        assert await waiter == b"x"


async def test_wait_survives_a_restart_that_loses_the_feed(tmp_path: Any) -> None:
    server = TestServer("--appendonly", "yes", "--appendfsync", "always")
    try:
        backend = await ValkeyBackend.connect(parse_url(server.url), prepare_with=PartitionCounts())
        engine = Engine(backend)
        async with await Client.connect(server.url) as client:
            first, second = await submit(backend, 2)
            waiters = [asyncio.create_task(client.result(i, 30)) for i in (first, second)]
            await until(lambda: reading(client, first.tag), "the reader")
            claims = await engine.claim_all(2)
            server.kill()
            server.start()
            await until(lambda: alive(backend), "the server")
            # One end is trimmed from the feed before the reader can see it.
            for claim in claims:
                await backend.executions.complete(claim.handle, b"x")
            await backend.transport.call("XTRIM", f"ff:part:{first.tag}:events", "MAXLEN", 0)
            # Told by the reader's return, not by the slow look that waiters take by themselves.
            async with asyncio.timeout(8):
                assert await asyncio.gather(*waiters) == [b"x", b"x"]
        await backend.aclose()
    finally:
        server.stop()


async def alive(backend: ValkeyBackend) -> bool:
    try:
        await backend.meta.ping()
    except TransportError:
        return False
    return True


async def test_reader_far_behind_looks_again(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed is capped: entries that were trimmed unread must not strand a waiter."""
    monkeypatch.setattr("flowfabric.engine.events.reader._QUEUE", 20)
    (execution_id,) = await submit(engine.backend)
    waiter = asyncio.create_task(client.result(execution_id, 10))
    await until(lambda: reading(client, execution_id.tag), "the reader")
    handle = (await engine.claim()).handle
    feed = f"ff:part:{execution_id.tag}:events"
    # In one step: end it, lose the entry, and let many others follow.
    script = """
    redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
    for _ = 1, 100 do redis.call('XADD', KEYS[1], '*', 't', 'noise', 'id', 'x') end
    """
    transport = engine.backend.transport
    await transport.call("MULTI")
    await transport.call(
        "FCALL", "ff_complete", 1, execution_id.tag, 1, execution_id, handle.wire, "lease_holder",
        "1", b"x",
    )  # fmt: skip
    await transport.call("EVAL", script, 1, feed)
    await transport.call("EXEC")
    assert await waiter == b"x"
