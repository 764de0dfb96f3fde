"""What lease tests share: refusals by code, an untouched keyspace, index membership."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flowfabric.core.contracts.leases import Claim, ClaimGrant, Granted, Handle, ReclaimGrant
from flowfabric.core.ids import ExecutionId
from tests.support.engine import TTL, Engine

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
OTHER: dict[str, Any] = {"worker_id": "v", "worker_instance_id": "v-1"}


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
