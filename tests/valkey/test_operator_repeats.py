"""A lost reply to an operator's call, and somebody acts before the repeat arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flowfabric.core.contracts.executions import (
    Completed,
    Delayed,
    Moved,
    RetryScheduled,
    TerminalFailed,
)
from flowfabric.core.contracts.leases import Handle, Revoked
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.state import PublicState
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.valkey.address import parse_url
from tests.support.engine import Engine, refused
from tests.support.executions import POLICY
from tests.support.leases import event_types
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer
from tests.support.storage import record

OVERRIDE = "operator_override"

Call = Callable[[ValkeyBackend, ExecutionId], Awaitable[Any]]


class HoldingProxy(FaultProxy):
    """Loses one reply and then holds everything back until `resume`."""

    def __init__(self, upstream: str | Path) -> None:
        self.lost = threading.Event()
        super().__init__(upstream)

    async def _replies(self, reader: asyncio.StreamReader, pair: Any) -> None:
        await super()._replies(reader, pair)
        if pair.drop_reply:
            self._gate.clear()
            self.lost.set()


async def interrupted(
    valkey: TestServer,
    function: str,
    call: Callable[[ValkeyBackend], Awaitable[Any]],
    meanwhile: Callable[[], Awaitable[Any]],
) -> Any:
    """The answer of a call whose reply is lost, when something happens before its repeat."""
    with HoldingProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(parse_url(proxy.url), prepare_with=PartitionCounts())
        try:
            proxy.drop_next_reply(function.encode())
            under_way = asyncio.ensure_future(call(client))
            assert await asyncio.to_thread(proxy.lost.wait, 10)
            await meanwhile()
            proxy.resume()
            return await under_way
        finally:
            proxy.resume()
            await client.aclose()


async def test_the_next_holder_keeps_the_lease(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    execution_id = handle.execution_id
    taken: list[Handle] = []

    async def reclaim() -> None:
        taken.append((await engine.claim(worker="v", instance="v-1")).handle)

    answer = await interrupted(
        valkey, "ff_revoke", lambda backend: backend.leases.revoke_lease(execution_id), reclaim
    )
    assert answer == Revoked(handle.lease_id, 1)
    assert await event_types(engine, execution_id) == ["acquired", "revoked", "reclaimed"]
    await engine.backend.executions.complete(taken[0])


async def test_a_second_revocation_in_between(engine: Engine, valkey: TestServer) -> None:
    handle = await engine.running()
    execution_id = handle.execution_id

    async def reclaim_and_revoke() -> None:
        for _ in range(2):
            await engine.claim()
            await engine.backend.leases.revoke_lease(execution_id)
        await engine.claim()

    answer = await interrupted(
        valkey,
        "ff_revoke",
        lambda backend: backend.leases.revoke_lease(execution_id),
        reclaim_and_revoke,
    )
    assert answer == Revoked(handle.lease_id, 1)
    assert (await engine.vector(execution_id)).ownership_state == "leased"


async def test_only_the_last_requests_are_remembered(engine: Engine) -> None:
    execution_id = (await engine.running()).execution_id
    for _ in range(6):
        await engine.backend.leases.revoke_lease(execution_id)
        await engine.claim()
    known = (await record(engine, execution_id))["operator_requests"]
    assert [line.rpartition("/")[2] for line in known.splitlines()] == ["6", "5", "4", "3"]
    shown = await engine.backend.reads.read_exec_core_fields(execution_id, ["operator_requests"])
    assert shown == {"operator_requests": None}


async def complete(backend: ValkeyBackend, execution_id: ExecutionId) -> Any:
    return await backend.executions.complete_execution(
        execution_id, source=OVERRIDE, result_payload=b"r"
    )


async def fail(backend: ValkeyBackend, execution_id: ExecutionId) -> Any:
    return await backend.executions.fail_execution(
        execution_id, source=OVERRIDE, failure_reason="x", failure_category="permanent"
    )


async def retry(backend: ValkeyBackend, execution_id: ExecutionId) -> Any:
    return await backend.executions.fail_execution(
        execution_id, source=OVERRIDE, failure_reason="x", failure_category="transient"
    )


async def delay(backend: ValkeyBackend, execution_id: ExecutionId) -> Any:
    return await backend.executions.delay_execution(execution_id, source=OVERRIDE, delay_until=1)


async def park(backend: ValkeyBackend, execution_id: ExecutionId) -> Any:
    return await backend.executions.move_to_waiting_children(execution_id, source=OVERRIDE)


async def again(engine: Engine, execution_id: ExecutionId) -> None:
    """Whoever runs the execution next, after whatever it takes."""
    backend = engine.backend
    vector = await engine.vector(execution_id)
    if vector.lifecycle_phase == "terminal":
        await backend.executions.replay_execution(execution_id)
    elif vector.public_state == PublicState.DELAYED:
        await engine.advance(1000)
        await backend.upkeep.promote_delayed(execution_id.tag, "default", [execution_id])
    elif vector.public_state == PublicState.WAITING_CHILDREN:
        # What a resolved dependency does.
        core = keys.core(execution_id.tag, execution_id)
        await backend.transport.call("HSET", core, "state", "ruewni")
        lane = keys.lane(execution_id.tag, "default", "blocked:dependencies")
        await backend.transport.call("ZREM", lane, execution_id)
        index = keys.eligible(execution_id.tag, "default")
        await backend.transport.call("ZADD", index, 1, execution_id)
    await engine.claim()


def failed(_: ExecutionId) -> TerminalFailed:
    return TerminalFailed()


def given_back(execution_id: ExecutionId) -> Delayed:
    return Delayed(execution_id, PublicState.WAITING)


@pytest.mark.parametrize(
    ("function", "call", "expected"),
    [
        ("ff_complete", complete, Completed),
        ("ff_fail", fail, failed),
        ("ff_fail", retry, None),
        ("ff_delay", delay, given_back),
        ("ff_wait_children", park, Moved),
    ],
)
@pytest.mark.corrupts
async def test_an_override_does_not_strike_the_next_attempt(
    engine: Engine, valkey: TestServer, function: str, call: Call, expected: Any
) -> None:
    handle = await engine.running(policy=POLICY)
    execution_id = handle.execution_id
    await engine.block(execution_id)
    seen: list[Any] = []

    async def meanwhile() -> None:
        await again(engine, execution_id)
        seen.append(await engine.dump())

    answer = await interrupted(
        valkey, function, lambda backend: call(backend, execution_id), meanwhile
    )
    if expected is None:
        (first, _) = await engine.backend.reads.read_attempts(execution_id)
        assert answer == RetryScheduled(first.delay_until or 0, 1)
    else:
        assert answer == expected(execution_id)
    assert (await engine.vector(execution_id)).ownership_state == "leased"
    assert [await engine.dump()] == seen


async def test_an_override_is_no_ones_to_fake(engine: Engine) -> None:
    handle = await engine.running()
    error = await refused(
        engine.backend.executions.complete_execution(
            handle.execution_id, source=f"{OVERRIDE} mine"
        ),
        "invalid_input",
    )
    assert error.detail.startswith("source: ")
