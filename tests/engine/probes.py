"""What lease tests share: refusals by code, an untouched keyspace, index membership."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfabric.core.contracts.leases import Claim, ClaimGrant, Granted, Handle, ReclaimGrant
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.partition import PartitionCounts
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from flowfabric.engine.valkey.calls import Limits
from flowfabric.valkey.address import parse_url
from tests.support.engine import TTL, Engine
from tests.support.proxy import FaultProxy
from tests.support.server import TestServer

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
OTHER: dict[str, Any] = {"worker_id": "v", "worker_instance_id": "v-1"}


async def refused(code: str, work: Awaitable[object]) -> EngineError:
    """The error that the work is refused with; it has exactly this code."""
    with pytest.raises(EngineError) as caught:
        await work
    assert caught.value.code == code, caught.value
    return caught.value


@asynccontextmanager
async def untouched(engine: Engine) -> AsyncGenerator[None]:
    """Whatever happens inside changes no key."""
    before = await engine.dump()
    yield
    after = await engine.dump()
    changed = {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }
    assert not changed, changed


async def freeze(engine: Engine, at: int) -> None:
    """Stop the engine's clock at this millisecond; `engine.advance` starts it again."""
    await engine.backend.calls.fcall("ff_test_freeze", "{fp:0}", (at,), op="test")


async def fields(engine: Engine, execution_id: ExecutionId) -> dict[str, str]:
    """The stored record."""
    raw: Any = await engine.backend.transport.call(
        "HGETALL", keys.core(execution_id.tag, execution_id)
    )
    return {name.decode(): value.decode() for name, value in raw.items()}


async def write(engine: Engine, execution_id: ExecutionId, **values: Any) -> None:
    """Damage, or set, stored fields of the record."""
    flat = [part for pair in values.items() for part in pair]
    await engine.backend.transport.call("HSET", keys.core(execution_id.tag, execution_id), *flat)


async def placed(engine: Engine, execution_id: ExecutionId) -> dict[str, float | None]:
    """Every index that holds the execution, without the list of all, and its score there."""
    call = engine.backend.transport.call
    prefix = f"ff:idx:{execution_id.tag}:"
    found: dict[str, float | None] = {}
    names: Any = await call("KEYS", f"{prefix}*")
    for name in sorted(raw.decode() for raw in names):
        if await call("TYPE", name) == b"zset":
            score: Any = await call("ZSCORE", name, execution_id)
            if score is not None and not name.endswith(":all_executions"):
                found[name.removeprefix(prefix)] = score
        elif await call("TYPE", name) == b"set" and await call("SISMEMBER", name, execution_id):
            found[name.removeprefix(prefix)] = None
    return found


async def grant_fields(engine: Engine, execution_id: ExecutionId) -> dict[str, str]:
    """The stored grant; empty when there is none."""
    raw: Any = await engine.backend.transport.call(
        "HGETALL", keys.grant(execution_id.tag, execution_id)
    )
    return {name.decode(): value.decode() for name, value in raw.items()}


async def grant(engine: Engine, execution_id: ExecutionId, **options: Any) -> ClaimGrant:
    """A claim grant for worker `w`."""
    return await engine.backend.claims.issue_claim_grant(execution_id, **(WORKER | options))


async def fused(engine: Engine, execution_id: ExecutionId, **options: Any) -> Claim:
    """An operator takes one named execution."""
    arguments: dict[str, Any] = {"lease_duration_ms": TTL} | options
    return await engine.backend.claims.issue_grant_and_claim(execution_id, **arguments)


def a_grant(execution_id: ExecutionId) -> ClaimGrant:
    """A grant nobody issued."""
    return ClaimGrant(
        execution_id=execution_id,
        partition_key=execution_id.tag,
        grant_key="k#t",
        expires_at_ms=1,
    )


async def reclaim_grant(engine: Engine, execution_id: ExecutionId, **options: Any) -> ReclaimGrant:
    """A reclaim grant for worker `v`."""
    outcome = await engine.backend.claims.issue_reclaim_grant(execution_id, **(OTHER | options))
    assert isinstance(outcome, Granted), outcome
    return outcome.grant


async def reclaim(engine: Engine, execution_id: ExecutionId, **options: Any) -> Claim:
    """Worker `v` takes over a lost lease."""
    held = await reclaim_grant(engine, execution_id)
    arguments: dict[str, Any] = OTHER | {"lease_ttl_ms": TTL} | options
    outcome = await engine.backend.claims.reclaim_execution(held, **arguments)
    assert isinstance(outcome, Claim), outcome
    return outcome


async def running(engine: Engine, **create: Any) -> Handle:
    """A new execution held by worker `w`, whatever else waits."""
    held = await grant(engine, await engine.create(**create))
    return (await engine.backend.claims.claim_execution(held, **WORKER, lease_ttl_ms=TTL)).handle


async def paused(engine: Engine, **create: Any) -> Handle:
    """A handle whose execution was given back and is eligible to be resumed."""
    handle = await running(engine, **create)
    await engine.backend.executions.delay(handle, 1)
    return handle


async def lapsed(engine: Engine, **create: Any) -> Handle:
    """A handle whose lease has run out and is marked."""
    handle = await running(engine, **create)
    await engine.advance(TTL + 1)
    assert await mark(engine, [handle.execution_id]) == ["marked_expired"]
    return handle


async def mark(engine: Engine, ids: Iterable[ExecutionId]) -> list[str]:
    """What the lease scanner does with executions of one partition."""
    ids = list(ids)
    return await engine.backend.upkeep.mark_lease_expired_if_due(ids[0].tag, ids)


async def event_types(engine: Engine, execution_id: ExecutionId) -> list[str]:
    return [event.type for event in await engine.events(execution_id)]


@asynccontextmanager
async def lossy(
    engine: Engine, valkey: TestServer
) -> AsyncGenerator[tuple[ValkeyBackend, FaultProxy]]:
    """A second client of the same engine whose replies can be lost on the way."""
    with FaultProxy(valkey.socket_path) as proxy:
        client = await ValkeyBackend.connect(
            parse_url(proxy.url), prepare_with=PartitionCounts(), limits=Limits()
        )
        try:
            yield client, proxy
        finally:
            await client.aclose()
