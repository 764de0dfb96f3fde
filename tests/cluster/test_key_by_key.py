"""A slot that is moved key by key, as `valkey-cli --cluster reshard` does it on older servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.contracts.executions import Completed, Created, NewExecution
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.errors import TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.claims import ClaimRequest
from flowfabric.engine.api.executions import Completion
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.cluster import slot_of
from tests.support.cluster import TestCluster

LANE = "moving"


async def submit(backend: ValkeyBackend) -> ExecutionId:
    execution_id = ExecutionId.solo(LANE, backend.counts)
    new = NewExecution(execution_id=execution_id, execution_kind="job", lane_id=LANE)
    assert isinstance(await backend.executions.create_execution(new), Created)
    return execution_id


async def claim(backend: ValkeyBackend) -> Handle:
    await submit(backend)
    tag = ExecutionId.solo(LANE, backend.counts).tag
    (claimed,) = (await backend.claims.claim_many(ClaimRequest(LANE, "w", "w-1"), tag, 1)).claims
    return claimed.handle


@asynccontextmanager
async def half_moved(cluster: TestCluster, tag: str, *names: str) -> AsyncGenerator[asyncio.Event]:
    """These keys have moved, the others stay until the event is set."""
    slot = slot_of(tag)
    home = cluster.owner(slot)
    target = (home + 1) % 3
    await cluster.begin_move(slot, home, target)
    where = ("127.0.0.1", cluster.nodes[target].port, "", 0, 1000, "KEYS", *names)
    assert await cluster.call(home, "MIGRATE", *where) == b"OK"
    go_on = asyncio.Event()

    async def finish() -> None:
        await go_on.wait()
        await cluster.end_move(slot, target)

    finishing = asyncio.create_task(finish())
    try:
        yield go_on
    finally:
        go_on.set()
        await finishing
        await cluster.move(slot, target, home)


def moving(handle: Handle, part: str) -> str:
    """One of the keys that a completion touches."""
    tag = handle.execution_id.tag
    return {
        "record": keys.core(tag, handle.execution_id),
        "feed": keys.events(tag),
        "index": keys.lane(tag, LANE, "active"),
    }[part]


async def under_way(*calls: Any) -> list[asyncio.Future[Any]]:
    """The calls, once each of them was refused at least once."""
    started = [asyncio.ensure_future(call) for call in calls]
    done, _ = await asyncio.wait(started, timeout=0.3)
    assert not done, [task.exception() or task.result() for task in done]
    return started


@pytest.mark.parametrize("part", ["record", "feed", "index"])
async def test_finished_work_is_kept(
    backend: ValkeyBackend, cluster: TestCluster, part: str
) -> None:
    handle = await claim(backend)
    execution_id, tag = handle.execution_id, handle.execution_id.tag
    async with half_moved(cluster, tag, moving(handle, part)) as go_on:
        (completing,) = await under_way(
            backend.executions.complete_many([Completion(handle, b"done")])
        )
        go_on.set()
        (outcome,) = await completing
        assert isinstance(outcome, Completed)
    assert await backend.reads.get_execution_result(execution_id) == b"done"
    (attempt,) = await backend.reads.read_attempts(execution_id)
    assert attempt.attempt_state == "ended_success"


async def test_every_transition_waits_for_the_slot(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    handle = await claim(backend)
    tag = handle.execution_id.tag
    async with half_moved(cluster, tag, moving(handle, "record")) as go_on:
        # A plain read finds the record where it is.
        assert (await backend.reads.read_execution_state(handle.execution_id)).value == "active"
        calls = await under_way(
            backend.leases.renew(handle),
            submit(backend),
            backend.executions.progress(handle, 50, "half"),
        )
        go_on.set()
        await asyncio.gather(*calls)
    await backend.executions.complete(handle, b"done")
    assert len((await backend.listings.list_executions()).executions) == 2


async def test_when_patience_ends_the_cluster_is_named(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    handle = await claim(backend)
    backend.transport._request_timeout = 0.2  # type: ignore[attr-defined]
    async with half_moved(cluster, handle.execution_id.tag, moving(handle, "record")):
        with pytest.raises(TransportError) as caught:
            await backend.executions.complete(handle, b"done")
    error = caught.value
    assert (error.kind, error.retryable, error.ambiguous) == ("cluster", True, False)
    assert "is moving to" in error.message
    backend.transport._request_timeout = 5.0  # type: ignore[attr-defined]
    await backend.executions.complete(handle, b"done")


async def test_a_key_that_moved_during_a_function_is_not_damage(
    backend: ValkeyBackend, cluster: TestCluster
) -> None:
    """The anchor of a call never exists; if it did, the old primary would run the function."""
    handle = await claim(backend)
    tag = handle.execution_id.tag
    await backend.transport.call("SET", tag, "x", key=tag)
    backend.transport._request_timeout = 0.2  # type: ignore[attr-defined]
    async with half_moved(cluster, tag, moving(handle, "record")):
        for call in (
            backend.executions.complete(handle, b"done"),
            backend.executions.complete_many([Completion(handle, b"done")]),
            backend.upkeep.mark_lease_expired_if_due(tag, [handle.execution_id]),
            backend.claims.claim_many(ClaimRequest(LANE, "w", "w-2"), tag, 1),
        ):
            with pytest.raises(TransportError) as caught:
                await call
            assert (caught.value.kind, caught.value.retryable) == ("cluster", True)
            assert "non local key" in caught.value.message
