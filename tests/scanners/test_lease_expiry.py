from __future__ import annotations

import pytest

from flowfabric.core.state import OwnershipState
from flowfabric.engine.valkey import keys
from flowfabric.scanners.base import ScanResult
from tests.support.engine import TTL, Engine
from tests.support.scanning import DEFAULTS, idle, members, plant, rings, running
from tests.support.sdk import until


async def test_a_lost_workers_execution_comes_back_by_itself(engine: Engine) -> None:
    lost = await engine.running()
    await engine.backend.transport.call("DEL", keys.wake("default"))
    await engine.advance(TTL)
    assert await idle(engine).scan_once("lease_expiry") == ScanResult(processed=1)
    vector = await engine.vector(lost.execution_id)
    assert vector.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    assert await rings(engine) == [str(lost.execution_id.partition).encode()]
    claim = await engine.claim(instance="w-2")
    assert (claim.handle.execution_id, claim.handle.kind) == (lost.execution_id, "reclaimed")
    await engine.backend.executions.complete(claim.handle)


async def test_without_any_operator(engine: Engine) -> None:
    await engine.create()
    lost = await engine.claim(ttl=50)
    async with running(engine.backend, DEFAULTS):
        await until(lambda: _offered(engine, lost.handle.execution_id), timeout=5)
    (taken,) = await engine.claim_all(instance="w-2")
    assert taken.handle.kind == "reclaimed"


async def _offered(engine: Engine, execution_id: str) -> bool:
    tag = execution_id[: execution_id.index("}") + 1]
    return execution_id in await members(engine, tag, "lane:default:reclaimable")


async def test_a_live_lease_is_left_alone(engine: Engine) -> None:
    held = await engine.running()
    assert await idle(engine).scan_once("lease_expiry") == ScanResult()
    await engine.backend.executions.complete(held)


@pytest.mark.corrupts
async def test_renewed_since_the_index_was_read(engine: Engine) -> None:
    held = await engine.running()
    await plant(engine, held.execution_id.tag, "lease_expiry", held.execution_id)
    assert await idle(engine).scan_once("lease_expiry") == ScanResult()
    assert await members(engine, held.execution_id.tag, "lease_expiry") == [held.execution_id]


async def test_record_missing(engine: Engine) -> None:
    ghost = engine.new_id()
    await engine.create()
    await plant(engine, ghost.tag, "lease_expiry", ghost)
    assert await idle(engine).scan_once("lease_expiry") == ScanResult(processed=1)
    assert await members(engine, ghost.tag, "lease_expiry") == []


async def test_not_active(engine: Engine) -> None:
    waiting = await engine.create()
    await plant(engine, waiting.tag, "lease_expiry", waiting)
    assert await idle(engine).scan_once("lease_expiry") == ScanResult(processed=1)
    assert await members(engine, waiting.tag, "lease_expiry") == []


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_already_marked(engine: Engine, how: str) -> None:
    held = await engine.running()
    tag = held.execution_id.tag
    if how == "expired":
        await engine.advance(TTL)
        await engine.backend.upkeep.mark_lease_expired_if_due(tag, [held.execution_id])
    else:
        await engine.backend.leases.revoke_lease(held.execution_id)
    await plant(engine, tag, "lease_expiry", held.execution_id)
    await engine.backend.transport.call("DEL", keys.lane(tag, "default", "reclaimable"))
    assert await idle(engine).scan_once("lease_expiry") == ScanResult(processed=1)
    assert await members(engine, tag, "lease_expiry") == []
    assert await members(engine, tag, "lane:default:reclaimable") == [held.execution_id]


@pytest.mark.corrupts
async def test_active_without_an_owner(engine: Engine) -> None:
    held = await engine.running()
    tag = held.execution_id.tag
    await engine.backend.transport.call(
        "HSET", keys.core(tag, held.execution_id), "state", "aunnnr"
    )
    await engine.advance(TTL)
    assert await idle(engine).scan_once("lease_expiry") == ScanResult(processed=1)
    assert await members(engine, tag, "lease_expiry") == []
